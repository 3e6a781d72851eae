"""README and docs: every Python block runs, every `cofire` command exists, every link to a file leads somewhere."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import typer.core
from small import ROOT

from cofire import cli, evaluate

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=indent)```\s*$", re.M | re.S)
SHELLS = ("bash", "sh", "shell", "console", "text", "")


class Block(NamedTuple):
    language: str
    code: str
    line: int


def blocks(text: str) -> Iterator[Block]:
    """The fenced code blocks of a page, with the line on which their code begins."""
    for found in FENCE.finditer(text):
        indent = found["indent"]
        code = "".join(line.removeprefix(indent) for line in found["code"].splitlines(keepends=True))
        yield Block(found["language"], code, text.count("\n", 0, found.start()) + 2)


def commands(code: str) -> Iterator[list[str]]:
    """The calls of `cofire` in a shell block, as lists of words; continued lines are one call."""
    for line in code.replace("\\\n", " ").splitlines():
        for call in re.split(r" {2,}(?=cofire )", line.strip().removeprefix("$ ")):  # several in columns
            if call.startswith("cofire "):
                yield shlex.split(call, comments=True)[1:]


def page_ids(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def run_page(text: str, name: str) -> int:
    """Run the Python blocks of a page in one namespace and count them; errors point into the page."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    found = [block for block in blocks(text) if block.language == "python"]
    for block in found:
        exec(compile("\n" * (block.line - 1) + block.code, name, "exec"), namespace)
    return len(found)


def unknown_options(words: list[str]) -> list[str]:
    """What the command line does not know in a call: the command, or options."""
    command: Any = typer.main.get_command(cli.app)
    known = {"--help"}
    words = list(words)
    while isinstance(command, typer.core.TyperGroup):  # its own options come first, then the name of a command
        taking = {name: parameter.nargs for parameter in command.params for name in parameter.opts}
        while words and words[0] in taking:
            del words[: 1 + taking[words[0]]]
        if not words or words[0] == "--help":
            return []
        if words[0] not in command.commands:
            return words[:1]
        command = command.commands[words.pop(0)]
    known |= {name for parameter in command.params for name in parameter.opts + parameter.secondary_opts}
    return [word for word in (word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)) if word not in known]


def test_the_twelve_lines_of_the_readme_meet_their_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    first = next(block for block in blocks((ROOT / "README.md").read_text()) if block.language == "python")
    assert first.code.count("macs=0.5") == 2  # asked for
    namespace: dict[str, Any] = {}
    exec(first.code, namespace)
    for images in ("train", "test"):  # calibrated on these, and on no image of those
        report = evaluate(namespace["gated"], namespace[images].loader(200), text="")
        assert 1 - report.reduction["executed+heads"] == pytest.approx(0.5, abs=0.005), images
    assert len([line for line in first.code.splitlines() if line]) == 12


def test_a_method_of_ones_own_takes_less_than_40_lines() -> None:
    text = (ROOT / "docs" / "extend.md").read_text()
    lengths = [len(block.code.splitlines()) for block in blocks(text) if "@register_" in block.code]
    assert len(lengths) == 3  # a gate per group, a whole method, a criterion
    assert max(lengths) < 40


@pytest.mark.parametrize("path", PAGES, ids=page_ids)
def test_the_python_blocks_of_a_page_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = path.read_text()
    assert run_page(text, page_ids(path)) == text.count("```python")


@pytest.mark.parametrize("path", PAGES, ids=page_ids)
def test_the_commands_of_a_page_exist(path: Path) -> None:
    calls = [words for block in blocks(path.read_text()) if block.language in SHELLS for words in commands(block.code)]
    assert {" ".join(words): found for words in calls if (found := unknown_options(words))} == {}


@pytest.mark.parametrize("path", PAGES, ids=page_ids)
def test_the_files_a_page_links_to_exist(path: Path) -> None:
    targets = re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", path.read_text())
    assert [target for target in targets if not (path.parent / target).exists()] == []


# The tests themselves


def test_blocks_are_found_with_language_and_line() -> None:
    text = "a\n```python\nx = 1\n```\n- b\n  ```bash\n  cofire info\n  ```\n```\nplain\n```\n"
    assert list(blocks(text)) == [
        Block("python", "x = 1\n", 3),
        Block("bash", "cofire info\n", 7),
        Block("", "plain\n", 10),
    ]


def test_blocks_share_a_namespace_and_a_failure_names_its_line() -> None:
    run_page("```python\nx = 1\n```\n```python\nassert x == 1\n```\n", "page")
    with pytest.raises(ZeroDivisionError) as failure:
        run_page("text\n\n```python\nx = 1\nx / 0\n```\n", "page")
    assert failure.traceback[-1].lineno == 4  # counted from 0


def test_commands_are_found_and_checked() -> None:
    code = "$ cofire train a.toml \\\n  --out b  # comment\nmake demo\ncofire eval b            cofire info\n"
    assert list(commands(code)) == [["train", "a.toml", "--out", "b"], ["eval", "b"], ["info"]]
    assert unknown_options(["train", "a.toml", "--out", "b", "--set", "gate.ratio=0.8"]) == []
    assert unknown_options(["train", "a.toml", "--output=b"]) == ["--output"]
    assert unknown_options(["trian", "a.toml"]) == ["trian"]
    assert unknown_options(["--help"]) == []
    assert unknown_options(["--plugin", "a.py", "--plugin", "b.py", "info", "--json"]) == []
    assert unknown_options(["--plugins", "a.py", "info"]) == ["--plugins"]
    assert unknown_options(["results", "table", "--write"]) == []
    assert unknown_options(["results", "tables"]) == ["tables"]
