"""Sets larger than memory: prepared once, whole or not there; read to the exact pixels, batch by batch."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small import SHARED, OwnNet

from cofire import FTWT, ConfigError, DataError, FileError, Recipe, cli, data, estimate, evaluate, fit, gate
from cofire.data import layouts, shards, stored
from cofire.experiments.recipes import parse_experiment
from cofire.experiments.runs import read_sets

PIL = pytest.importorskip("PIL.Image")
SIZE = 14  # of what is given out: evaluated after resizing the shorter side to 16
CLASSES = ("n01", "n02", "n03")


def picture(seed: int, width: int = 40, height: int = 30) -> Any:
    """A smooth picture, so that JPEG keeps it nearly as it is."""
    coarse = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    return PIL.fromarray(coarse).resize((width, height), PIL.Resampling.BICUBIC)


def encoded(image: Any, kind: str = "JPEG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def write_folders(root: Path, n: int = 3) -> Path:
    """train/ and val/ of three classes, n and 2 pictures each; of the kinds that ImageNet has."""
    for part, count in (("train", n), ("val", 2)):
        for label, name in enumerate(CLASSES):
            (root / part / name).mkdir(parents=True, exist_ok=True)
            for k in range(count):
                content = encoded(picture(100 * label + k + 50 * (part == "val"), 20 + 7 * k, 30 + label))
                (root / part / name / f"{name}_{k}.JPEG").write_bytes(content)
    (root / "train" / "n02" / "n02_1.JPEG").write_bytes(encoded(picture(7), "PNG"))  # a PNG that is called JPEG
    (root / "val" / "n03" / "n03_0.JPEG").write_bytes(encoded(picture(8).convert("CMYK")))
    return root


def write_parquet(path: Path, pictures: list[bytes], labels: list[int], metadata: dict[str, str] | None = None) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"bytes": content, "path": f"{n}.JPEG"} for n, content in enumerate(pictures)]
    table = pa.table({"image": rows, "label": pa.array(labels, pa.int64())}).replace_schema_metadata(metadata or {})
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, path, row_group_size=2)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the set will lie; shards hold four pictures, so that there are several."""
    monkeypatch.setenv("COFIRE_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(layouts, "_PER_SHARD", 4)
    return tmp_path / "data" / "imagenet"


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    return write_folders(tmp_path / "from")


def files(home: Path) -> dict[str, bytes]:
    return {str(path.relative_to(home)): path.read_bytes() for path in sorted(home.rglob("*")) if path.is_file()}


def in_order(images: data.StoredImages) -> data.StoredImages:
    """The set in the order in which it was stored."""
    return images.take(images.row_N.argsort())


def both(size: int = SIZE) -> tuple[data.StoredImages, data.StoredImages]:
    return data.imagenet(size=size)


# What is read is what was there


def test_class_folders_are_read_to_the_pixels_of_the_folder_source(home: Path, folders: Path) -> None:
    data.prepare("imagenet", folders)
    train, val = both()
    for images, part in ((in_order(train), "train"), (val, "val")):
        expected = data.folder(folders / part, size=SIZE)
        assert images.classes == expected.classes == CLASSES
        assert images.label_N is not None
        assert expected.label_N is not None
        assert images.label_N.tolist() == expected.label_N.tolist()
        assert images.shape == (3, SIZE, SIZE)
        assert torch.equal(images.pixels(torch.arange(len(images))), expected.pixels_NCHW)
        assert torch.equal(torch.cat([x for x, _ in images.loader(4)]), torch.cat([x for x, _ in expected.loader(4)]))


def test_the_first_training_pictures_are_of_all_classes_and_always_the_same(home: Path, tmp_path: Path) -> None:
    data.prepare("imagenet", write_folders(tmp_path / "many", n=20))
    train, again = both()[0], both()[0]
    assert train.take(slice(0, 12)).label_N.unique().tolist() == [0, 1, 2]
    assert sorted(train.row_N.tolist()) == list(range(60))
    assert train.row_N.tolist() == again.row_N.tolist() != list(range(60))


def test_larger_pictures_are_resized_and_others_kept_byte_for_byte(home: Path, folders: Path) -> None:
    large = picture(3, 64, 48)
    (folders / "train" / "n01" / "n01_0.JPEG").write_bytes(encoded(large, "PNG"))
    data.prepare("imagenet", folders, shorter=36)
    store = both()[0].store
    kept = [(folders / "train" / "n01" / f"n01_{k}.JPEG").read_bytes() for k in (1, 2)]
    assert [store.read(1), store.read(2)] == kept
    assert store.size_N2[:3].tolist() == [[36, 48], [30, 27], [30, 34]]
    small = PIL.open(io.BytesIO(store.read(0)))
    assert (small.format, small.size) == ("JPEG", (48, 36))
    expected = np.asarray(large.resize((48, 36), PIL.Resampling.BILINEAR)).astype(int)
    assert np.abs(np.asarray(small).astype(int) - expected).mean() < 2


@pytest.mark.parametrize("layout", ["data/train-0-of-2.parquet", "default/train/0.parquet"])
def test_parquet_is_read_with_the_class_names_of_hugging_face(home: Path, tmp_path: Path, layout: str) -> None:
    names = [f"class {n}" for n in range(7)]
    features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    pictures = [encoded(picture(seed)) for seed in range(9)]
    write_parquet(tmp_path / "hf" / layout, pictures[:5], [0, 6, 2, 3, 1], metadata)
    write_parquet(tmp_path / "hf" / layout.replace("0", "1"), pictures[5:7], [4, 5], metadata)
    write_parquet(tmp_path / "hf" / layout.replace("train", "validation"), pictures[7:], [5, 2], metadata)
    write_parquet(tmp_path / "hf" / layout.replace("train", "test"), [b"unread"], [-1], metadata)
    data.prepare("imagenet", tmp_path / "hf")
    train, val = both()
    assert train.classes == val.classes == tuple(names)
    assert in_order(train).label_N.tolist() == [0, 6, 2, 3, 1, 4, 5]
    assert val.label_N.tolist() == [5, 2]  # two classes of seven
    assert [train.store.read(n) for n in range(7)] + [val.store.read(n) for n in range(2)] == pictures


def test_labels_without_names_cover_those_of_both_parts(home: Path, tmp_path: Path) -> None:
    write_parquet(tmp_path / "from" / "train.parquet", [encoded(picture(1))] * 2, [0, 3])
    write_parquet(tmp_path / "from" / "val.parquet", [encoded(picture(1))], [9])
    data.prepare("imagenet", tmp_path / "from")
    assert both()[0].classes == tuple(map(str, range(10)))


def test_the_shared_validation_pictures_keep_their_thousand_classes(home: Path, tmp_path: Path) -> None:
    real = SHARED / "data" / "imagenet"
    if not (real / "val20.parquet").is_file():
        pytest.skip(f"{real} has no val20.parquet")
    (tmp_path / "from").mkdir()
    for name in ("train", "val"):
        (tmp_path / "from" / f"{name}.parquet").symlink_to((real / "val20.parquet").resolve())
    data.prepare("imagenet", tmp_path / "from")
    val = data.imagenet()[1]
    expected = data.imagenet_parquet(real / "val20.parquet")
    assert val.label_N.tolist() == expected.label_N.tolist()
    assert (len(val.classes), len(val.label_N.unique())) == (1000, 20)
    large = (val.sizes(torch.arange(500)).min(1).values == 256).nonzero().flatten()[:20]
    assert torch.equal(val.pixels(large), expected.pixels_NCHW[large])


# Batches


def test_a_random_box_is_cut_as_pillow_cuts_it(home: Path, folders: Path) -> None:
    data.prepare("imagenet", folders)
    val = both()[1]
    box_B4 = torch.tensor([[3, 2, 10, 8], [0, 0, 30, 20], [5, 6, 20, 14]])
    row_B = torch.tensor([1, 0, 2])
    for found, row, (top, left, height, width) in zip(
        val.crops(row_B, box_B4), row_B.tolist(), box_B4.tolist(), strict=True
    ):
        image = PIL.open(io.BytesIO(val.store.read(row))).convert("RGB")
        cut = image.crop((left, top, left + width, top + height)).resize((SIZE, SIZE), PIL.Resampling.BILINEAR)
        assert np.array_equal(found.numpy(), np.asarray(cut).transpose(2, 0, 1))


@pytest.mark.parametrize("augment", ["none", "crop-flip", "resized-crop-flip"])
def test_batches_are_a_function_of_seed_epoch_and_step_shared_out_over_ranks(
    home: Path, folders: Path, augment: Any
) -> None:
    data.prepare("imagenet", folders)
    loader = both()[0].loader(4, train=True, augment=augment, pad=2, seed=3)
    whole = list(loader.batches(1))
    assert len(whole) == 2
    late = list(both()[0].loader(4, train=True, augment=augment, pad=2, seed=3).batches(1, start=1))
    assert torch.equal(late[0][0], whole[1][0])
    for rank in range(2):
        for (x, label), (part, part_label) in zip(whole, loader.batches(1, rank=rank, world=2), strict=True):
            assert torch.equal(part, x[rank::2])
            assert torch.equal(part_label, label[rank::2])
    assert not torch.equal(whole[0][0], next(loader.batches(2))[0])
    assert not torch.equal(whole[0][0], whole[1][0])


def test_boxes_are_drawn_for_the_size_of_each_picture(home: Path, tmp_path: Path) -> None:
    """A picture that is white but for its last column: only boxes that reach that far show black."""
    image = PIL.new("RGB", (90, 20), "white")
    image.paste("black", (80, 0, 90, 20))
    for part in ("train", "val"):
        (tmp_path / "from" / part / "n01").mkdir(parents=True)
        (tmp_path / "from" / part / "n01" / "a.png").write_bytes(encoded(image, "PNG"))
    data.prepare("imagenet", tmp_path / "from")
    one = both()[0]
    train = one.take([0] * 64)
    x_BCHW, _ = next(iter(train.loader(64, train=True, augment="resized-crop-flip")))
    dark = (x_BCHW < 0).flatten(1).any(1)
    assert 3 < int(dark.sum()) < 60
    assert torch.equal(one.sizes(torch.tensor([0])), torch.tensor([[20, 90]]))


def test_nothing_is_decoded_before_it_is_asked_for(home: Path, folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data.prepare("imagenet", folders)
    decoded = []
    original = stored.open_rgb
    monkeypatch.setattr(stored, "open_rgb", lambda content: decoded.append(1) or original(content))
    train, _ = both()
    rest, held_out = train.split(3)
    assert (len(rest), len(held_out), decoded) == (6, 3, [])
    assert sorted(rest.row_N.tolist() + held_out.row_N.tolist()) == list(range(9))
    assert held_out.label_N.tolist() == train.store.label_N[held_out.row_N].tolist()
    assert held_out.label_N.bincount().tolist() == [1, 1, 1]
    batches = train.loader(2).batches(0, start=2)
    next(batches)
    batches.close()
    assert len(decoded) <= 4  # the batch, and the one after it


def test_a_recipe_s_sets_train_evaluate_and_estimate(home: Path, folders: Path) -> None:
    data.prepare("imagenet", folders)
    part = {"name": "imagenet", "val": 3, "args": {"size": 16}}
    sets = read_sets(parse_experiment({"data": part, "backbone": {"name": "resnet18"}}))
    assert sets.val is not None
    assert (len(sets.train), len(sets.val), len(sets.test)) == (6, 3, 6)
    gated = gate(OwnNet(), FTWT(), input_shape=sets.train.shape)
    loader = sets.train.loader(3, train=True, augment="resized-crop-flip")
    result = fit(gated, loader, Recipe(epochs=1), val=sets.val.loader(3))
    assert result.epochs[0].val_top1 is not None
    assert evaluate(gated, sets.test.loader(4)).n == 6
    assert estimate(OwnNet(), FTWT(), sets.train.take(slice(0, 4)).loader(2), [0.5])


# Preparing: all or nothing, and no work twice


def test_preparing_again_changes_nothing_and_decodes_nothing(
    home: Path, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data.prepare("imagenet", folders)
    before = files(home)
    assert set(before) == {
        "set.json",
        *(f"train/{n:05}.{kind}" for n in range(3) for kind in ("pictures", "safetensors")),
        *(f"val/{n:05}.{kind}" for n in range(2) for kind in ("pictures", "safetensors")),
    }
    monkeypatch.setattr(layouts, "open_rgb", None)
    data.prepare("imagenet", folders)
    assert files(home) == before


@pytest.mark.parametrize("dies_at", [1, 2, 4])
def test_an_interrupted_preparation_is_no_set_and_goes_on_to_the_same_files(
    home: Path, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: int
) -> None:
    data.prepare("imagenet", folders)
    whole = files(home)
    monkeypatch.setenv("COFIRE_DATA", str(tmp_path / "other"))
    calls = []
    original = shards.write_tensors

    def dying(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == dies_at:
            raise KeyboardInterrupt  # between the two files of a shard
        original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(shards, "write_tensors", dying)
        with pytest.raises(KeyboardInterrupt):
            data.prepare("imagenet", folders)
    with pytest.raises(FileError, match=r"imagenet not found: .*has no set\.json; .*cofire data imagenet --from"):
        data.imagenet()
    brought = []
    brought_before = layouts._brought
    monkeypatch.setattr(layouts, "_brought", lambda *a: brought.append(1) or brought_before(*a))
    data.prepare("imagenet", folders)
    assert files(tmp_path / "other" / "imagenet") == whole
    assert len(brought) == 15 - [0, 4, 6, 10][dies_at - 1]  # val has shards of 4 and 2, train of 4, 4 and 1


def test_a_full_disk_leaves_nothing_half_written(home: Path, folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def disk_full(*_: Any) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("cofire.files.atomic.os.fsync", disk_full)
        with pytest.raises(FileError, match=r"val/00000\.pictures cannot be written: No space left on device"):
            data.prepare("imagenet", folders)
    assert files(home) == {}
    assert len(data.prepare("imagenet", folders)[0]) == 9


def test_another_origin_takes_the_place_of_the_old_one(home: Path, folders: Path, tmp_path: Path) -> None:
    data.prepare("imagenet", write_folders(tmp_path / "many", n=9))
    (home / "train" / "00005.safetensors").unlink()  # as if a writer had been killed between the files of a shard
    data.prepare("imagenet", folders)
    replaced = files(home)
    for path in home.rglob("*"):
        if path.is_file():
            path.unlink()
    data.prepare("imagenet", folders)
    assert files(home) == replaced


def test_a_set_is_not_there_while_it_is_replaced(home: Path, folders: Path, tmp_path: Path) -> None:
    data.prepare("imagenet", folders)
    other = write_folders(tmp_path / "other")
    (other / "train" / "n03" / "n03_2.JPEG").write_bytes(b"not a picture")
    with pytest.raises(DataError, match=r"n03_2\.JPEG cannot be read"):
        data.prepare("imagenet", other)
    with pytest.raises(FileError, match="imagenet not found"):
        data.imagenet()


# Damage


@pytest.mark.parametrize("kind", ["nonsense", "truncated", "empty"])
def test_an_unreadable_picture_is_named_or_counted_and_left_out(
    home: Path, folders: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    broken = folders / "train" / "n02" / "n02_0.JPEG"
    content = broken.read_bytes()
    broken.write_bytes({"nonsense": b"no picture", "truncated": content[: len(content) // 2], "empty": b""}[kind])
    with pytest.raises(DataError, match=r"picture .*n02/n02_0\.JPEG cannot be read: .*unreadable='skip'"):
        data.prepare("imagenet", folders)
    assert not (home / "set.json").exists()
    for _ in range(2):  # the second time nothing is decoded, but the warning is the same
        caplog.clear()
        with caplog.at_level(logging.WARNING, "cofire"):
            train, _ = data.prepare("imagenet", folders, unreadable="skip")
        assert len(train) == 8
        assert train.label_N is not None
        assert train.label_N.bincount().tolist() == [3, 2, 3]
        assert [text.partition(":")[0] for text in caplog.messages] == ["1 pictures cannot be read and are left out"]
        assert "n02_0.JPEG" in caplog.text
    assert json.loads((home / "set.json").read_text())["left_out"] == [str(broken)]
    with pytest.raises(DataError, match=r"n02_0\.JPEG"):  # who no longer asks to skip is told again
        data.prepare("imagenet", folders)


def test_an_unreadable_picture_in_parquet_is_named(home: Path, tmp_path: Path) -> None:
    write_parquet(tmp_path / "from" / "train.parquet", [encoded(picture(1)), b"no picture"], [0, 1])
    write_parquet(tmp_path / "from" / "val.parquet", [encoded(picture(1))], [0])
    with pytest.raises(DataError, match=r"picture 1\.JPEG of .*train\.parquet cannot be read"):
        data.prepare("imagenet", tmp_path / "from")
    assert len(data.prepare("imagenet", tmp_path / "from", unreadable="skip")[0]) == 1


def test_a_flipped_bit_of_a_stored_picture_is_found_and_mended(
    home: Path, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data.prepare("imagenet", folders)
    whole = files(home)
    damaged = home / "train" / "00001.pictures"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    train, _ = both()
    with pytest.raises(FileError, match=r"train/00001\.pictures is damaged: the checksum of its picture \d is wrong"):
        list(train.loader(3))
    with pytest.raises(FileError, match=r"00001\.pictures is damaged"):
        data.prepare("imagenet")  # no origin: check what is there
    brought = []
    original = layouts._brought
    monkeypatch.setattr(layouts, "_brought", lambda *a: brought.append(1) or original(*a))
    data.prepare("imagenet", folders)
    assert files(home) == whole
    assert len(brought) == 4


@pytest.mark.parametrize(
    ("path", "content", "text"),
    [
        ("train/00001.pictures", b"short", r"00001\.pictures is truncated or damaged: it must have \d+ bytes, got 5"),
        ("train/00001.pictures", None, r"00001\.pictures does not exist"),
        ("train/00001.safetensors", None, r"00001\.safetensors does not exist"),
        ("train/00001.safetensors", b"nonsense", r"00001\.safetensors is truncated or not a safetensors file"),
        ("set.json", b"{", r"set\.json is not readable as JSON"),
        ("set.json", b'{"format": "other"}', r"set\.json must have format 'cofire-set/1', got 'other'"),
        ("set.json", b'{"format": "cofire-set/1"}', r"set\.json must be as `cofire data imagenet` writes it"),
    ],
)
def test_damaged_files_of_a_set_are_named(
    home: Path, folders: Path, path: str, content: bytes | None, text: str
) -> None:
    data.prepare("imagenet", folders)
    whole = files(home)
    (home / path).unlink()
    if content is not None:
        (home / path).write_bytes(content)
    with pytest.raises(FileError, match=text):
        data.imagenet()
    data.prepare("imagenet", folders)
    assert files(home) == whole


# What is not as it must be


def remove(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()


def test_a_missing_class_folder_is_named(home: Path, folders: Path) -> None:
    remove(folders / "val" / "n02")
    with pytest.raises(DataError, match=r"must have the same classes, but val lacks n02$"):
        data.prepare("imagenet", folders)
    (folders / "val" / "n02").mkdir()
    with pytest.raises(DataError, match="n02 has no images"):
        data.prepare("imagenet", folders)
    remove(folders / "val")
    with pytest.raises(FileError, match=r"must hold val/ with one folder per class, or Parquet files"):
        data.prepare("imagenet", folders)
    assert files(home) == {}


def test_parquet_that_is_none_is_named(home: Path, tmp_path: Path) -> None:
    good = [encoded(picture(1))]
    write_parquet(tmp_path / "from" / "val.parquet", good, [0], {"class_names": '["a", "b"]'})
    train = tmp_path / "from" / "train.parquet"
    train.write_bytes(b"PAR1 but no more")
    with pytest.raises(FileError, match=r"train\.parquet must be Parquet with columns image\{bytes, path\} and label"):
        data.prepare("imagenet", tmp_path / "from")
    write_parquet(train, [], [])
    with pytest.raises(DataError, match="the Parquet files of train have no rows"):
        data.prepare("imagenet", tmp_path / "from")
    write_parquet(train, good, [-1])
    with pytest.raises(DataError, match=r"train\.parquet: labels must be at least 0, got -1"):
        data.prepare("imagenet", tmp_path / "from")
    write_parquet(train, good, [2])
    with pytest.raises(DataError, match=r"labels must be in 0\.\.1, one per class, got 2"):
        data.prepare("imagenet", tmp_path / "from")
    write_parquet(train, good, [0], {"class_names": '["a", "c"]'})
    with pytest.raises(DataError, match="val lacks c; train lacks b"):
        data.prepare("imagenet", tmp_path / "from")
    assert files(home) == {}


def test_wrong_options_are_refused_at_once(home: Path, folders: Path) -> None:
    with pytest.raises(ConfigError, match="shorter side of stored pictures must be at least 1, got 0"):
        data.prepare("imagenet", folders, shorter=0)
    with pytest.raises(ConfigError, match="unreadable must be 'error' or 'skip', got 'ignore'"):
        data.prepare("imagenet", folders, unreadable="ignore")
    with pytest.raises(ConfigError, match="cifar10 is prepared without shorter"):
        data.prepare("cifar10", shorter=3)
    data.prepare("imagenet", folders)
    with pytest.raises(ConfigError, match="size of pictures must be at least 1, got 0"):
        data.imagenet(size=0)


def test_the_command_prepares_checks_and_says_what_is_there(
    home: Path,
    folders: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def cofire(*arguments: str) -> int:
        monkeypatch.setattr("sys.argv", ["cofire", "data", "imagenet", *arguments])
        with pytest.raises(SystemExit) as leaving:
            cli.main()
        return int(str(leaving.value.code))

    assert cofire() == 2
    assert "cofire data imagenet --from FOLDER" in capsys.readouterr().err
    (folders / "train" / "n01" / "broken.jpg").write_bytes(b"")
    assert cofire("--from", str(folders)) == 2
    assert "broken.jpg cannot be read" in capsys.readouterr().err
    assert cofire("--from", str(folders), "--skip-unreadable", "--shorter", "24") == 0
    assert "StoredImages('imagenet train': 9 x 3x224x224, 3 classes)" in capsys.readouterr().out
    assert "1 pictures cannot be read" in caplog.text
    assert cofire("--json") == 0
    described = json.loads(capsys.readouterr().out)
    assert described[1] == {"name": "imagenet val", "n": 6, "shape": [3, 224, 224]}
    assert in_order(both()[0]).sizes(torch.tensor([2])).tolist() == [[24, 27]]


def test_the_batch_after_the_next_is_not_made_before_its_time() -> None:
    made = []

    def makers() -> Iterator[Any]:
        for n in range(9):
            yield lambda n=n: made.append(n) or (torch.tensor(n), None)

    batches = stored.StoredImages.made(None, makers())  # type: ignore[arg-type]
    assert [int(x) for x, _ in islice(batches, 3)] == [0, 1, 2]
    batches.close()  # type: ignore[attr-defined]
    assert made == [0, 1, 2, 3]
