"""Laws of files: whole or not there, damage is named, and nothing that is read can run code."""

from __future__ import annotations

import ast
import errno
import json
import os
import pickle
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from small import OwnNet
from torch import Tensor

from cofire import FileError, load_weights
from cofire.files.atomic import read_json, write_json, write_text
from cofire.files.tensors import read_tensors, write_tensors

SOURCES = Path(__file__).parents[1] / "src" / "cofire"


def some_tensors() -> dict[str, Tensor]:
    return {
        "weight": torch.arange(600.0).reshape(20, 30).t(),  # not contiguous
        "half": torch.randn(3, generator=torch.Generator().manual_seed(0)).bfloat16(),
        "count": torch.tensor(7),
        "none": torch.zeros(0, 4),
        "flag": torch.tensor([True, False]),
    }


def written(folder: Path) -> Path:
    path = folder / "some.safetensors"
    write_tensors(path, some_tensors(), {"format": "test/1", "step": 3})
    return path


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file of this process may grow beyond ``size`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# Writing


def test_tensors_and_header_come_back_as_they_were(tmp_path: Path) -> None:
    tensors, header = read_tensors(written(tmp_path))
    assert header == {"format": "test/1", "step": 3}
    assert tensors.keys() == some_tensors().keys()
    for name, tensor in some_tensors().items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)


def test_tensors_that_share_memory_can_be_written(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    write_tensors(tmp_path / "a", {"whole": whole, "part": whole[2:4]}, {})
    assert torch.equal(read_tensors(tmp_path / "a")[0]["part"], torch.tensor([2.0, 3.0]))


def test_missing_folders_are_made_and_no_other_file_is_left(tmp_path: Path) -> None:
    write_json(tmp_path / "a" / "b" / "c.json", {"x": [1, 2.5, None]})
    assert read_json(tmp_path / "a" / "b" / "c.json") == {"x": [1, 2.5, None]}
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["c.json"]


def test_who_writes_the_same_file_at_the_same_time_waits(tmp_path: Path) -> None:
    """A reader beside eight writers always finds what one of them wrote, as a whole, and no writer fails."""
    path, size, times = tmp_path / "shared", 1 << 20, 12
    write_text(path, "0" * size)
    children = []
    for name in "12345678":
        if (child := os.fork()) == 0:
            try:
                for _ in range(times):
                    write_text(path, name * size)
            except BaseException:
                os._exit(1)
            os._exit(0)
        children.append(child)
    codes: dict[int, int] = {}
    while len(codes) < len(children):
        text = path.read_text()
        assert (len(text), len(set(text))) == (size, 1)
        for child in set(children) - codes.keys():
            ended, code = os.waitpid(child, os.WNOHANG)
            codes |= {ended: code} if ended else {}
    assert set(codes.values()) == {0}
    assert [found.name for found in tmp_path.iterdir()] == ["shared"]


def test_files_get_the_permissions_of_the_umask(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    write_text(tmp_path / "text", "")
    write_tensors(tmp_path / "tensors", {}, {})
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "text", "tensors")}
    assert len(modes) == 1


@pytest.mark.parametrize("function", ["replace", "fsync"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    def fails(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = written(tmp_path)
    before = path.read_bytes()
    monkeypatch.setattr(os, function, fails)
    with pytest.raises(FileError, match=r"some\.safetensors cannot be written: .*No space left.*left as it was"):
        write_tensors(path, {"other": torch.zeros(1)}, {})
    with pytest.raises(FileError, match="cannot be written"):
        write_text(tmp_path / "new.txt", "x")
    assert path.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == ["some.safetensors"]


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = written(tmp_path)
    before = path.read_bytes()
    with full_disk(1000):
        with pytest.raises(FileError, match="cannot be written"):
            write_tensors(path, {"large": torch.zeros(1000)}, {})
        with pytest.raises(FileError, match="cannot be written"):
            write_text(tmp_path / "new.txt", "x" * 2000)
    assert path.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == ["some.safetensors"]


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match=r"cannot be written"):
        write_json(tmp_path / "file" / "c.json", {})


def test_what_a_killed_writer_left_is_taken_over(tmp_path: Path) -> None:
    class KilledError(BaseException):
        pass

    def dies(*args: Any) -> None:
        raise KilledError

    with pytest.MonkeyPatch.context() as patch:  # dead processes do not clean up
        patch.setattr(os, "fsync", dies)
        patch.setattr(Path, "unlink", lambda *args, **options: None)
        with pytest.raises(KilledError):
            written(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    written(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["some.safetensors"]


# Reading


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_a_flipped_bit_is_noticed_or_harmless(tmp_path_factory: pytest.TempPathFactory, choice: st.DataObject) -> None:
    path = written(tmp_path_factory.mktemp("flip"))
    content = bytearray(path.read_bytes())
    content[choice.draw(st.integers(0, len(content) - 1))] ^= 1 << choice.draw(st.integers(0, 7))
    path.write_bytes(content)
    try:
        tensors, header = read_tensors(path)
    except FileError:
        return
    assert header == {"format": "test/1", "step": 3}
    assert all(torch.equal(tensors[name], tensor) for name, tensor in some_tensors().items())


@given(length=st.integers(0, 2600))
@example(length=0)
@example(length=8)
@settings(deadline=None, max_examples=60)
def test_a_truncated_file_is_an_error(tmp_path_factory: pytest.TempPathFactory, length: int) -> None:
    path = written(tmp_path_factory.mktemp("cut"))
    content = path.read_bytes()
    path.write_bytes(content[: min(length, len(content) - 1)])
    with pytest.raises(FileError, match="truncated or not a safetensors file"):
        read_tensors(path)


@given(st.binary(max_size=300))
@settings(deadline=None, max_examples=100)
def test_any_bytes_are_an_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("bytes") / "x"
    path.write_bytes(content)
    with pytest.raises(FileError):
        read_tensors(path)


def test_a_changed_header_is_noticed(tmp_path: Path) -> None:
    path = written(tmp_path)
    content = path.read_bytes()
    assert content.count(b'\\"step\\": 3') == 1
    path.write_bytes(content.replace(b'\\"step\\": 3', b'\\"step\\": 4'))
    with pytest.raises(FileError, match="is damaged: its checksum is wrong"):
        read_tensors(path)


@pytest.mark.parametrize(
    ("metadata", "error"),
    [
        (None, "was not written by cofire"),
        ({"cofire": "{"}, "has a damaged header"),
        ({"cofire": "[]"}, "has a damaged header"),
        ({"cofire": "{}"}, "has a damaged header"),
        ({"cofire": '{"sha256": "0"}'}, "its checksum is wrong"),
    ],
)
def test_foreign_tensor_files_are_refused(tmp_path: Path, metadata: dict[str, str] | None, error: str) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "x", metadata=metadata)
    with pytest.raises(FileError, match=error):
        read_tensors(tmp_path / "x")


def test_missing_files_and_folders_in_their_place_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"gone\.safetensors does not exist"):
        read_tensors(tmp_path / "gone.safetensors")
    with pytest.raises(FileError, match="does not exist"):
        read_tensors(tmp_path)
    with pytest.raises(FileError, match=r"gone\.json does not exist"):
        read_json(tmp_path / "gone.json")
    with pytest.raises(FileError, match="not readable as JSON"):
        read_json(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"a": 1} x'])
def test_what_is_not_json_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(FileError, match=r"x\.json is not readable as JSON"):
        read_json(tmp_path / "x.json")


# No code from files


class Malicious:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def test_the_malicious_pickle_is_one(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Malicious(tmp_path / "mark")))
    assert (tmp_path / "mark").exists()


@pytest.mark.parametrize("how", ["torch.save", "pickle.dump"])
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_malicious_checkpoint_is_refused_unread(tmp_path: Path, how: str, suffix: str) -> None:
    path, content = tmp_path / f"evil{suffix}", {"first.weight": Malicious(tmp_path / "mark")}
    if how == "torch.save":
        torch.save(content, path)
    else:
        path.write_bytes(pickle.dumps(content))
    with pytest.raises(FileError, match="truncated, damaged or holds more than tensors"):
        load_weights(OwnNet(), path)
    with pytest.raises(FileError, match="not a safetensors file"):
        read_tensors(path)
    assert not (tmp_path / "mark").exists()


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


@pytest.mark.parametrize("path", sorted(SOURCES.rglob("*.py")), ids=lambda path: path.relative_to(SOURCES).as_posix())
def test_no_source_file_unpickles(path: Path) -> None:
    tree = ast.parse(path.read_text())
    names = {
        alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in [*node.names, ast.alias(getattr(node, "module", None) or "")]
    }
    assert not names & {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    for name, call in calls(tree):
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        if name == "torch.load":
            assert options.get("weights_only") == "True", f"line {call.lineno}"
        if name in ("np.load", "numpy.load"):
            assert options.get("allow_pickle", "False") == "False", f"line {call.lineno}"
        assert name not in ("eval", "builtins.eval", "torch.jit.load", "torch.hub.load"), f"line {call.lineno}"


def test_json_is_written_for_people(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"a": 1})
    assert (tmp_path / "x.json").read_text() == json.dumps({"a": 1}, indent=2) + "\n"
