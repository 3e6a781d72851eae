"""The bench in int8: the same images for all, ratios to the fastest of the same precision, and how right each is."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from benched import small_bench
from nets import images
from small import tiny_gated
from torch import nn

from cofire.bench import Peer, own_plan, random_plan
from cofire.bench.ours import NAME, compile_engine
from cofire.bench.peers import eager
from cofire.bench.report import table
from cofire.bench.rounds import ratio_of_medians
from cofire.text import rendered


def rounding(model: nn.Module, x: Any, threads: int) -> Any:
    """A peer in int8 that is roughly right; the more images it was calibrated on, the better."""
    right = eager(model, x, threads)
    return lambda image: right(image) * np.float32(1 + 0.1 / len(x))


def test_int8_stands_beside_float32_and_each_is_held_against_the_fastest_of_its_own() -> None:
    plan = random_plan("resnet8_digits", macs=[0.5])
    slow = Peer("Slow", ("torch",), eager)
    peers = (slow, Peer("Rough", ("torch",), rounding, "int8"))
    result = small_bench(plan, peers=peers, compile=compile_engine, precisions=["float32", "int8"])
    assert result.left_out == {}
    who = [(timed.engine, timed.precision, timed.point) for timed in result.timed]
    assert who == [
        *(("Slow", "float32", None), ("Rough", "int8", None), (NAME, "float32", None), (NAME, "float32", 0)),
        *((NAME, "int8", None), (NAME, "int8", 0)),
    ]
    found = json.loads(json.dumps(result.to_json()))
    assert (found["fastest_dense"], found["fastest_dense_int8"]) == ("Slow", "Rough")
    ours, rough = result.of(NAME, 0, "int8"), result.of("Rough", None, "int8")
    assert ours is not None
    assert rough is not None
    expected = ratio_of_medians(ours.seconds, rough.seconds)
    assert found["ratio_to_fastest_dense_int8"] == found["points"][0]["ratio_to_fastest_dense_int8"] == expected
    assert [engine["precision"] for engine in found["engines"]] == [precision for _, precision, _ in who]
    assert found["engines"][5]["ratio_to_fastest_dense_int8"] == expected
    assert found["engines"][5]["ratio_to_fastest_dense"] == result.ratio(ours)
    assert ours.error == 0  # it was held against its simulation under the same masks
    assert rendered(table(result)).count(" int8 ") == 4  # three rows, and the column of ratios


def test_all_engines_in_int8_see_the_same_images() -> None:
    plan = random_plan("resnet8_digits")
    seen: list[Any] = []

    def seeing(model: nn.Module, x: Any, threads: int) -> Any:
        seen.append(x)
        return eager(model, x, threads)

    peers = (Peer("A", ("torch",), seeing), Peer("B", ("torch",), seeing, "int8"))
    small_bench(plan, peers=peers, precisions=["float32", "int8"])
    assert [len(x) for x in seen] == [1, len(plan.images)]
    other = own_plan("x", tiny_gated(), images(2, (1, 8, 8)), "two", calibration=images(5, (1, 8, 8)))
    small_bench(other, peers=peers[1:], precisions=["int8"])
    assert np.array_equal(seen[-1], images(5, (1, 8, 8)).numpy())


def test_an_engine_in_int8_may_be_roughly_right_and_no_more() -> None:
    def far_off(model: nn.Module, x: Any, threads: int) -> Any:
        right = eager(model, x, threads)
        return lambda image: right(image)[:, ::-1]

    peers = (Peer("Rough", ("torch",), rounding, "int8"), Peer("Far", ("torch",), far_off, "int8"))
    result = small_bench(random_plan("resnet8_digits"), peers=peers, precisions=["int8"])
    assert list(result.left_out) == ["Far, int8"]
    assert result.left_out["Far, int8"].startswith("refused: its logits must be within 1 standard deviations")


def test_accuracy_and_agreement_by_hand() -> None:
    gated = tiny_gated().eval()
    x = images(4, (1, 8, 8))
    with torch.no_grad():
        said = gated.backbone(x).argmax(1)
        gates_say = gated(x).argmax(1)
    labels = torch.cat([said[:3], (said[3:] + 1) % 10])
    result = small_bench(own_plan("digits", gated, x, "four images", labels=labels))
    dense, ours = result.of("PyTorch", None), result.of(NAME, 0)
    assert dense is not None
    assert ours is not None
    assert (dense.agreement, dense.accuracy) == (1.0, 0.75)
    assert ours.agreement == float((gates_say == said).double().mean())
    assert ours.accuracy == float((gates_say == labels).double().mean())
    assert "75.0 %" in rendered(table(result))
