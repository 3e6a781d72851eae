"""The compiled side: what the optional C++ extension gives, and whether it is there.

The extension is built where a C++ compiler is found at install time; everything else in cofire
works without it.
"""


def native_features() -> tuple[str, ...] | None:
    """Instruction sets of this machine that native kernels can use, such as ``("avx2", "fma")``.

    Returns:
        ``None`` when the extension was not built.
    """
    try:
        from cofire.runtime import _native
    except ImportError:
        return None
    return tuple(_native.cpu_features())
