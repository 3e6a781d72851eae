"""Where images come from: each function reads one kind of source and returns its images."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cofire.data.archives import ARCHIVES, read_prepared
from cofire.data.archives import prepare as prepare_archive
from cofire.data.decoding import cache_root, centre, decode, exactly, middle, read_parquet, read_parquet_once
from cofire.data.folders import check_same_classes, class_folders, existing, pictures_below
from cofire.data.images import AbstractImages, Images
from cofire.data.layouts import SUMMARY, check_prepared, open_prepared
from cofire.data.layouts import prepare as prepare_imagenet
from cofire.data.shards import Shards
from cofire.data.stored import StoredImages
from cofire.errors import ConfigError, FileError, unknown
from cofire.extras import require

# The colour statistics of ImageNet, with which most published weights of the field were trained.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
_BELOW = "data:"  # how a place begins that is below the data folder


def digits() -> tuple[Images, Images]:
    """Handwritten digits of scikit-learn as (train, test): 1,437 and 360 grey images of 8x8, 10 classes.

    They come with scikit-learn, so nothing is downloaded. The split is fixed and fair to every class.
    """
    bunch = require("sklearn.datasets", package="scikit-learn", extra="demo").load_digits()
    images = Images(
        pixels_NCHW=torch.tensor(bunch.images * (255 / 16)).round().to(torch.uint8).unsqueeze(1),
        label_N=torch.tensor(bunch.target, dtype=torch.int64),
        classes=tuple(str(digit) for digit in range(10)),
        mean=(0.305,),
        std=(0.376,),
        name="digits",
    )
    return images.split(360)


def cifar10(
    root: str | Path | None = None, mean: tuple[float, ...] = MEAN, std: tuple[float, ...] = STD
) -> tuple[Images, Images]:
    """CIFAR-10 as (train, test): 50,000 and 10,000 colour images of 32x32, 10 classes.

    Reads what ``cofire data cifar10`` made, or else ``train.parquet`` and ``test.parquet``, in the folder ``cifar10``
    below ``root``. Decoding Parquet takes some seconds and is done once: the pixels are kept in ``~/.cache/cofire``.

    Args:
        root: the data folder. Default: $COFIRE_DATA, else ``~/.cache/cofire``.
        mean: of the normalisation, one value per channel.
        std: of the normalisation, one value per channel.
    """
    return _cifar("cifar10", root, mean, std)


def cifar100(
    root: str | Path | None = None, mean: tuple[float, ...] = MEAN, std: tuple[float, ...] = STD
) -> tuple[Images, Images]:
    """CIFAR-100 as (train, test): 50,000 and 10,000 colour images of 32x32, 100 (fine) classes; as `cifar10`."""
    return _cifar("cifar100", root, mean, std)


def _cifar(
    name: str, root: str | Path | None, mean: tuple[float, ...], std: tuple[float, ...]
) -> tuple[Images, Images]:
    home = _home(name, root)
    ready = all((home / f"{part}.safetensors").is_file() for part in ("train", "test"))
    missing = [part for part in ("train.parquet", "test.parquet") if not (home / part).is_file()]
    if missing and not ready:
        raise FileError(
            f"{name} not found: {home} has no {' and no '.join(missing)}, with columns image{{bytes, path}} and label, "
            f"nor what `cofire data {name}` makes of the original archive; root= or the variable COFIRE_DATA names the "
            f"folder that holds {name}/"
        )

    def part(part: str) -> Images:
        if ready:
            pixels_NCHW, label_N, classes = read_prepared(home / f"{part}.safetensors")
        else:
            path = home / f"{part}.parquet"
            pixels_NCHW, label_N, classes = read_parquet_once(path, 32, lambda image: exactly(image, 32), prefix=name)
        return Images(
            pixels_NCHW=pixels_NCHW, label_N=label_N, classes=classes, mean=mean, std=std, name=f"{name} {part}"
        )

    return part("train"), part("test")


def imagenet(
    root: str | Path | None = None,
    size: int = 224,
    mean: tuple[float, ...] = MEAN,
    std: tuple[float, ...] = STD,
) -> tuple[StoredImages, StoredImages]:
    """ImageNet, or another set prepared by ``cofire data imagenet --from FOLDER``, as (train, val); read lazily.

    The training pictures come in one fixed shuffled order, so that the first few show all classes.

    Args:
        root: the data folder, as in `cifar10`.
        size: height and width of the pictures, at least 1.
        mean: of the normalisation, one value per channel.
        std: of the normalisation, one value per channel.
    """
    home = _home("imagenet", root)
    if not (home / SUMMARY).is_file():
        raise FileError(
            f"imagenet not found: {home} has no {SUMMARY}; make it from your copy: cofire data imagenet --from FOLDER; "
            "root= or the variable COFIRE_DATA names the folder that holds imagenet/"
        )
    train, val, classes = open_prepared(home)

    def part(name: str, store: Shards, order_N: Tensor) -> StoredImages:
        return StoredImages(
            store=store,
            row_N=order_N,
            label_N=store.label_N[order_N],
            classes=classes,
            size=size,
            mean=mean,
            std=std,
            name=f"imagenet {name}",
        )

    # RandomState promises never to change its stream.
    shuffled_N = torch.from_numpy(np.random.RandomState(0).permutation(len(train)))
    return part("train", train, shuffled_N), part("val", val, torch.arange(len(val)))


def prepare(
    name: str, origin: str | Path | None = None, root: str | Path | None = None, **options: object
) -> tuple[AbstractImages, AbstractImages]:
    """The (train, test) images of a source, brought into the data folder first if they are not there, and checked.

    Args:
        name: one of `list_sources`.
        origin: of CIFAR, the original archive or a folder with its files; by default it is downloaded. Of imagenet, a
            folder of pictures; by default what was prepared before is read in full and checked.
        root: the data folder, as in `cifar10`.
        options: of imagenet, ``shorter`` and ``unreadable``: see `cofire.data.layouts.prepare`.

    Raises:
        FileError: no network, a damaged archive, ...; nothing half-written stays.
    """
    if options and (name != "imagenet" or origin is None):
        raise ConfigError(f"{name} is prepared without {' and '.join(options)}; imagenet takes them with an origin")
    if name == "imagenet":
        home = _home(name, root)
        if origin is not None:
            prepare_imagenet(origin, home, **options)  # type: ignore[arg-type]
        elif (home / SUMMARY).is_file():
            check_prepared(home)
        return source(name, root=str(home.parent))
    if name not in ARCHIVES:
        if origin is not None:
            made = ", ".join((*ARCHIVES, "imagenet"))
            raise ConfigError(f"{name} comes with the library or names its own files; only {made} are prepared")
        return source(name)
    home = _home(name, root)
    if origin is not None or not any(home.glob("train.*")):
        prepare_archive(name, home, origin)
    return source(name, root=str(home.parent))


def imagenet_parquet(
    path: str | Path,
    size: int = 224,
    mean: tuple[float, ...] = MEAN,
    std: tuple[float, ...] = STD,
    unreadable: Literal["error", "skip"] = "error",
) -> Images:
    """The pictures of one Parquet file with columns ``image{bytes, path}`` and ``label``, all in memory.

    Of each stored picture the middle ``size`` x ``size`` pixels are taken; one whose shorter side is below
    ``size`` is enlarged first, none is shrunk.

    Args:
        path: the file.
        size: height and width of the result, at least 1.
        mean: of the normalisation, one value per channel.
        std: of the normalisation, one value per channel.
        unreadable: as in `folder`.
    """
    path = Path(path).expanduser()
    pixels_NCHW, label_N, classes = read_parquet(
        path, size, lambda image: centre(image, size, shorter=max(size, min(image.size))), unreadable
    )
    return Images(pixels_NCHW=pixels_NCHW, label_N=label_N, classes=classes, mean=mean, std=std, name=path.stem)


def folder(
    root: str | Path,
    size: int = 224,
    labelled: bool = True,
    unreadable: Literal["error", "skip"] = "error",
    mean: tuple[float, ...] = MEAN,
    std: tuple[float, ...] = STD,
) -> Images:
    """The pictures below a folder, all in memory: N * 3 * size * size bytes.

    A picture that is size x size is taken as it is; of others the shorter side is resized to size * 256 / 224, then the
    middle is cut out. Files count as pictures by their suffix (jpg, png, webp, ...); others, and names that begin with
    a dot, do not count.

    Args:
        root: with ``labelled``, holds one folder per class, whose names in alphabetical order are the
            classes 0, 1, ...; without, any pictures at any depth.
        size: height and width of the result, at least 1.
        labelled: whether folders are classes.
        unreadable: ``skip`` leaves damaged pictures out, with a warning that counts and names them.
        mean: of the normalisation, one value per channel.
        std: of the normalisation, one value per channel.
    """
    root = Path(root).expanduser()
    groups = class_folders(root) if labelled else {"": pictures_below(existing(root))}
    pictures = [(str(file), file) for files in groups.values() for file in files]
    labels = [label for label, files in enumerate(groups.values()) for _ in files]
    pixels_NCHW, row_N = decode(pictures, size, lambda image: middle(image, size), unreadable)
    return Images(
        pixels_NCHW=pixels_NCHW,
        label_N=torch.tensor(labels)[row_N] if labelled else None,
        classes=tuple(groups) if labelled else (),
        mean=mean,
        std=std,
        name=root.resolve().name,
    )


def pictures(
    train: str | Path,
    test: str | Path | float = 0.2,
    size: int = 224,
    labelled: bool = True,
    unreadable: Literal["error", "skip"] = "error",
    mean: tuple[float, ...] = MEAN,
    std: tuple[float, ...] = STD,
) -> tuple[Images, Images]:
    """(train, test) from two places, each a folder of class folders (`folder`) or a Parquet file (`imagenet_parquet`).

    Or from one place, of which a share is held out for testing: always the same pictures, a fair share of each class.

    Args:
        train: with ``labelled=False`` the pictures count as unlabelled and may lie at any depth: enough for estimating
            and for training heads alone. A place that begins with ``data:`` is below the data folder, as in `cifar10`.
        test: labelled; says what the classes are. Or the share of ``train`` to hold out, in (0, 1).
        size, unreadable, mean, std: as in `folder`.
    """

    def read(place: str | Path, labelled: bool) -> Images:
        named = str(place)
        below = named.startswith(_BELOW)
        place = _home(named.removeprefix(_BELOW), None) if below else Path(place).expanduser()
        if place.suffix == ".parquet":
            return imagenet_parquet(place, size, mean, std, unreadable)
        return folder(place, size, labelled, unreadable, mean, std)

    if isinstance(test, (int, float)):
        if not 0 < test < 1:
            raise ConfigError(f"test must be a place, or a share of train to hold out in (0, 1), got {test}")
        if not labelled:
            raise ConfigError("test must be a place where train is unlabelled: pictures to test on need labels")
        whole = read(train, labelled=True)
        return whole.split(min(len(whole) - 1, max(1, round(test * len(whole)))))
    tested, trained = read(test, labelled=True), read(train, labelled)
    if not labelled:
        return dataclasses.replace(trained, label_N=None, classes=tested.classes), tested
    check_same_classes({str(train): trained.classes, str(test): tested.classes})
    return trained, tested


def synthetic(n: int, shape: tuple[int, int, int] = (3, 32, 32), classes: int = 10, seed: int = 0) -> Images:
    """Learnable images without files: a smooth random pattern per class, under noise.

    Image i is of class i % classes. The patterns depend on shape, classes and seed, not on ``n``; parts of
    one set (`Images.split`) serve as training and test set.

    Args:
        n: number of images, at least 1.
        shape: (C, H, W).
        classes: number of classes, at least 1.
        seed: of patterns and noise.
    """
    if n < 1 or classes < 1 or len(shape) != 3 or min(shape) < 1:
        got = f"got n={n}, classes={classes}, shape={shape}"
        raise ConfigError(f"synthetic: n, classes and each of shape (C, H, W) must be at least 1, {got}")
    channels, height, width = shape
    generator = torch.Generator().manual_seed(seed)
    coarse_KCHW = torch.randn(classes, channels, 4, 4, generator=generator)
    pattern_KCHW = F.interpolate(coarse_KCHW, size=(height, width), mode="bilinear")
    label_N = torch.arange(n) % classes
    noise_NCHW = torch.randn(n, channels, height, width, generator=generator)
    return Images(
        pixels_NCHW=(128 + 32 * pattern_KCHW[label_N] + 48 * noise_NCHW).clamp_(0, 255).to(torch.uint8),
        label_N=label_N,
        classes=tuple(str(label) for label in range(classes)),
        mean=(0.5,) * channels,
        std=(0.25,) * channels,
        name="synthetic",
    )


def _synthetic_pair(
    train: int = 2048,
    test: int = 512,
    shape: tuple[int, int, int] = (3, 32, 32),
    classes: int = 10,
    seed: int = 0,
) -> tuple[Images, Images]:
    if train < 1 or test < 1:
        raise ConfigError(f"synthetic: train and test must be at least 1, got {train} and {test}")
    return synthetic(train + test, shape, classes, seed).split(test)


_SOURCES: dict[str, Callable[..., tuple[AbstractImages, AbstractImages]]] = {
    "cifar10": cifar10,
    "cifar100": cifar100,
    "digits": digits,
    "imagenet": imagenet,
    "pictures": pictures,
    "synthetic": _synthetic_pair,
}


def source(name: str, **arguments: object) -> tuple[AbstractImages, AbstractImages]:
    """The (train, test) images of a source by its name, as recipe files give it.

    Args:
        name: one of `list_sources`.
        arguments: of the source: ``root``, ``mean``, ``std`` for cifar10 and cifar100, and ``size`` for imagenet; those
            of `pictures`; ``train``, ``test`` (numbers of images), ``shape``, ``classes``, ``seed`` for synthetic; none
            for digits. Lists count as tuples.
    """
    if name not in _SOURCES:
        raise unknown("data source", name, _SOURCES)
    known = inspect.signature(_SOURCES[name]).parameters
    for argument in arguments:
        if argument not in known:
            raise unknown(f"argument of data source {name!r}:", argument, known)
    for argument, parameter in known.items():
        if parameter.default is inspect.Parameter.empty and argument not in arguments:
            raise ConfigError(f"data source {name!r} must be given {argument}")
    return _SOURCES[name](**{k: tuple(v) if isinstance(v, list) else v for k, v in arguments.items()})


def list_sources() -> list[str]:
    """Names that `source` understands, sorted."""
    return sorted(_SOURCES)


def _home(name: str, root: str | Path | None) -> Path:
    """The folder of a set."""
    return Path(root or os.environ.get("COFIRE_DATA") or cache_root()).expanduser() / name
