"""Laws of feeding: batches depend on (seed, epoch, step) alone."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from cofire.data import Images, crop_flip
from cofire.errors import ConfigError, DataError

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
