"""Several processes of `cofire train`: one is killed, the others say so and end; the same command goes on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from launching import environment, start

from cofire import TrainingError
from cofire.files.tensors import read_tensors
from cofire.training.processes import together

RECIPE = """
[data]
name = "synthetic"
batch_size = 8
args = {train = 160, test = 16, shape = [1, 8, 8]}

[backbone]
name = "resnet8_digits"

[train]
epochs = 2
lr = 0.05
checkpoint_steps = 2
"""
COFIRE = [sys.executable, "-c", "from cofire.cli import main; main()"]


def steps_logged(out: Path) -> int:
    log = out / "log.jsonl"
    return len(log.read_text().splitlines()) if log.exists() else 0


@pytest.mark.slow
def test_when_one_process_is_killed_the_other_says_so_and_the_same_command_goes_on(tmp_path: Path) -> None:
    recipe, out, whole = tmp_path / "recipe.toml", tmp_path / "killed", tmp_path / "whole"
    recipe.write_text(RECIPE)
    first, second = start([*COFIRE, "train", str(recipe), "--out", str(out)])
    while steps_logged(out) < 4 and first.poll() is None:
        time.sleep(0.02)
    second.kill()
    said, error = first.communicate(timeout=60)  # it neither hangs nor goes on alone
    second.communicate()
    assert second.returncode == -signal.SIGKILL
    assert first.returncode == 2, error
    assert "cofire: another process of this run has ended" in error
    assert "Call the same command again" in error
    assert "Traceback" not in error
    assert said == ""
    assert not (out / "result.json").exists()

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    command = [*torchrun, *COFIRE, "train", str(recipe), "--out", str(out), "--json"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["n"]["test"] == 16  # one summary, although there are two processes
    workers = start([*COFIRE, "train", str(recipe), "--out", str(whole)])
    texts = [worker.communicate(timeout=120) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], texts
    assert "top-1" in texts[0][0]
    assert texts[1][0] == ""
    (ours, _), (theirs, _) = (read_tensors(folder / "model.safetensors") for folder in (out, whole))
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_only_errors_of_the_connection_blame_another_process() -> None:
    lost = RuntimeError("[/src/third_party/gloo/gloo/transport/tcp/pair.cc:1] Connection closed by peer")
    for error in (lost, torch.distributed.DistNetworkError("no route")):
        with pytest.raises(TrainingError, match="another process of this run has ended") as raised, together():
            raise error
        assert raised.value.__cause__ is error
    own = RuntimeError("out of memory")
    with pytest.raises(RuntimeError) as raised_too, together():
        raise own
    assert raised_too.value is own
