"""Laws of the data sources: exact pixels, caches that are whole or made again, and a word on what is wrong."""

from __future__ import annotations

import io
import json
import logging
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from cofire import data
from cofire.errors import ConfigError, DataError, FileError

# Shapes: N images, C channels, H height, W width, K classes, D pixels.


def test_digits_are_split_once_and_for_all():
    pytest.importorskip("sklearn")
    train, test = data.digits()
    assert (len(train), len(test)) == (1437, 360)
    assert train.pixels_NCHW.shape[1:] == (1, 8, 8)
    assert train.pixels_NCHW.max() == 255
    assert test.label_N.bincount().min() >= 34
    x = train.normalise(train.pixels_NCHW)
    assert abs(x.mean()) < 0.02
    assert abs(x.std() - 1) < 0.02


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"scikit-learn is needed here: pip install 'cofire\[demo\]'"):
        data.digits()


def test_synthetic_images_are_deterministic_and_learnable():
    images = data.synthetic(400, shape=(1, 12, 10), classes=5, seed=3)
    assert images.pixels_NCHW.shape == (400, 1, 12, 10)
    assert torch.equal(images.pixels_NCHW, data.synthetic(400, (1, 12, 10), 5, 3).pixels_NCHW)
    assert not torch.equal(images.pixels_NCHW, data.synthetic(400, (1, 12, 10), 5, 4).pixels_NCHW)
    rest, held = images.split(100)
    centre_KD = torch.stack([rest.pixels_NCHW[rest.label_N == k].float().mean(0).flatten() for k in range(5)])
    nearest = torch.cdist(held.pixels_NCHW.float().flatten(1), centre_KD).argmin(1)
    assert (nearest == held.label_N).float().mean() > 0.95


def test_sources_are_found_by_name():
    assert data.list_sources() == ["cifar10", "cifar100", "digits", "imagenet", "pictures", "synthetic"]
    train, test = data.source("synthetic", train=30, test=10, shape=[1, 4, 4], classes=2)
    assert (len(train), len(test)) == (30, 10)
    assert train.pixels_NCHW.shape[1:] == (1, 4, 4)
    with pytest.raises(ConfigError, match="unknown data source 'cifar'; did you mean 'cifar10'"):
        data.source("cifar")
    with pytest.raises(ConfigError, match="argument of data source 'synthetic': 'clases'; did you mean 'classes'"):
        data.source("synthetic", clases=3)
    with pytest.raises(ConfigError, match="data source 'pictures' must be given train"):
        data.source("pictures", test="somewhere")
    with pytest.raises(ConfigError, match="train and test must be at least 1"):
        data.source("synthetic", test=0)
    with pytest.raises(ConfigError, match="must be at least 1, got n=0"):
        data.synthetic(0)


def encoded(pixels_CHW: Tensor, kind: str = "WEBP") -> bytes:
    image = pytest.importorskip("PIL.Image").fromarray(pixels_CHW.permute(1, 2, 0).contiguous().numpy())
    buffer = io.BytesIO()
    image.save(buffer, kind, lossless=True)
    return buffer.getvalue()


def write_parquet(path: Path, pictures: list[bytes], labels: list[int | None], classes: list[str] | None) -> None:
    pa = pytest.importorskip("pyarrow")
    rows = [{"bytes": picture, "path": f"{n:05}.webp"} for n, picture in enumerate(pictures)]
    table = pa.table({"image": rows, "label": pa.array(labels, pa.int64())})
    if classes:
        table = table.replace_schema_metadata({"class_names": json.dumps(classes)})
    path.parent.mkdir(parents=True, exist_ok=True)
    pytest.importorskip("pyarrow.parquet").write_table(table, path)


@pytest.fixture
def tiny_cifar(tmp_path, monkeypatch):
    """A data folder with 6 + 3 pictures in the form of CIFAR-10, a home of its own, and the true pixels."""
    pixels_NCHW = torch.randint(0, 256, (9, 3, 32, 32), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    pictures = [encoded(pixels_CHW) for pixels_CHW in pixels_NCHW]
    for name, rows in (("train", slice(0, 6)), ("test", slice(6, 9))):
        file = tmp_path / "data" / "cifar10" / f"{name}.parquet"
        write_parquet(file, pictures[rows], [n % 3 for n in range(9)][rows], ["cat", "dog", "frog"])
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("COFIRE_DATA", raising=False)
    return tmp_path / "data", pixels_NCHW


def caches(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "home" / ".cache" / "cofire").iterdir())


def test_cifar10_is_decoded_to_the_exact_pixels_once(tiny_cifar, tmp_path, monkeypatch):
    root, pixels_NCHW = tiny_cifar
    for _ in range(2):
        train, test = data.cifar10(root)
        assert torch.equal(torch.cat([train.pixels_NCHW, test.pixels_NCHW]), pixels_NCHW)
        assert train.label_N.tolist() == [0, 1, 2, 0, 1, 2]
        assert train.classes == ("cat", "dog", "frog")
        assert train.mean == (0.485, 0.456, 0.406)
        assert train.name == "cifar10 train"
        monkeypatch.setitem(sys.modules, "PIL.Image", None)  # the second time needs neither package
        monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert [file.suffix for file in caches(tmp_path)] == [".safetensors"] * 2


def test_the_environment_names_the_data_folder(tiny_cifar, tmp_path, monkeypatch):
    monkeypatch.setenv("COFIRE_DATA", str(tiny_cifar[0]))
    assert len(data.source("cifar10", mean=[0.0] * 3)[0]) == 6


def test_without_it_the_data_folder_is_the_cache_and_nothing_beside_the_project(tiny_cifar, tmp_path, monkeypatch):
    monkeypatch.delenv("COFIRE_DATA", raising=False)
    beside = tmp_path / "shared" / "data"
    beside.parent.mkdir()
    tiny_cifar[0].rename(beside)
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    with pytest.raises(FileError, match=r"cifar10 not found.*COFIRE_DATA"):
        data.cifar10()
    cache = tmp_path / "home" / ".cache" / "cofire"
    cache.parent.mkdir(parents=True, exist_ok=True)
    beside.rename(cache)
    assert len(data.cifar10()[1]) == 3


def test_pictures_may_lie_below_the_data_folder(tiny_cifar, monkeypatch):
    monkeypatch.setenv("COFIRE_DATA", str(tiny_cifar[0]))
    places = {part: f"data:cifar10/{part}.parquet" for part in ("train", "test")}
    train, test = data.source("pictures", size=32, **places)
    assert (len(train), len(test)) == (6, 3)


@pytest.mark.parametrize("damage", ["empty", "cut", "bit", "header", "text"])
def test_a_damaged_cache_is_made_again_with_a_note(tiny_cifar, tmp_path, caplog, damage):
    root, pixels_NCHW = tiny_cifar
    data.cifar10(root)
    for cache in caches(tmp_path):
        content = bytearray(cache.read_bytes())
        match damage:
            case "empty":
                content = bytearray()
            case "cut":
                content = content[:-100]
            case "bit":
                content[-100] ^= 1
            case "header":
                content = content.replace(b'"U8"', b'"I8"')
            case "text":
                content = bytearray(b"not a tensor file at all")
        cache.write_bytes(content)
    for notes in (2, 0):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "cofire"):
            train, test = data.cifar10(root)
        assert torch.equal(torch.cat([train.pixels_NCHW, test.pixels_NCHW]), pixels_NCHW)
        assert len(caplog.records) == notes
        assert all("is damaged" in text for text in caplog.messages)


def test_a_cache_appears_whole_or_not_at_all(tiny_cifar, tmp_path, monkeypatch, caplog):
    def disk_full(*_):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("cofire.files.atomic.os.fsync", disk_full)
        assert len(data.cifar10(tiny_cifar[0])[0]) == 6
    assert caches(tmp_path) == []
    assert "are not cached" in caplog.text
    assert "No space left" in caplog.text
    data.cifar10(tiny_cifar[0])
    assert len(caches(tmp_path)) == 2


def test_a_changed_source_is_decoded_anew(tiny_cifar):
    root, pixels_NCHW = tiny_cifar
    data.cifar10(root)
    write_parquet(root / "cifar10" / "test.parquet", [encoded(pixels_NCHW[0])], [0], ["cat"])
    assert torch.equal(data.cifar10(root)[1].pixels_NCHW, pixels_NCHW[:1])


def test_cifar10_says_where_it_looked_and_what_it_understands(tmp_path):
    with pytest.raises(FileError, match=r"nowhere.cifar10 has no train\.parquet and no test\.parquet.*COFIRE_DATA"):
        data.cifar10(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("pictures", "labels", "error", "text"),
    [
        ([b"not a picture"], [0], DataError, r"picture 00000\.webp of .*train\.parquet cannot be read"),
        ([None], [0], FileError, r"columns image\{bytes, path\} and label"),
        (["whole"], [None], FileError, r"columns image\{bytes, path\} and label"),
        (["whole"], [7], DataError, r"labels must be in 0\.\.2"),
        (["small"], [0], DataError, "must be 32x32, got 8x8"),
        ([], [], DataError, "cifar10 train has no images"),
    ],
)
def test_broken_pictures_and_labels_are_named(tiny_cifar, pictures, labels, error, text):
    known = {"whole": encoded(tiny_cifar[1][0]), "small": encoded(tiny_cifar[1][0, :, :8, :8])}
    pictures = [known.get(picture, picture) for picture in pictures]
    write_parquet(tiny_cifar[0] / "cifar10" / "train.parquet", pictures, labels, ["cat", "dog", "frog"])
    with pytest.raises(error, match=text):
        data.cifar10(tiny_cifar[0])


def test_a_file_that_is_not_parquet_is_named(tiny_cifar):
    (tiny_cifar[0] / "cifar10" / "test.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(FileError, match=r"test\.parquet must be Parquet"):
        data.cifar10(tiny_cifar[0])
    with pytest.raises(FileError, match="not found"):
        data.imagenet_parquet(tiny_cifar[0] / "missing.parquet")


def test_imagenet_parquet_cuts_the_middle_and_only_enlarges(tmp_path):
    large = torch.randint(0, 256, (3, 20, 31)).to(torch.uint8)
    small = torch.full((3, 4, 8), 77, dtype=torch.uint8)
    write_parquet(tmp_path / "some.parquet", [encoded(large), encoded(small)], [3, 0], None)
    images = data.imagenet_parquet(tmp_path / "some.parquet", size=10, mean=(0.5,) * 3, std=(0.5,) * 3)
    assert torch.equal(images.pixels_NCHW[0], large[:, 5:15, 10:20])
    assert images.pixels_NCHW[1].unique().tolist() == [77]
    assert images.classes == ("0", "1", "2", "3")
    assert images.name == "some"
    assert images.mean == (0.5,) * 3


def picture_file(path: Path, colour: int, kind: str = "PNG", shape: tuple[int, int] = (40, 50)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded(torch.full((3, *shape), colour, dtype=torch.uint8), kind))


def test_a_folder_of_classes_is_read_in_alphabetical_order(tmp_path):
    picture_file(tmp_path / "dog" / "b.PNG", 20)
    picture_file(tmp_path / "cat" / "a.png", 10)
    picture_file(tmp_path / "dog" / "deep" / "a.webp", 30, "WEBP", (70, 15))
    (tmp_path / "dog" / "notes.txt").write_text("not a picture")
    (tmp_path / ".hidden").mkdir()
    images = data.folder(tmp_path, size=14)
    assert images.classes == ("cat", "dog")
    assert images.label_N.tolist() == [0, 1, 1]
    assert images.pixels_NCHW.shape == (3, 3, 14, 14)
    assert images.pixels_NCHW[:, 0, 5, 5].tolist() == [10, 20, 30]
    unlabelled = data.folder(tmp_path, size=14, labelled=False)
    assert unlabelled.label_N is None
    assert len(unlabelled) == 3


def test_pictures_of_other_colour_modes_are_read_as_rgb(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for mode in ("L", "1", "P", "RGBA", "LA", "CMYK"):
        suffix = "jpg" if mode == "CMYK" else "png"
        transparent = {"transparency": b"\0\1"} if mode == "P" else {}
        image.new(mode, (16, 16)).save(tmp_path / f"{mode}.{suffix}", **transparent)
    assert len(data.folder(tmp_path, size=14, labelled=False)) == 6
    image.new("F", (16, 16)).save(tmp_path / "deep.tiff")
    with pytest.raises(DataError, match=r"deep\.tiff cannot be read: must have 8 or 16 bits.*unreadable = \"skip\""):
        data.folder(tmp_path, size=14, labelled=False)
    assert len(data.folder(tmp_path, size=14, labelled=False, unreadable="skip")) == 6


def test_of_16_bits_per_channel_the_upper_8_are_read(tmp_path):
    image = pytest.importorskip("PIL.Image")
    image.fromarray(np.full((14, 14), 200 * 256 + 77, dtype=np.uint16)).save(tmp_path / "deep.png")
    assert data.folder(tmp_path, size=14, labelled=False).pixels_NCHW.unique().tolist() == [200]


def test_a_picture_is_turned_as_its_exif_tag_says(tmp_path):
    image = pytest.importorskip("PIL.Image")
    pixels = np.zeros((14, 14, 3), dtype=np.uint8)
    pixels[:, :7] = 255  # the left half is bright
    turned = image.fromarray(pixels)
    exif = turned.getexif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    turned.save(tmp_path / "turned.png", exif=exif)
    found = data.folder(tmp_path, size=14, labelled=False).pixels_NCHW[0, 0]
    assert found[:7].unique().tolist() == [255]
    assert found[7:].unique().tolist() == [0]


def test_a_picture_of_the_wanted_size_is_taken_as_it_is(tmp_path):
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.RandomState(0).randint(0, 256, (14, 14, 3), dtype=np.uint8)
    image.fromarray(pixels).save(tmp_path / "a.png")
    found = data.folder(tmp_path, size=14, labelled=False).pixels_NCHW[0]
    assert np.array_equal(found.permute(1, 2, 0).numpy(), pixels)


def test_one_folder_of_class_folders_is_split_fairly_and_always_alike(tmp_path):
    for label, name in enumerate(("cat", "dog")):
        for n in range(10):
            picture_file(tmp_path / name / f"{n}.png", 100 * label + n)
    train, test = data.source("pictures", train=str(tmp_path), test=0.2, size=14)
    assert (len(train), len(test)) == (16, 4)
    assert test.label_N.bincount().tolist() == [2, 2]
    seen = {int(pixels[0, 0, 0]) for part in (train, test) for pixels in part.pixels_NCHW}
    assert len(seen) == 20
    again = data.source("pictures", train=str(tmp_path), size=14)[1]
    assert torch.equal(again.pixels_NCHW, test.pixels_NCHW)
    with pytest.raises(ConfigError, match=r"a share of train to hold out in \(0, 1\), got 1"):
        data.pictures(tmp_path, 1.0, size=14)
    with pytest.raises(ConfigError, match="test must be a place where train is unlabelled"):
        data.pictures(tmp_path, size=14, labelled=False)


def test_folders_that_cannot_be_read_say_why(tmp_path):
    with pytest.raises(FileError, match=r"folder of pictures not found: .*missing"):
        data.folder(tmp_path / "missing")
    with pytest.raises(DataError, match="must hold one folder per class, got none; or pass labelled=False"):
        data.folder(tmp_path)
    with pytest.raises(DataError, match="has no images; suffixes understood"):
        data.folder(tmp_path, labelled=False)
    picture_file(tmp_path / "cat" / "a.png", 10)
    with pytest.raises(ConfigError, match="size of pictures must be at least 1, got 0"):
        data.folder(tmp_path, size=0)
    (tmp_path / "dog").mkdir()
    with pytest.raises(DataError, match="dog has no images"):
        data.folder(tmp_path)
    cut = (tmp_path / "cat" / "a.png").read_bytes()[:60]
    (tmp_path / "dog" / "b.png").write_bytes(cut)
    with pytest.raises(DataError, match=r"picture .*b\.png cannot be read"):
        data.folder(tmp_path)
