"""Laws of feeding: batches depend on (seed, epoch, step) alone; sources say what is wrong with them."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from cofire import data
from cofire.data import Images, crop_flip
from cofire.errors import ConfigError, DataError, FileError

# Shapes: N images, B rows of a batch, C channels, H height, W width.


def numbered(n: int = 40, labelled: bool = True, size: int = 6) -> Images:
    """Images whose first pixel is their number, so that a batch tells which rows it holds."""
    pixels_NCHW = torch.randint(1, 256, (n, 3, size, size), generator=torch.Generator().manual_seed(7))
    pixels_NCHW[:, 0, 0, 0] = torch.arange(n)
    return Images(
        pixels_NCHW=pixels_NCHW.to(torch.uint8),
        label_N=torch.arange(n) % 4 if labelled else None,
        classes=("a", "b", "c", "d"),
        mean=(0.5, 0.4, 0.3),
        std=(0.25, 0.5, 1.0),
        name="numbered",
    )


def pixels_of(images: Images, x_BCHW: Tensor) -> Tensor:
    """The pixels behind normalised values."""
    mean_C11, std_C11 = torch.tensor(images.mean).view(-1, 1, 1), torch.tensor(images.std).view(-1, 1, 1)
    return ((x_BCHW * std_C11 + mean_C11) * 255).round().to(torch.uint8)


def rows_of(images: Images, x_BCHW: Tensor) -> list[int]:
    return pixels_of(images, x_BCHW)[:, 0, 0, 0].tolist()


def slow_crop_flip(pixels_CHW: Tensor, top: int, left: int, flip: bool, pad: int) -> Tensor:
    _, h, w = pixels_CHW.shape
    cut_CHW = F.pad(pixels_CHW, (pad,) * 4)[:, top : top + h, left : left + w]
    return cut_CHW.flip(2) if flip else cut_CHW


# Batches


@pytest.mark.parametrize("augment", ["none", "crop", "crop-flip", "resized-crop-flip"])
def test_a_batch_is_a_function_of_seed_epoch_and_step(augment):
    def first(seed, epoch, step):
        return next(numbered().loader(8, train=True, augment=augment, seed=seed).batches(epoch, start=step))[0]

    assert torch.equal(first(3, 1, 2), first(3, 1, 2))
    for other in ((4, 1, 2), (3, 2, 2), (3, 1, 3), (1, 3, 2), (2, 1, 3)):
        assert not torch.equal(first(3, 1, 2), first(*other))


def test_drawing_batches_leaves_the_global_random_state_alone():
    before = torch.get_rng_state()
    list(numbered().loader(8, train=True, augment="crop-flip"))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("train", [True, False])
def test_starting_at_a_step_equals_skipping_to_it(train):
    loader = numbered(43).loader(8, train=train, augment="crop-flip" if train else "none")
    everything = list(loader.batches(2))
    for start in range(len(loader) + 1):
        late = list(loader.batches(2, start=start))
        assert len(late) == len(loader) - start
        for (x, label), (x_all, label_all) in zip(late, everything[start:], strict=True):
            assert torch.equal(x, x_all)
            assert torch.equal(label, label_all)


def test_starting_late_does_not_make_the_skipped_batches(monkeypatch):
    made = []
    original = Images.normalise
    monkeypatch.setattr(Images, "normalise", lambda self, pixels: made.append(1) or original(self, pixels))
    next(numbered().loader(4, train=True, augment="crop").batches(0, start=9))
    assert len(made) == 1


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(
    ("train", "augment"), [(True, "none"), (True, "crop-flip"), (True, "resized-crop-flip"), (False, "none")]
)
def test_ranks_share_out_exactly_the_global_batch(train, augment, world):
    loader = numbered(41).loader(8, train=train, augment=augment)
    ranks = [list(loader.batches(1, rank=rank, world=world)) for rank in range(world)]
    for step, (x, label) in enumerate(loader.batches(1)):
        for rank in range(world):
            assert torch.equal(ranks[rank][step][0], x[rank::world])
            assert torch.equal(ranks[rank][step][1], label[rank::world])
    assert {len(batches) for batches in ranks} == {len(loader)}


def test_an_epoch_of_training_shows_each_image_at_most_once():
    images = numbered(43)
    loader = images.loader(8, train=True)
    seen = [row for x, _ in loader.batches(5) for row in rows_of(images, x)]
    assert len(loader) == 5
    assert len(seen) == 40
    assert len(set(seen)) == 40
    left_out = [set(range(43)) - {r for x, _ in loader.batches(e) for r in rows_of(images, x)} for e in range(4)]
    assert any(a != b for a, b in pairwise(left_out))


def test_evaluation_shows_each_image_once_in_order_and_keeps_the_last_batch():
    images = numbered(43)
    loader = images.loader(8)
    batches = list(loader)
    assert len(loader) == 6
    assert [len(x) for x, _ in batches] == [8, 8, 8, 8, 8, 3]
    assert [row for x, _ in batches for row in rows_of(images, x)] == list(range(43))
    assert torch.equal(torch.cat([label for _, label in batches]), images.label_N)


def test_iterating_a_loader_gives_epoch_zero_every_time():
    loader = numbered().loader(8, train=True, augment="crop")
    for (a, _), (b, _), (c, _) in zip(loader, loader, loader.batches(0), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_labels_stay_with_their_images_in_training():
    images = numbered()
    for x, label in images.loader(8, train=True).batches(3):
        assert label.tolist() == [row % 4 for row in rows_of(images, x)]


def test_unlabelled_images_come_with_none():
    x, label = next(iter(numbered(labelled=False).loader(8)))
    assert x.shape == (8, 3, 6, 6)
    assert label is None


def test_normalisation_by_hand():
    images = numbered()
    x = next(iter(images.loader(4)))[0]
    assert x.dtype == torch.float32
    assert x.is_contiguous()
    for c, (mean, std) in enumerate(((0.5, 0.25), (0.4, 0.5), (0.3, 1.0))):
        value = images.pixels_NCHW[2, c, 3, 5].item()
        assert x[2, c, 3, 5].item() == pytest.approx((value / 255 - mean) / std, abs=1e-6)


# Augmentation


@given(
    shape=st.tuples(*(st.integers(1, 7),) * 4),
    pad=st.integers(0, 5),
    seed=st.integers(0, 2**31),
    draw=st.data(),
)
def test_crop_and_flip_match_a_slow_loop(shape, pad, seed, draw):
    generator = torch.Generator().manual_seed(seed)
    pixels_BCHW = torch.randint(0, 256, shape, generator=generator).to(torch.uint8)
    corner = st.lists(st.integers(0, 2 * pad), min_size=shape[0], max_size=shape[0])
    flips = st.lists(st.booleans(), min_size=shape[0], max_size=shape[0])
    top, left, flip = draw.draw(corner), draw.draw(corner), draw.draw(flips)
    got = crop_flip(pixels_BCHW, torch.tensor(top), torch.tensor(left), torch.tensor(flip), pad)
    want = [slow_crop_flip(*each, pad) for each in zip(pixels_BCHW, top, left, flip, strict=True)]
    assert got.dtype == torch.uint8
    assert torch.equal(got, torch.stack(want))


@pytest.mark.parametrize("augment", ["crop", "crop-flip"])
def test_augmented_images_are_crops_of_their_own_image_and_every_corner_occurs(augment):
    images = numbered(40)
    plain, moved = (images.loader(8, train=True, augment=kind, pad=1) for kind in ("none", augment))
    flips = (False, True) if augment == "crop-flip" else (False,)
    seen = set()
    for epoch in range(6):
        for (x, label), (y, label_too) in zip(plain.batches(epoch), moved.batches(epoch), strict=True):
            assert torch.equal(label, label_too)
            for before, after in zip(pixels_of(images, x), pixels_of(images, y), strict=True):
                ways = [(top, left, flip) for top in range(3) for left in range(3) for flip in flips]
                seen.add(next(w for w in ways if torch.equal(slow_crop_flip(before, *w, 1), after)))
    assert len(seen) == 9 * len(flips)


def test_padding_is_black():
    white = dataclasses.replace(numbered(), pixels_NCHW=torch.full((40, 3, 6, 6), 255, dtype=torch.uint8))
    x = torch.cat([x for x, _ in white.loader(40, train=True, augment="crop")])
    assert set(pixels_of(white, x).unique().tolist()) == {0, 255}


# Images


def test_take_gives_rows_by_slice_indices_or_tensor():
    images = numbered()
    assert images.take(slice(3, 6)).pixels_NCHW[:, 0, 0, 0].tolist() == [3, 4, 5]
    assert images.take([5, 1]).label_N.tolist() == [1, 1]
    assert images.take(torch.tensor([7])).pixels_NCHW[:, 0, 0, 0].tolist() == [7]
    assert numbered(labelled=False).take([1]).label_N is None


@pytest.mark.parametrize("labelled", [True, False])
def test_a_split_is_disjoint_complete_and_deterministic(labelled):
    images = numbered(43, labelled)
    rest, held = images.split(11, seed=5)
    again = images.split(11, seed=5)[1]
    rows = [part.pixels_NCHW[:, 0, 0, 0].tolist() for part in (rest, held)]
    assert len(held) == 11
    assert sorted(rows[0] + rows[1]) == list(range(43))
    assert rows == [sorted(part) for part in rows]
    assert torch.equal(again.pixels_NCHW, held.pixels_NCHW)
    assert not torch.equal(images.split(11, seed=6)[1].pixels_NCHW, held.pixels_NCHW)


@given(labels=st.lists(st.integers(0, 3), min_size=2, max_size=60), share=st.floats(0.01, 0.99))
@example(labels=[0] * 40 + [1] * 4, share=0.5)
def test_a_split_is_as_balanced_as_the_set(labels, share):
    images = dataclasses.replace(numbered(len(labels)), label_N=torch.tensor(labels))
    n = min(max(1, round(share * len(labels))), len(labels) - 1)
    held = images.split(n)[1].label_N.bincount(minlength=4)
    fair = images.label_N.bincount(minlength=4) * n / len(labels)
    assert (held - fair).abs().max() < 1.5


def test_a_split_never_changes_between_versions():
    held = numbered(200).split(10, seed=0)[1]
    assert held.pixels_NCHW[:, 0, 0, 0].tolist() == [5, 7, 12, 18, 61, 98, 107, 152, 170, 177]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"pixels_NCHW": torch.zeros(0, 3, 6, 6, dtype=torch.uint8)}, "numbered has no images"),
        ({"pixels_NCHW": torch.zeros(40, 3, 0, 6, dtype=torch.uint8)}, "must have pixels"),
        ({"pixels_NCHW": torch.zeros(40, 3, 6, 6)}, r"uint8 tensor \(N, C, H, W\), got torch.float32"),
        ({"pixels_NCHW": torch.zeros(40, 6, 6, dtype=torch.uint8)}, r"got torch.uint8 \(40, 6, 6\)"),
        ({"label_N": torch.zeros(39, dtype=torch.int64)}, r"int64 tensor \(40,\), got torch.int64 \(39,\)"),
        ({"label_N": torch.zeros(40)}, "got torch.float32"),
        ({"label_N": torch.full((40,), 4)}, r"labels must be in 0\.\.3, one per class, got 4\.\.4"),
        ({"label_N": torch.full((40,), -1)}, r"got -1\.\.-1"),
        ({"mean": (0.5,)}, "mean must be 3 finite values"),
        ({"std": (1.0, float("nan"), 1.0)}, "std must be 3 finite values"),
        ({"std": (1.0, 0.0, 1.0)}, "std must be above 0"),
    ],
)
def test_images_refuse_what_they_cannot_be(change, text):
    with pytest.raises(DataError, match=text):
        dataclasses.replace(numbered(), **change)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda i: i.loader(0), "batch_size must be at least 1, got 0"),
        (lambda i: i.loader(41, train=True), "batch_size must be at most 40, all of numbered"),
        (lambda i: i.loader(4, train=True, augment="crop-flop"), "did you mean 'crop-flip'"),
        (lambda i: i.loader(4, augment="crop"), "augment must be 'none' unless train=True"),
        (lambda i: i.loader(4, train=True, pad=-1), "pad must be at least 0"),
        (lambda i: i.loader(4).batches(0, start=11), r"start must be in 0\.\.10"),
        (lambda i: i.loader(4).batches(0, rank=2, world=2), "rank 2 of world 2"),
        (lambda i: i.loader(4, train=True).batches(0, world=3), "batch_size must be a multiple of world"),
        (lambda i: i.split(40), r"must be in 1\.\.39, got 40"),
        (lambda i: i.split(4, seed=-1), "seed of a split"),
    ],
)
def test_loaders_and_splits_refuse_wrong_values_at_once(make, text):
    with pytest.raises(ConfigError, match=text):
        make(numbered())


def test_taking_nothing_is_an_error():
    for nothing in ([], slice(0, 0)):
        with pytest.raises(DataError, match=r"no images|at least one image"):
            numbered().take(nothing)


def test_images_and_loaders_print_in_one_line():
    assert repr(numbered()) == "Images('numbered': 40 x 3x6x6, 4 classes)"
    assert "\n" not in repr(numbered(labelled=False).loader(4))


# Sources


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
    with pytest.raises(DataError, match=r"scikit-learn is needed here: pip install cofire\[demo\]"):
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
    with pytest.raises(ConfigError, match="data source 'pictures' must be given test"):
        data.source("pictures", train="somewhere")
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
    monkeypatch.delenv("COFIRE_DATA")
    (tmp_path / "shared").mkdir()
    tiny_cifar[0].rename(tmp_path / "shared" / "data")
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    assert len(data.cifar10()[1]) == 3


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
        patch.setattr("cofire.files.os.fsync", disk_full)
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
    image.new("I;16", (16, 16)).save(tmp_path / "deep.png")
    with pytest.raises(DataError, match=r"deep\.png cannot be read: must have 8 bits per channel"):
        data.folder(tmp_path, size=14, labelled=False)


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
