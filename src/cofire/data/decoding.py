"""Encoded pictures to pixels: Pillow for one picture, pyarrow for a file of many, and a cache of the result.

Both packages are extras, imported when a picture or a Parquet file is read.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import logging
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from cofire.errors import ConfigError, DataError, FileError
from cofire.extras import require
from cofire.files.atomic import write_atomically
from cofire.progress import progress

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger("cofire")

MOST_CLASSES = 1 << 20
Decoded = tuple[Tensor, Tensor, tuple[str, ...]]  # pixels_NCHW, label_N, class names
FORMATS = (
    "JPEG",
    "PNG",
    "WEBP",
    "BMP",
    "GIF",
    "PPM",
    "TIFF",
)  # to try all that Pillow knows takes twice as long
SKIP = 'unreadable = "skip" (in a recipe under [data.args]) leaves such pictures out'
Fit = Callable[["Image"], "Image"]  # brings an RGB picture to the size of its set


def cache_root() -> Path:
    """Where decoded pictures are kept."""
    return Path.home() / ".cache" / "cofire"


def decode(
    pictures: Sequence[tuple[str, Path | bytes]],
    size: int,
    fit: Fit,
    unreadable: Literal["error", "skip"] = "error",
    way_out: str = SKIP,
) -> tuple[Tensor, Tensor]:
    """Pixels of encoded pictures, uint8 (N, 3, size, size), and which of them they are, int64 (N,).

    Args:
        pictures: for each, what errors call it, and its file or its bytes.
        size: height and width that ``fit`` gives, at least 1.
        fit: brings one RGB picture to size x size.
        unreadable: ``skip`` leaves out pictures that cannot be read, with a warning that counts and names them.
        way_out: what the error about such a picture says can be done.
    """
    if size < 1:
        raise ConfigError(f"size of pictures must be at least 1, got {size}")
    require("PIL.Image", package="pillow", extra="data")
    pixels_NCHW = np.empty((len(pictures), 3, size, size), dtype=np.uint8)
    readable = torch.ones(len(pictures), dtype=torch.bool)
    # One thread: Pillow holds the interpreter's lock while it decodes WebP, so that two take longer than one.
    with progress("decoding") as bar:
        for n, (name, content) in enumerate(bar.track(pictures, description="decoding")):
            try:
                pixels_NCHW[n] = channels_first(fit(open_rgb(content)))
            except Exception as error:  # each of Pillow's decoders has its own: OSError, SyntaxError, ...
                if unreadable == "error":
                    raise DataError(f"picture {name} cannot be read: {error}; {way_out}") from error
                readable[n] = False
    if skipped := [pictures[n][0] for n in (~readable).nonzero().flatten().tolist()]:
        logger.warning("%d of %d pictures cannot be read and are left out: %s", len(skipped), len(pictures), skipped)
    row_N = readable.nonzero().flatten()
    decoded = torch.from_numpy(pixels_NCHW)
    return decoded[row_N] if skipped else decoded, row_N


def open_rgb(content: Path | bytes) -> Image:
    """One encoded picture, decoded, 8 bits in each of red, green and blue; raises whatever Pillow's decoder does.

    It is turned as its EXIF tag says. Of 16 bits per channel the upper 8 are taken.
    """
    pillow = require("PIL.Image", package="pillow", extra="data")
    with pillow.open(io.BytesIO(content) if isinstance(content, bytes) else content, formats=FORMATS) as image:
        if image.mode.startswith("I;16"):  # Pillow would clip these to 255 instead of scaling them
            image = pillow.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))
        elif image.mode[0] in "IF":
            raise ValueError(f"must have 8 or 16 bits per channel, got Pillow's mode {image.mode}")
        else:
            image = importlib.import_module("PIL.ImageOps").exif_transpose(image)
        rgb: Image = image.convert("RGBA").convert("RGB") if image.mode == "P" else image.convert("RGB")
        return rgb


def channels_first(image: Image) -> NDArray[np.uint8]:
    """The pixels of an RGB picture, (3, H, W)."""
    return np.asarray(image).transpose(2, 0, 1)


def centre(image: Image, size: int, shorter: int) -> Image:
    """The middle size x size pixels, after resizing so that the shorter side is ``shorter`` (>= size)."""
    if min(image.size) != shorter:
        image = resized(image, shorter)
    left, top = (round((side - size) / 2) for side in image.size)
    return image.crop((left, top, left + size, top + size))


def middle(image: Image, size: int) -> Image:
    """What a network is shown of a picture: all of it if it has the size, else the middle of it, resized so that the
    shorter side is 256 / 224 of the size."""
    return image if image.size == (size, size) else centre(image, size, round(size * 256 / 224))


def resized(image: Image, shorter: int) -> Image:
    """The picture with its shorter side ``shorter`` pixels long, by bilinear interpolation with antialiasing."""
    width, height = (side * shorter // min(image.size) for side in image.size)
    return image.resize((width, height), importlib.import_module("PIL.Image").Resampling.BILINEAR)


def exactly(image: Image, size: int) -> Image:
    """The picture as it is, which must be size x size."""
    if image.size != (size, size):
        raise ValueError(f"must be {size}x{size}, got {image.width}x{image.height}")
    return image


def read_parquet(path: Path, size: int, fit: Fit, unreadable: Literal["error", "skip"] = "error") -> Decoded:
    """Pixels, labels and class names of a Parquet file with columns ``image{bytes, path}`` and ``label``.

    Class names are those of the file's metadata (`class_names`), else the labels as text.
    """
    parquet = require("pyarrow.parquet", package="pyarrow", extra="data")
    if not path.is_file():
        raise FileError(f"Parquet file of pictures not found: {path}")
    try:
        table = parquet.read_table(path, columns=["image", "label"])
        rows = table.column("image").to_pylist()
        pictures = [(f"{row['path'] or n} of {path}", bytes(row["bytes"])) for n, row in enumerate(rows)]
        labels = [int(label) for label in table.column("label").to_pylist()]
        classes = class_names(table.schema) or numbered(max(labels, default=-1) + 1)
    except Exception as error:  # damaged bytes, missing columns, nulls: pyarrow's errors, KeyError, TypeError
        hint = "must be Parquet with columns image{bytes, path} and label"
        raise FileError(f"{path} {hint}: {error}") from error
    pixels_NCHW, row_N = decode(pictures, size, fit, unreadable)
    return pixels_NCHW, torch.tensor(labels, dtype=torch.int64)[row_N], tuple(classes)


def numbered(count: int) -> list[str]:
    """Names of classes that have none: their numbers.

    Raises:
        DataError: a label is so large that it can be no class: a damaged file must not fill the memory with names.
    """
    if count > MOST_CLASSES:
        raise DataError(f"labels without names must be below {MOST_CLASSES}, got {count - 1}")
    return [str(label) for label in range(count)]


def class_names(schema: Any) -> list[str]:
    """What the metadata of a Parquet file calls its classes; none where it does not say.

    Understood are the JSON list ``class_names``, and the ClassLabel that Hugging Face's datasets write.
    """
    metadata = schema.metadata or {}
    if b"class_names" in metadata:
        return [str(name) for name in json.loads(metadata[b"class_names"])]
    features = json.loads(metadata.get(b"huggingface", b"{}")).get("info", {}).get("features", {})
    return [str(name) for name in features.get("label", {}).get("names", ())]


def read_parquet_once(path: Path, size: int, fit: Fit, prefix: str) -> Decoded:
    """`read_parquet` through a cache, ``<prefix>-<fingerprint of the file>.safetensors`` in `cache_root`.

    A cache that is damaged or cannot be written is logged and does no harm.
    """
    if not path.is_file():
        raise FileError(f"Parquet file of pictures not found: {path}")
    with path.open("rb") as file:
        fingerprint = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    cache = cache_root() / f"{prefix}-{fingerprint}.safetensors"
    if cache.exists():
        try:
            return _read_cache(cache)
        except Exception as error:  # whatever is wrong with it, the pictures themselves are still there
            logger.warning("%s is damaged (%s); it is made again from %s", cache, error, path)
    decoded = read_parquet(path, size, fit)
    try:
        _write_cache(cache, decoded)
    except FileError as error:
        logger.warning("decoded pictures of %s are not cached: %s", path, error)
    return decoded


def _read_cache(cache: Path) -> Decoded:
    with safe_open(cache, "pt") as file:
        header = json.loads(file.metadata()["cofire"])
        decoded = file.get_tensor("pixels"), file.get_tensor("labels"), tuple(header["classes"])
    if header["checksum"] != _checksum(decoded):
        raise ValueError("its checksum is wrong")
    return decoded


def _write_cache(cache: Path, decoded: Decoded) -> None:
    pixels_NCHW, label_N, classes = decoded
    header = json.dumps({"classes": classes, "checksum": _checksum(decoded)})
    write_atomically(cache, save({"pixels": pixels_NCHW, "labels": label_N}, metadata={"cofire": header}))


def _checksum(decoded: Decoded) -> int:
    pixels_NCHW, label_N, classes = decoded
    what = repr((pixels_NCHW.dtype, pixels_NCHW.shape, label_N.tolist(), classes))
    return zlib.crc32(pixels_NCHW.numpy().data, zlib.crc32(what.encode()))
