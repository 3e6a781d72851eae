"""The map in the docstring of ``cofire/__init__.py`` is complete, and imports follow it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent / "src" / "cofire"
MAX_LINES = 400
MAP_LINE = re.compile(r"(?P<indent> *)(?P<name>\w+(?:\.pyi?|/))(?: {2,}|$)")  # "    errors.py    what it is"


def read_map(docstring: str) -> list[str]:
    """Paths below ``src/cofire`` in the order of the map; folders end in ``/``."""
    lines = [match for line in docstring.splitlines() if (match := MAP_LINE.match(line))]
    paths: list[str] = []
    folders: list[str] = []
    for line in lines:
        level = (len(line["indent"]) - len(lines[0]["indent"])) // 4
        del folders[level:]
        paths.append("".join([*folders, line["name"]]))
        if line["name"].endswith("/"):
            folders.append(line["name"])
    return paths


def load_map() -> list[str]:
    docstring = ast.get_docstring(ast.parse((ROOT / "__init__.py").read_text()), clean=False)
    return read_map(docstring or "")


def source_files() -> dict[str, str]:
    """Path below ``src/cofire`` -> text of every Python file; ``gates/__init__.py`` is ``gates/``."""
    files = sorted([*ROOT.rglob("*.py"), *ROOT.rglob("*.pyi")])
    return {file.relative_to(ROOT).as_posix().removesuffix("__init__.py"): file.read_text() for file in files}


def imported(path: str, text: str, known: dict[str, str]) -> Iterator[tuple[int, str]]:
    """(line number, path) of each file of cofire that a file imports, wherever in its text."""

    def find(module: str) -> str | None:
        stem = "/".join(module.split(".")[1:])
        candidates = (f"{stem}.py", f"{stem}.pyi", f"{stem}/" if stem else "")
        return next((name for name in candidates if name in known), None)

    package = ["cofire", *path.split("/")[:-1]]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            # `from package import name`: the name is a file, or something the package itself holds
            modules = [
                f"{base}.{alias.name}" if find(f"{base}.{alias.name}") is not None else base for alias in node.names
            ]
        else:
            continue
        for module in modules:
            if module.split(".")[0] == "cofire" and (target := find(module)) is not None:
                yield node.lineno, target


def position(path: str, order: list[str]) -> float:
    """Place of a file in the map; a package's ``__init__`` comes just after the files it collects."""
    if path.endswith("/"):
        return max(i for i, name in enumerate(order) if name.startswith(path)) + 0.5
    return order.index(path)


def upward_imports(order: list[str], files: dict[str, str]) -> list[str]:
    """One line of text for each import of a file that is not above the importing one."""
    return [
        f"{path}:{line} imports {target or '__init__.py'}"
        for path, text in files.items()
        if path  # the top __init__ collects everything; no file may import from it
        for line, target in imported(path, text, files)
        if target == "" or (target != path and position(target, order) > position(path, order))
    ]


def test_every_file_is_on_the_map() -> None:
    assert set(source_files()) - {""} == set(load_map()) - {"__init__.py"}


def test_no_file_is_on_the_map_twice() -> None:
    order = load_map()
    assert len(order) == len(set(order))


def test_files_import_only_from_files_above_them() -> None:
    assert upward_imports(load_map(), source_files()) == []


def test_no_file_is_too_long() -> None:
    lengths = {path or "__init__.py": len(text.splitlines()) for path, text in source_files().items()}
    assert {path: length for path, length in lengths.items() if length > MAX_LINES} == {}


def test_a_map_is_read_in_order_with_its_folders() -> None:
    text = "Title.\n\n    a.py    first\n    b/      folder\n        c.py  inside\n    d.py    last\n\nEnd.\n"
    assert read_map(text) == ["a.py", "b/", "b/c.py", "d.py"]


def test_an_import_of_a_lower_file_is_found() -> None:
    order = ["a.py", "b/", "b/c.py", "b/d.py", "e.py"]
    files = {
        "": "from cofire.e import x",
        "a.py": "def f():\n    import cofire.e",
        "b/": "from cofire.b.d import x\nfrom .c import y",
        "b/c.py": "from . import d\nfrom ..a import x\nimport numpy",
        "b/d.py": "from cofire.b import x",
        "e.py": "from cofire import a, b\nfrom cofire import __version__",
    }
    assert upward_imports(order, files) == [
        "a.py:2 imports e.py",
        "b/c.py:1 imports b/d.py",
        "b/d.py:1 imports b/",
        "e.py:2 imports __init__.py",
    ]


def test_one_method_is_named_in_its_own_files_only() -> None:
    """Generic code asks for abilities; the registry, the map and the paper's tables may name it."""
    allowed = re.compile(r"(gates/ftwt\w*\.py|gates/|public\.py|(\w+/)*paper\.py|zoo/.*|)")
    naming = [path for path, text in source_files().items() if re.search(r"\bFTWT\w*\b", text)]
    assert [path for path in naming if not allowed.fullmatch(path)] == []
    assert "gates/ftwt.py" in naming
