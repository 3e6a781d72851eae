"""``cofire completion SHELL``: a script that completes verbs and options, made of the command line itself.

Everything stands in the script, so that a press of Tab starts no Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from cofire.errors import unknown

Verbs = dict[str, list[str]]
"""Verb, or verb and sub-verb with a blank between -> what can follow it: options and sub-verbs."""


def verbs(command: Any, name: str = "") -> Verbs:
    """Of a command with all that is below it; the whole command line has the name ``""``."""
    options = sorted({name for parameter in command.params for name in parameter.opts if name.startswith("--")})
    below = dict(command.commands) if isinstance(command, typer.core.TyperGroup) else {}
    found = {name: [*below, *options, "--help"]}
    for word, each in below.items():
        found |= verbs(each, f"{name} {word}".strip())
    return found


def script(shell: str, known: Verbs) -> str:
    """The script for bash, zsh or fish."""
    if shell not in SHELLS:
        raise unknown("shell", shell, SHELLS)
    return SHELLS[shell](known)


def _bash(known: Verbs) -> str:
    cases = "\n".join(f'        "{name}") words="{" ".join(words)}" ;;' for name, words in known.items())
    groups = " ".join(sorted({name.partition(" ")[0] for name in known if " " in name}))
    return f"""# cofire completion: put this into ~/.bashrc:  source <(cofire completion bash)
_cofire() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" verb="" words=""
    [ "$COMP_CWORD" -gt 1 ] && verb="${{COMP_WORDS[1]}}"
    [[ " {groups} " == *" $verb "* && -n "$verb" && "$COMP_CWORD" -gt 2 ]] && verb="$verb ${{COMP_WORDS[2]}}"
    case "$verb" in
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    [ ${{#COMPREPLY[@]}} -eq 0 ] && COMPREPLY=($(compgen -f -- "$word"))
    return 0
}}
complete -o filenames -F _cofire cofire
"""


def _zsh(known: Verbs) -> str:
    return "autoload -Uz bashcompinit && bashcompinit\n" + _bash(known).replace("bashrc", "zshrc").replace(
        "completion bash)", "completion zsh)"
    )


def _fish(known: Verbs) -> str:
    lines = ["# cofire completion: cofire completion fish > ~/.config/fish/completions/cofire.fish"]
    for name, words in known.items():
        seen = " ; and ".join(f"__fish_seen_subcommand_from {part}" for part in name.split()) or "__fish_use_subcommand"
        for word in words:
            what = f"-l {word[2:]}" if word.startswith("--") else f"-a {word}"
            lines.append(f"complete -c cofire -n '{seen}' {what}")
    return "\n".join(lines) + "\n"


SHELLS: dict[str, Callable[[Verbs], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
