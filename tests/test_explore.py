"""What `cofire explore` shows: the engine's own numbers, a light for each filter, and nothing from elsewhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from small import tiny_gated

import cofire
from cofire import Card
from cofire.errors import ConfigError, DataError
from cofire.explore import subject as subjects
from cofire.explore.drawing import drawn, wall
from cofire.explore.look import heat, look
from cofire.explore.subject import Subject, as_input, open_subject, read_picture


@pytest.fixture(scope="module")
def zoo_subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """The zoo's gated model where its data set is not: digits are shown."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COFIRE_DATA", str(tmp_path_factory.mktemp("empty")))
        return open_subject("zoo:resnet20_cifar10_ftwt", 12)


def test_the_zoo_starts_with_pictures_that_ship_cheapest_first(zoo_subject: Subject) -> None:
    assert zoo_subject.pixels_NCHW.shape == (12, 3, 32, 32)
    assert "digits" in zoo_subject.images
    zoo_subject.engine(as_input(zoo_subject.pixels_NCHW))
    macs_N = sum(zoo_subject.engine.last_macs.values())
    assert np.array_equal(macs_N, zoo_subject.macs_N)
    assert np.array_equal(macs_N, np.sort(macs_N))


def test_a_look_is_what_the_engine_and_the_model_say(zoo_subject: Subject) -> None:
    engine, pixels_CHW = zoo_subject.engine, zoo_subject.pixels_NCHW[3]
    cheap, plain = look(zoo_subject, pixels_CHW, 3.0), look(zoo_subject, pixels_CHW)
    engine(as_input(pixels_CHW[None]), threshold=3.0)
    assert cheap.gated.macs == sum(macs[0] for macs in engine.last_macs.values())
    assert {name: mask.tolist() for name, mask in cheap.masks.items()} == {
        name: mask[0].tolist() for name, mask in engine.last_masks.items()
    }
    assert cheap.gated.macs < plain.gated.macs < plain.dense.macs == cheap.dense.macs
    assert plain.dense.macs == sum(cofire.cost(zoo_subject.gated.graph, {}).dense.values())
    assert plain.gated.classes[0] in zoo_subject.engine.classes
    assert zoo_subject.gated.threshold == 0
    warm = heat(zoo_subject, look(zoo_subject, pixels_CHW, 1e9), "layer3.0.conv1")
    assert warm.dense_NHW.max() > 0
    assert warm.gated_NHW.max() == 0  # nothing runs above that threshold


def test_the_wall_has_a_light_for_each_filter() -> None:
    text = wall({"a<b": np.array([True, False, True]), "c": np.zeros(40, bool)})
    assert (text.count('class="on"'), text.count('class="off"')) == (2, 41)
    assert "a&lt;b: 2 of 3" in text
    assert "c: 0 of 40" in text
    assert "no gates" in wall({})


def test_the_page_s_text_names_no_other_host(zoo_subject: Subject) -> None:
    pixels_CHW = zoo_subject.pixels_NCHW[0]
    seen = look(zoo_subject, pixels_CHW)
    text = drawn(seen, heat(zoo_subject, seen, "conv1"))
    assert "http" not in text
    assert text.count("data:image/png;base64,") == 3
    assert "MACs saved" in text


def test_a_program_alone_can_be_explored_without_heatmaps(tmp_path: Path) -> None:
    path = cofire.compile(tiny_gated()).save(tmp_path / "a.cofire")
    subject = open_subject(str(path), 5)
    assert subject.pixels_NCHW.shape == (5, 1, 8, 8)
    found = look(subject, subject.pixels_NCHW[0])
    assert found.gated.classes[0].startswith("class ")
    assert heat(subject, found, "conv1") is None
    with pytest.raises(ConfigError, match="square pictures"):
        open_subject(str(cofire.compile(cofire.create_backbone("resnet20"), (3, 32, 40)).save(tmp_path / "b.cofire")))


@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_of_a_folder_take_the_place_of_the_test_set(channels: int, tmp_path: Path) -> None:
    model = cofire.create_backbone("resnet8_digits") if channels == 1 else cofire.create_backbone("resnet20")
    path = cofire.compile(model, (channels, 8, 8)).save(tmp_path / "a.cofire")
    for grey in (10, 200, 30):
        (tmp_path / "mine" / "deep").mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 12, 3), grey, np.uint8)).save(tmp_path / "mine" / "deep" / f"{grey}.png")
    subject = open_subject(str(path), 2, tmp_path / "mine")
    assert subject.pixels_NCHW.shape == (2, channels, 8, 8)
    assert {int(pixels.flat[0]) for pixels in subject.pixels_NCHW} == {10, 30}  # first and last by name
    assert subject.images == str(tmp_path / "mine")


def test_where_k_is_fixed_the_slider_moves_it_and_masks_cost_and_answer_follow(tmp_path: Path) -> None:
    sizes = {unit.group: unit.out_channels for unit in tiny_gated().units if unit.gated}
    gated = tiny_gated(select="top", signature={name: size // 2 for name, size in sizes.items()})
    cofire.save(gated, tmp_path / "run", Card(input_shape=(1, 8, 8), mean=(0.0,), std=(1.0,)))
    subject = open_subject(str(tmp_path / "run"), 5)
    knob, pixels_CHW = subject.knob, subject.pixels_NCHW[0]
    assert (knob.name, knob.value, knob.high) == ("k", 1.0, 2.0)
    x_BCHW = as_input(pixels_CHW[None])
    assert np.array_equal(knob.at(1.0).engine(x_BCHW), subject.engine(x_BCHW))
    looks = {place: look(subject, pixels_CHW, place) for place in (knob.low, 0.5, 1.0, knob.high)}
    for place, seen in looks.items():
        for name, mask_O in seen.masks.items():
            assert mask_O.sum() == max(1, round(place * (sizes[name] // 2)))
        assert seen.dense.macs == looks[1.0].dense.macs
    macs = [seen.gated.macs for seen in looks.values()]
    assert macs == sorted(set(macs))
    assert macs[-1] == looks[1.0].dense.macs
    few, all_of_them = (heat(subject, looks[place], "layer1.0.conv1").gated_NHW for place in (knob.low, knob.high))
    assert few.sum() < all_of_them.sum()
    assert knob.at(1e9).engine is knob.at(knob.high).engine  # no more engines than the slider has places


def test_pictures_are_fitted_and_what_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.fromarray(np.full((20, 30, 3), 77, np.uint8)).save(tmp_path / "a.png")
    assert np.array_equal(read_picture(tmp_path / "a.png", (3, 8, 8)), np.full((3, 8, 8), 77))
    assert np.array_equal(read_picture(tmp_path / "a.png", (1, 8, 8)), np.full((1, 8, 8), 77))
    (tmp_path / "b.png").write_bytes(b"no picture")
    (tmp_path / "c.png").write_bytes((tmp_path / "a.png").read_bytes()[:40])
    for name in ("b.png", "c.png", "gone.png"):
        with pytest.raises(DataError, match=f"{name} is not a picture"):
            read_picture(tmp_path / name, (3, 8, 8))
    monkeypatch.setattr(subjects, "MAX_PIXELS", 599)
    with pytest.raises(DataError, match="at most 599 pixels, got 30 x 20"):
        read_picture(tmp_path / "a.png", (3, 8, 8))
