"""Engines in processes that fork, spawn, are interrupted or exit in the middle of a call: nothing hangs or crashes.

Each case is a script in a process of its own, so that a hang is a timeout and a crash an exit code.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# An engine that has run with two threads, and the answer that every process must get.
BEFORE = """
import multiprocessing, os, signal, sys, threading, time
import numpy as np
import cofire
def made():
    import torch
    torch.manual_seed(0)
    return cofire.compile(cofire.create_backbone("resnet8_digits").eval())
x = np.random.default_rng(0).normal(size=(1, 1, 8, 8)).astype("f4")
pair = np.concatenate([x, -x])
def used(engine, batches=(x, pair)):
    return [engine(batch, threads=2).tobytes() for batch in batches]
"""


def run(script: str, tmp_path: Path, code: int = 0, seconds: float = 100) -> str:
    """What the script prints; it must end by itself with this exit code."""
    file = tmp_path / "script.py"
    file.write_text(BEFORE + script)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore::DeprecationWarning", str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("what", ["used(engine) == expected", "True", "globals().pop('engine') is not None"])
def test_a_forked_child_can_use_ignore_or_drop_an_engine(what: str, tmp_path: Path) -> None:
    script = f"""
engine = made()
expected = used(engine)
def child():
    sys.exit(0 if ({what}) else 1)
context = multiprocessing.get_context("fork")
for _ in range(3):
    process = context.Process(target=child)
    process.start()
    process.join(30)
    assert process.exitcode == 0, process.exitcode
assert used(engine) == expected  # the parent's threads are still there
"""
    run(script, tmp_path)


def test_children_of_children_use_the_engine_of_their_grandparent(tmp_path: Path) -> None:
    script = """
engine = made()
expected = used(engine)
for _ in range(3):
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        sys.exit(os.waitstatus_to_exitcode(status))  # an ordinary exit: engines are torn down
    assert used(engine) == expected
"""
    run(script, tmp_path)


def test_forks_beside_calls_in_other_threads(tmp_path: Path) -> None:
    script = """
engine = made()
expected = used(engine)
stop = threading.Event()
def call():
    while not stop.is_set():
        assert used(engine) == expected
threads = [threading.Thread(target=call) for _ in range(4)]
for thread in threads: thread.start()
for _ in range(40):
    child = os.fork()
    if not child:
        signal.alarm(20)  # a hang is a death
        os._exit(0 if used(engine) == expected else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0, status
stop.set()
for thread in threads: thread.join()
"""
    run(script, tmp_path)


def test_spawned_processes_make_their_own(tmp_path: Path) -> None:
    script = """
def child(queue):
    queue.put(used(made()))
if __name__ == "__main__":
    engine = made()
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    shapes = [np.frombuffer(got, "f4") for got in queue.get(timeout=60)]
    process.join(30)
    assert process.exitcode == 0
    for got, want in zip(shapes, [np.frombuffer(b, "f4") for b in used(engine)]):
        np.testing.assert_allclose(got, want, atol=1e-4)  # it may have chosen other algorithms
"""
    run(script, tmp_path)


def test_workers_of_a_data_loader_run_it(tmp_path: Path) -> None:
    script = """
import torch
from torch.utils.data import DataLoader, Dataset
engine = made()
expected = used(engine)
class Answers(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return torch.from_numpy(engine(x, threads=2)[0])
for batch in DataLoader(Answers(), batch_size=2, num_workers=2, multiprocessing_context="fork"):
    for row in batch:
        assert row.numpy().tobytes() == expected[0]
assert used(engine) == expected
"""
    run(script, tmp_path)


def test_ctrl_c_ends_the_loop_and_not_the_engine(tmp_path: Path) -> None:
    script = """
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started us in the background may ignore it
engine = made()
expected = used(engine)
caught = 0
for _ in range(10):
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        while True:
            used(engine)
    except KeyboardInterrupt:
        caught += 1
assert used(engine) == expected
print(caught)
"""
    assert run(script, tmp_path) == "10\n"


@pytest.mark.parametrize("times", range(3))
def test_the_interpreter_exits_with_calls_in_flight(times: int, tmp_path: Path) -> None:
    script = """
import atexit
engine = made()
expected = used(engine)
many = np.repeat(x, 4000, 0)  # a call takes longer than the exit
started = threading.Barrier(5)
def call():
    started.wait()
    while True:
        engine(many, threads=2)
for _ in range(4):
    threading.Thread(target=call, daemon=True).start()
started.wait()
time.sleep(0.05)
def late():  # registered last, so it runs first; and one more runs after the engine's own
    assert used(engine) == expected
    print("late")
atexit.register(late)
"""
    assert run(script, tmp_path) == "late\n"


def test_an_engine_is_dropped_while_another_thread_calls_it(tmp_path: Path) -> None:
    script = """
engine = made()
expected = used(engine)
found = []
def call(mine):
    for _ in range(50):
        found.append(used(mine) == expected)
threads = [threading.Thread(target=call, args=(engine,)) for _ in range(4)]
for thread in threads: thread.start()
del engine
for thread in threads: thread.join()
assert found == [True] * 200
"""
    run(script, tmp_path)
