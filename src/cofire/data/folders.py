"""Folders of pictures: which files count, and which class each folder is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from cofire.errors import DataError, FileError

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})


def pictures_below(folder: Path) -> list[Path]:
    """The pictures at any depth below a folder, sorted; files count by their suffix, names with a dot first do not.

    Raises:
        DataError: there is none.
    """
    files = sorted(file for file in folder.rglob("*") if _is_picture(file.relative_to(folder)))
    if not files:
        raise DataError(f"{folder} has no images; suffixes understood: {', '.join(sorted(SUFFIXES))}")
    return files


def class_folders(root: Path) -> dict[str, list[Path]]:
    """The pictures of each class: one folder per class, whose names in alphabetical order are the classes 0, 1, ..."""
    groups = sorted(group for group in existing(root).iterdir() if group.is_dir() and group.name[0] != ".")
    if not groups:
        raise DataError(f"{root} must hold one folder per class, got none; or pass labelled=False")
    return {group.name: pictures_below(group) for group in groups}


def existing(folder: Path) -> Path:
    """The folder, which must be there."""
    if not folder.is_dir():
        raise FileError(f"folder of pictures not found: {folder}")
    return folder


def check_same_classes(places: Mapping[str, Sequence[str]]) -> None:
    """Raise unless all places have the same classes in the same order; the error says which lack what."""
    everything = {name for names in places.values() for name in names}
    lacking = {place: sorted(everything - set(names)) for place, names in places.items()}
    told = "; ".join(f"{place} lacks {_few(names)}" for place, names in lacking.items() if names)
    if told or len(set(map(tuple, places.values()))) > 1:
        raise DataError(f"train and test must have the same classes, but {told or 'their order differs'}")


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _is_picture(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not any(part.startswith(".") for part in path.parts)
