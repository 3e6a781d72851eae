"""cofire imports with its core dependencies alone, and beside broken optional ones."""

import ast
import os
import pickle
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from small import ROOT

import cofire

OPTIONAL = [
    *(
        "MNN",
        "PIL",
        "gradio",
        "jinja2",
        "matplotlib",
        "ncnn",
        "onnx",
        "onnxruntime",
        "openvino",
        "pnnx",
        "pyarrow",
        "scipy",
    ),
    *("gradio", "sklearn", "starlette", "tensorboard", "timm", "tomli_w", "torchvision", "trackio", "uvicorn", "wandb"),
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


def required() -> Iterator[tuple[str, str, str]]:
    """(place, package, extra) of each call of `require`."""
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "require":
                given = dict(zip(("module", "package", "extra"), node.args, strict=False))
                given |= {word.arg: word.value for word in node.keywords if word.arg}
                package, extra = (ast.literal_eval(given[key]) for key in ("package", "extra"))
                yield f"{path.relative_to(SOURCES)}:{node.lineno}", package, extra


@pytest.mark.parametrize(("place", "package", "extra"), list(required()))
def test_a_missing_package_is_asked_for_by_the_extra_that_lists_it(place: str, package: str, extra: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert package in {re.split(r"[<>=;\[ ]", wanted)[0] for wanted in extras[extra]}, place


def test_the_package_goes_to_another_process_by_its_name() -> None:
    assert pickle.loads(pickle.dumps(cofire)) is cofire
