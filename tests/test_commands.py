"""What holds for every command: --json, completion; and `cofire doctor`, start without PyTorch, progress in logs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import typer.core

from cofire import cli, progress
from cofire.completion import SHELLS, script, verbs
from cofire.doctor import _packages, examine
from cofire.errors import ConfigError
from cofire.start import LIGHT

WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from cofire.start import main; main()"
WHOLE: Any = typer.main.get_command(cli.app)


def commands(command: Any = WHOLE, name: str = "") -> Iterator[tuple[str, Any]]:
    """(name, command) of every verb, those of groups included."""
    if not isinstance(command, typer.core.TyperGroup):
        yield name, command
        return
    for word, each in command.commands.items():
        yield from commands(each, f"{name} {word}".strip())


COMMANDS = dict(commands())


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"completion"}))  # whose output is a script
def test_json_is_the_same_flag_in_every_command(name: str) -> None:
    (flag,) = [parameter for parameter in COMMANDS[name].params if "--json" in parameter.opts]
    assert flag.is_flag
    assert flag.help == "Print JSON for machines in place of tables."


# Completion


def completed(*words: str) -> list[str]:
    """What bash offers for the last of the words, with our script."""
    line = " ".join(f"'{word}'" for word in ("cofire", *words))
    code = f"COMP_WORDS=({line}); COMP_CWORD={len(words)}; _cofire; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    text = script("bash", verbs(WHOLE)) + code
    return subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True).stdout.split()


def test_bash_completes_verbs_options_and_files(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(completed("")) >= {name.split()[0] for name in COMMANDS}
    assert completed("compi") == ["compile"]
    assert completed("solve", "--la") == ["--latency-ms"]
    assert completed("results", "ta") == ["table"]
    assert completed("results", "table", "--wr") == ["--write"]
    (tmp_path / "some.cofire").touch()
    monkeypatch.chdir(tmp_path)
    assert completed("run", "so") == ["some.cofire"]


@pytest.mark.parametrize("shell", SHELLS)
def test_every_verb_and_option_is_in_each_shell_s_script(shell: str) -> None:
    text = script(shell, verbs(WHOLE))
    for name, command in COMMANDS.items():
        assert name.split()[-1] in text
        options = [option for parameter in command.params for option in parameter.opts if option.startswith("--")]
        assert [option for option in options if option.removeprefix("--") not in text] == []


def test_an_unknown_shell_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'bash'"):
        script("bsh", verbs(WHOLE))


# Doctor


def test_doctor_says_what_is_there_and_what_is_missing() -> None:
    found = examine()
    assert found["engine"]["kernel"] in ("v2", "v3", "v4", "base", "ref")
    assert found["engine"]["error"] is None
    assert found["packages"]["core"]["numpy"]
    assert found["packages"]["serve"]["starlette"]
    parsed = _packages(["numpy>=1", 'nowhere>=2; extra == "far"', "cofire[data]; extra == 'dev'"])
    assert parsed["far"] == {"nowhere": None}
    assert set(parsed) == {"core", "far"}


# Without PyTorch


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments], capture_output=True, text=True, check=False, env=os.environ
    )


def test_doctor_runs_without_torch() -> None:
    done = start("doctor", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["engine"]["kernel"]


def test_a_verb_that_needs_torch_says_so_without_it() -> None:
    done = start("info")
    assert (done.returncode, done.stdout) == (2, "")
    assert "torch is needed here: pip install cofire; without it there is: doctor, serve" in done.stderr


def test_light_verbs_are_those_of_the_whole_command_line() -> None:
    assert {name: COMMANDS[name].callback.__wrapped__ for name in LIGHT} == LIGHT


# Progress


def test_without_a_terminal_progress_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.0)
    with progress.progress("counting") as bar:
        task = bar.add_task("counting", total=4)
        for _ in range(2):
            bar.advance(task)
        bar.update(task, completed=4)
        assert list(bar.track("ab", description="tracking")) == ["a", "b"]
    assert capsys.readouterr().err.splitlines() == [
        *("counting: 1 of 4 (25 %)", "counting: 2 of 4 (50 %)", "counting: 4 of 4 (100 %)"),
        *("tracking: 1 of 2 (50 %)", "tracking: 2 of 2 (100 %)"),
    ]


def test_steps_too_short_for_a_line_each_are_told_of_together(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 10_000.0
    for clock in ("_due", "_seen"):
        monkeypatch.setattr(progress._Lines, clock, float("-inf"))
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now))
    for step in range(8):  # of 20 seconds each, with a long rest before the last two
        now += 1000 * (step == 6)
        with progress.progress("step") as bar:
            task = bar.add_task(f"step {step}", total=2)
            now += 20
            bar.advance(task)
    assert capsys.readouterr().err.splitlines() == [f"step {step}: 1 of 2 (50 %)" for step in (1, 3, 5, 7)]


def test_work_that_is_soon_done_or_has_no_name_says_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress._Lines, "_seen", float("-inf"))  # whatever ran before
    for text in ("counting", ""):
        with progress.progress(text) as bar:
            list(bar.track(range(3), description=text))
    assert capsys.readouterr().err == ""
