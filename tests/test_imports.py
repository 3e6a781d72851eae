"""cofire imports with its core dependencies alone, and beside broken optional ones."""

import os
import subprocess
import sys
from pathlib import Path

import cofire

OPTIONAL = [
    *("MNN", "PIL", "jinja2", "matplotlib", "ncnn", "onnx", "onnxruntime", "openvino", "pnnx", "pyarrow", "scipy"),
    *("sklearn", "tensorboard", "timm", "tomli_w", "torchvision", "trackio", "wandb"),
]

IMPORT_EVERY_MODULE = """
import importlib, pkgutil
import cofire
for module in pkgutil.walk_packages(cofire.__path__, "cofire."):
    if not module.name.endswith("__main__"):
        print(importlib.import_module(module.name).__name__)
"""
SOURCES = Path(cofire.__file__).parent
EVERY_MODULE = {
    ".".join(("cofire", *path.relative_to(SOURCES).with_suffix("").parts)).removesuffix(".__init__")
    for path in SOURCES.rglob("*.py")
    if path.stem != "__main__"
} - {"cofire"}


def run(code: str, **env: str) -> str:
    """Output of ``code`` in a fresh interpreter, which must succeed."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ | env
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_no_optional_package() -> None:
    loaded = run("import sys, cofire; print(*sys.modules)").split()
    assert set(loaded) & set(OPTIONAL) == set()


def test_every_module_imports_with_the_core_dependencies_only() -> None:
    imported = run(f"import sys; sys.modules.update(dict.fromkeys({OPTIONAL}))\n{IMPORT_EVERY_MODULE}").split()
    assert set(imported) >= EVERY_MODULE


def test_every_module_imports_beside_a_broken_torchvision(tmp_path: Path) -> None:
    (tmp_path / "torchvision").mkdir()
    text = "raise RuntimeError('operator torchvision::nms does not exist')"
    (tmp_path / "torchvision" / "__init__.py").write_text(text)
    assert set(run(IMPORT_EVERY_MODULE, PYTHONPATH=str(tmp_path)).split()) >= EVERY_MODULE
