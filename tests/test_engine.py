"""Laws of the engine: whole networks against PyTorch, and forced masks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from lowered import backbone, cases, gated_as
from nets import images, random_masks
from small import tiny_gated, tiny_plain
from test_second_look import check_engine as check_second_look
from test_second_look import with_half_in_doubt
from torch import Tensor, nn

from cofire import FTWT, ConfigError, GatedModel, SecondLook, cost, trace, zoo
from cofire.gates.persistence import read_card
from cofire.runtime.engine import Engine, compile
from cofire.runtime.program import Shape

DIGITS = (1, 8, 8)
CLOSE = 1e-4  # of the logits' spread


# Networks


@torch.no_grad()
def in_float64(model: nn.Module, x: Tensor, masks: Mapping[str, Tensor]) -> Tensor:
    """What PyTorch computes under these masks, without its rounding."""
    try:
        if not isinstance(model, GatedModel):
            return model.double()(x.double())
        with model.double().force(masks):
            return model(x.double())
    finally:
        model.float()


def tensors(masks: Mapping[str, Any]) -> dict[str, Tensor]:
    return {group: torch.as_tensor(mask) for group, mask in masks.items()}


@torch.no_grad()
def in_float32(model: nn.Module, x: Tensor, masks: Mapping[str, Tensor]) -> Tensor:
    """What PyTorch computes under these masks."""
    if not isinstance(model, GatedModel):
        return model(x)
    with model.force(masks):
        return model(x)


def check_logits(found: Tensor, model: nn.Module, x: Tensor, masks: Mapping[str, Tensor]) -> None:
    """As near to the exact result as promised; random networks can be so sensitive that PyTorch itself is not."""
    wanted = in_float64(model, x, masks)
    rounding = float((in_float32(model, x, masks) - wanted).abs().max())
    allowed = max(CLOSE * float(wanted.std()), 16 * rounding)
    assert found.shape == wanted.shape
    assert float((found - wanted).abs().max()) <= allowed
    best = wanted.topk(2).values
    assert ((found.argmax(1) == wanted.argmax(1)) | (best[:, 0] - best[:, 1] < allowed)).all()


def check_macs(engine: Engine, model: nn.Module, shape: Shape, batch: int) -> None:
    if isinstance(model, GatedModel):
        counted = model.cost(tensors(engine.last_masks), shape).executed
    else:
        counted = cost(trace(model, shape), {}).executed
    assert engine.last_macs.keys() == counted.keys()
    for name, macs in engine.last_macs.items():
        assert macs.tolist() == counted[name].expand(batch).tolist(), name


def near(logits: Tensor) -> float:
    """Where rounding may decide; ten times what is promised for trained networks, for these are random and deep."""
    return 10 * CLOSE * max(1.0, float(logits.std()))


def check_decisions(engine: Engine, masks: Mapping[str, Tensor], logits: Mapping[str, Tensor]) -> None:
    """Up to an image's first decision that differs, and there only where the logit is all but at the threshold."""
    same = torch.ones(len(next(iter(masks.values()))), dtype=torch.bool)
    for group, found in tensors(engine.last_masks).items():
        differ = (found != masks[group]) & same[:, None]
        away = (logits[group] - engine.threshold).abs()
        assert (away[differ] <= near(logits[group])).all(), group
        same &= ~differ.any(1)


@torch.no_grad()
def check_network(engine: Engine, model: nn.Module, x: Tensor) -> None:
    shape: Any = tuple(x.shape[1:])
    found = engine(x)
    check_macs(engine, model, shape, len(x))
    if not isinstance(model, GatedModel):
        return check_logits(found, model, x, {})
    in_float64(model, x, {})
    masks = {group: mask.clone() for group, mask in model.masks.items()}
    logits = {group: decision.logits_BO for group, decision in model.decisions.items()}
    check_decisions(engine, masks, logits)
    check_logits(found, model, x, tensors(engine.last_masks))
    with engine.force(masks):
        found = engine(x)
        check_logits(found, model, x, masks)
        assert all(torch.equal(mask, masks[group]) for group, mask in tensors(engine.last_masks).items())
        check_macs(engine, model, shape, len(x))
        for group, values in tensors(engine.logits(x)).items():
            assert (values - logits[group]).abs().max() <= near(values), group
    with engine.force(masks, heads=True):
        assert torch.equal(engine(x), found)


@pytest.mark.parametrize(("name", "preset"), cases())
def test_a_backbone_computes_what_pytorch_does(name: str, preset: str) -> None:
    model, shape = backbone(name)
    if preset != "plain":
        model = gated_as(model, shape, FTWT.preset(preset) if preset != "default" else FTWT(always=True))
    check_network(compile(model, shape), model, images(3, shape))


@pytest.mark.parametrize("name", zoo.names())
def test_a_trained_model_computes_what_pytorch_does(name: str) -> None:
    model, card = zoo.load(name).eval(), read_card(zoo.folder(name))
    assert card is not None
    shape = card.input_shape
    x = images(20, shape)
    if isinstance(model, GatedModel) and isinstance(model.config, SecondLook):
        with_half_in_doubt(model, x)  # as calibrated, random images are all in doubt
        check_second_look(compile(model, shape), model, x)
    else:
        check_network(compile(model, shape), model, x)


@pytest.mark.parametrize(
    "options", [{"pool": "avg"}, {"softmax": False}, {"bias": False}, {"pool": "avg", "softmax": False}]
)
@pytest.mark.parametrize("site", ["pre_add", "post_add"])
def test_every_head(site: str, options: dict[str, Any]) -> None:
    model = gated_as(tiny_plain(), DIGITS, FTWT(always=True, site=site, **options))
    check_network(compile(model, DIGITS), model, images(5, DIGITS))


def test_a_map_of_another_size_than_the_model_was_made_for() -> None:
    model = gated_as(backbone("mobilenet_v2_imagenet", width=0.25)[0], (3, 70, 45), FTWT(always=True))
    check_network(compile(model, (3, 70, 45)), model, images(2, (3, 70, 45)))


@torch.no_grad()
def test_the_threshold_is_a_dial() -> None:
    model, x = gated_as(tiny_plain(), DIGITS, FTWT(always=True)), images(6, DIGITS)
    engine = compile(model)
    kept = []
    for threshold in (-1e9, -0.5, 0.0, 0.3, 1e9):
        model.threshold = engine.threshold = threshold
        check_network(engine, model, x)
        engine(x)
        kept.append(sum(int(mask.sum()) for mask in engine.last_masks.values()))
        assert compile(model).threshold == threshold
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] == 0
    assert kept[0] == sum(mask.size for mask in engine.last_masks.values())


# Forced masks


@torch.no_grad()
def test_masks_for_all_images_or_each_and_for_some_groups_only() -> None:
    model, x = gated_as(tiny_plain(), DIGITS, FTWT(always=True)), images(4, DIGITS)
    engine = compile(model)
    masks = random_masks(model, len(x))
    for part in ({}, dict(list(masks.items())[:2]), dict(list(masks.items())[2:]), masks):
        for forced in (part, {group: mask[1] for group, mask in part.items()}):
            for kind in (Tensor.bool, Tensor.int, Tensor.numpy, lambda mask: mask.float().numpy(), Tensor.tolist):
                with engine.force({group: kind(mask) for group, mask in forced.items()}):
                    found = engine(x)
                ran = tensors(engine.last_masks)
                assert all(torch.equal(ran[group], mask.expand(4, -1)) for group, mask in forced.items())
                check_logits(found, model, x, ran)
                check_macs(engine, model, DIGITS, len(x))


def test_force_ends_with_its_block_and_nests() -> None:
    engine, x = compile(tiny_gated()), images(2, DIGITS)

    def kept() -> set[bool]:
        engine(x)
        return set(np.concatenate([mask.ravel() for mask in engine.last_masks.values()]).tolist())

    free = engine(x)
    off = {name: np.zeros(mask.shape[1]) for name, mask in engine.last_masks.items()}
    with suppress(KeyError), engine.force(off):
        assert kept() == {False}
        with engine.force({name: 1 - mask for name, mask in off.items()}):
            assert kept() == {True}
        assert kept() == {False}
        raise KeyError
    assert torch.equal(engine(x), free)


def test_masks_that_do_not_fit_are_refused() -> None:
    engine, x = compile(tiny_gated()), images(2, DIGITS)
    group = engine.program.groups[0]
    for mask in (torch.ones(group.filters + 1), torch.ones(2, 2, group.filters), torch.ones(()), [[1.0]]):
        with pytest.raises(ConfigError, match=rf"{group.name}.*shape"), engine.force({group.name: mask}):
            engine(x)
    with (
        pytest.raises(ConfigError, match="one row or 2, got 3"),
        engine.force({group.name: torch.ones(3, group.filters)}),
    ):
        engine(x)
    with pytest.raises(ConfigError, match="unknown group"), engine.force({"nothing": torch.ones(1)}):
        engine(x)
