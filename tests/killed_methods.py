"""SIGKILL in the training of every registered method: ``python tests/killed_methods.py FOLDER``.

The same run goes on to the same files. Each is a fork of this process, which has imported everything and computed
nothing.
"""

from __future__ import annotations

import json
import signal
import sys
from functools import partial
from pathlib import Path

import outside_method
from killing import content, in_a_fork, train_with

from cofire.gates.base import gate_types
from cofire.pruning import prune_types

assert outside_method.Outside.__name__ in gate_types()

DYING = (1, "middle", "step-00000016")  # half of this checkpoint is written; the one before is of the second epoch too

BY_EPOCH = {"BlockDrop": {"curriculum": 2}, "FBS": {"lowering": 2}, "RNP": {"exploring": 2}}  # what epochs change


def recipes() -> dict[str, str]:
    """Every method in each of its forms -> the section of a recipe that names it."""
    found = {}
    for section, types, needed in (("prune", prune_types(), {"macs": 0.5}), ("gate", gate_types(), {})):
        for config_type in dict.fromkeys(types.values()):
            for form, options in (config_type.forms or {"": {}}).items():
                name = config_type.__name__
                fields = {"type": name, **needed, **options, **BY_EPOCH.get(name, {})}
                lines = [f"[{section}]", *(f"{field} = {json.dumps(value)}" for field, value in fields.items())]
                if options.get("select") == "top":
                    lines += ["[signature]", 'kind = "uniform"', "macs = 0.5"]
                found[f"{name} {form}".strip()] = "\n".join(lines)
    return found


def check(name: str, part: str, folder: Path) -> None:
    train = partial(train_with, part, select="last")  # the best epoch may have ended before the kill
    whole, killed = folder / f"{name}-whole", folder / f"{name}-killed"
    assert in_a_fork(train, whole) == 0, f"{name} fails without being killed"
    assert in_a_fork(train, killed, DYING) == -signal.SIGKILL, f"{name} was to be killed"
    assert (killed / "checkpoints" / "step-00000012.safetensors").exists()
    assert not (killed / "checkpoints" / "step-00000016.safetensors").exists()
    assert in_a_fork(train, killed) == 0, f"{name} does not go on after a kill"
    assert content(killed) == content(whole), f"{name} ends otherwise after a kill"


if __name__ == "__main__":
    for name, part in recipes().items():
        check(name, part, Path(sys.argv[1]))
        print(name, flush=True)
