def cpu_features() -> list[str]:
    """Instruction sets of this machine that kernels can use."""
