"""Laws that hold for every registered method on every network of a list; a new method is tested the day it is added.

A method that cannot do something says so by name; one that lives in a file outside the package is among them.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import outside_method
import pytest
import torch
import torch.nn.functional as F
from launching import start
from small import digest, tiny_images
from torch import Tensor

import cofire
from cofire import (
    FTWT,
    AbstractCallback,
    CompileError,
    ConfigError,
    GateConfig,
    GatedModel,
    Recipe,
    create_backbone,
    data,
    evaluate,
    fit,
    gate,
    mask_loss,
)
from cofire.gates.base import Compiling, gate_types

NETWORKS: dict[str, dict[str, Any]] = {"resnet8_digits": {}, "resnet20": {}, "mobilenet_v2": {"width": 0.25}}
CONFIGS: dict[str, Callable[[], GateConfig]] = {
    **gate_types(),
    "FTWT, by gradient": partial(FTWT, saliency="gradient", hidden=4),
}
METHODS = list(CONFIGS)


def make(network: str, method: str) -> GatedModel:
    torch.manual_seed(0)
    return gate(create_backbone(network, **NETWORKS[network]), CONFIGS[method]())


def batch(gated: GatedModel, n: int = 3) -> Tensor:
    return torch.randn(n, *gated.graph.input_shape, generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=NETWORKS)
def network(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def gated(network: str, method: str) -> GatedModel:
    return make(network, method).eval()


def test_the_method_from_outside_is_among_them() -> None:
    assert outside_method.Outside.__name__ in METHODS
    assert {"FTWT", "FBS", "LCS", "RNP", "LCCL", "CGNet", "BlockDrop", "SecondLook"} <= set(METHODS)


def test_open_gates_change_no_bit_or_are_refused_by_name(gated: GatedModel, method: str) -> None:
    x = batch(gated)
    if not gated.gates.opens:
        with pytest.raises(ConfigError, match=f"{method} has no open state"), gated.force("open"):
            pass
        return
    with torch.no_grad(), gated.force("open"):
        assert torch.equal(gated(x), gated.backbone(x))
    assert gated.cost().total("executed").tolist() == [gated.cost().dense_total] * 3


def test_nothing_forced_costs_what_is_dense(gated: GatedModel) -> None:
    assert gated.cost({}).total("executed").tolist() == [gated.cost({}).dense_total]


def test_what_is_off_is_exactly_zero_or_the_partial_sum(gated: GatedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    read: dict[str, Tensor] = {}
    seen: dict[str, Tensor] = {}
    decided, masked = gated.switchboard.decided, gated.switchboard.masked

    def reading(site: str, x: Tensor) -> Any:
        read[site] = x.clone()
        return decided(site, x)

    def recording(site: str, y: Tensor, decision: Any) -> Tensor:
        seen[site] = masked(site, y, decision)
        return seen[site].clone()

    monkeypatch.setattr(gated.switchboard, "decided", reading)
    monkeypatch.setattr(gated.switchboard, "masked", recording)
    with torch.no_grad():
        gated(batch(gated))
    assert list(seen) == list(gated.gates)
    for site, decision in gated.decisions.items():
        on = decision.mask.spread(seen[site]).expand_as(seen[site]) > 0.5
        left = torch.zeros_like(seen[site])
        if channels := gated.gates.sites[site].partial:
            conv: Any = gated.get_submodule(site)
            assert conv.groups == 1
            window = (conv.stride, conv.padding, conv.dilation)
            left = F.conv2d(read[site][:, :channels], conv.weight[:, :channels], conv.bias, *window)
        elif decision.partial_BOHW is not None:
            left = decision.partial_BOHW
        assert torch.equal(seen[site][~on], left[~on])


def test_cost_lies_between_nothing_and_dense(gated: GatedModel) -> None:
    with torch.no_grad():
        gated(batch(gated))
    cost = gated.cost()
    assert cost.total("executed").dtype == torch.int64
    assert ((cost.total("executed") > 0) & (cost.total("executed") <= cost.dense_total)).all()
    assert (cost.total("executed+heads") >= cost.total("executed")).all()


def test_a_deep_copy_gives_the_same_and_goes_its_own_way(gated: GatedModel) -> None:
    x = batch(gated)
    twin = copy.deepcopy(gated)
    with torch.no_grad():
        assert torch.equal(twin(x), gated(x))
        for parameter in twin.parameters():
            parameter.zero_()
        assert not torch.equal(twin(x), gated(x))


def test_saved_and_loaded_it_gives_the_same(gated: GatedModel, tmp_path: Path) -> None:
    x = batch(gated)
    gated.save(tmp_path)
    loaded = cofire.load(tmp_path)
    assert isinstance(loaded, GatedModel)
    assert loaded.config == gated.config
    with torch.no_grad():
        assert torch.equal(loaded(x), gated(x))


def test_the_loss_reaches_every_parameter_of_the_method(gated: GatedModel) -> None:
    gated.train()
    labels = torch.tensor([0, 1, 2])
    (F.cross_entropy(gated(batch(gated)), labels) + mask_loss(gated, labels)).backward()
    assert [name for name, p in gated.gates.named_parameters() if p.grad is None] == []
    assert all(p.grad is None or p.grad.isfinite().all() for p in gated.parameters())


def test_gradients_are_those_of_finite_differences(method: str) -> None:
    """Of the task loss and the method's, by the last layer's weights: a mask written in place must not bend them."""
    gated = make("resnet8_digits", method).double().train()
    x, labels = batch(gated).double(), torch.tensor([0, 1, 2])
    weight = gated.get_parameter("layer3.0.conv1.weight")

    def loss() -> Tensor:
        torch.manual_seed(0)
        with gated.force(chosen):
            logits = gated(x)
        return F.cross_entropy(logits, labels)

    chosen: dict[str, Tensor] = {}
    loss()
    # Masks jump, and some let a gradient through all the same: here they are held as they are.
    decided = {name: decision for name, decision in gated.decisions.items() if decision.scale_BO is None}
    chosen.update({name: decision.mask.bits for name, decision in decided.items()})
    gated.zero_grad()
    loss().backward()
    assert weight.grad is not None
    place = tuple(int(i) for i in torch.nonzero(weight.grad.abs() == weight.grad.abs().max())[0])
    analytic, values = float(weight.grad[place]), []
    for step in (1e-6, -1e-6):
        with torch.no_grad():
            weight[place] += step
            values.append(float(loss().detach()))
            weight[place] -= step
    assert analytic == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-3, abs=1e-7)


class Digits(NamedTuple):
    """A network that knows digits a little, and batches to learn and test with."""

    model: torch.nn.Module
    few: list[Any]
    test: data.Images


@pytest.fixture(scope="module")
def digits() -> Digits:
    pytest.importorskip("sklearn", reason="scikit-learn is needed (extra demo)")
    train, test = data.digits()
    few = [batch for batch, _ in zip(train.loader(64, train=True), range(8), strict=False)]
    torch.manual_seed(0)
    model = create_backbone("resnet8_digits")
    fit(model, few, Recipe(epochs=4, lr=0.1))
    return Digits(model, few, test)


def test_it_runs_end_to_end_on_digits(method: str, digits: Digits, tmp_path: Path) -> None:
    torch.manual_seed(0)
    gated = gate(digits.model, CONFIGS[method]())
    fit(gated, digits.few, Recipe(epochs=2, lr=0.02, head_lr=0.02), out=tmp_path / "run")
    report = evaluate(gated, digits.test.loader(360), text="")
    assert report.n == 360
    assert report.top1 > 0.3  # chance is 0.1
    assert 0.0 <= report.reduction["executed"] < 1.0
    gated.save(tmp_path / "saved")
    x = next(iter(digits.test.loader(8)))[0]
    with torch.no_grad():
        assert torch.equal(cofire.load(tmp_path / "saved")(x), gated(x))


class StopAt(AbstractCallback):
    """Ends the process's work at a step, as a kill would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, run: Any) -> None:
        if run.step == self.step:
            raise KeyboardInterrupt


def test_interrupted_and_called_again_it_ends_with_the_same_weights(method: str, tmp_path: Path) -> None:
    recipe = Recipe(epochs=2, lr=0.05, checkpoint_steps=2, select="last")
    loader = tiny_images(48).loader(12, train=True)
    whole, stopped = make("resnet8_digits", method), make("resnet8_digits", method)
    fit(whole, loader, recipe, out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fit(stopped, loader, recipe, out=tmp_path / "stopped", callbacks=[StopAt(5)])
    again = make("resnet8_digits", method)
    fit(again, loader, recipe, out=tmp_path / "stopped")
    assert digest(again) == digest(whole)


def test_it_trains_in_bf16_and_then_computes_in_float32(method: str, tmp_path: Path) -> None:
    gated = make("resnet8_digits", method)
    result = fit(gated, tiny_images(24).loader(12, train=True), Recipe(epochs=1, lr=0.01, precision="bf16"))
    assert len(result.epochs) == 1
    assert all(p.isfinite().all() for p in gated.parameters())
    gated.save(tmp_path)
    x = batch(gated)
    with torch.no_grad():
        assert torch.equal(gated(x), cofire.load(tmp_path)(x))


def test_evaluated_it_reports_every_site(method: str) -> None:
    gated = make("resnet8_digits", method)
    report = evaluate(gated, tiny_images(20).loader(10), text="")
    assert list(report.keep_rate) == list(gated.gates)
    assert all(0.0 <= rate <= 1.0 for rate in report.keep_rate.values())


def test_its_cost_is_foretold_or_refused_by_name(method: str) -> None:
    config = CONFIGS[method]()
    model, loader = create_backbone("resnet8_digits"), tiny_images(20).loader(10)
    if config.foretold:
        assert len(cofire.estimate(model, config, loader, [0.5, 0.9]).ratios) == 2
    else:
        with pytest.raises(ConfigError, match=type(config).__name__):
            cofire.estimate(model, config, loader)


def test_the_engine_runs_it_as_pytorch_does_or_refuses_it_by_name(method: str) -> None:
    gated = make("resnet8_digits", method).eval()
    if not isinstance(gated.gates, Compiling):
        with pytest.raises(CompileError, match=method):
            cofire.compile(gated)
        return
    x = batch(gated, 8)
    with torch.no_grad():
        logits = gated(x)
    found = cofire.compile(gated)(x)
    assert float((found - logits).abs().max()) <= 1e-4 * float(logits.abs().max())


def test_analyses_of_filters_take_it_or_refuse_its_kind_by_name(method: str) -> None:
    gated = make("resnet8_digits", method).eval()
    kinds = {site.kind for site in gated.gates.sites.values()}
    if kinds == {"filters"}:
        assert len(cofire.analysis.collect(gated, tiny_images(10).loader(5), text="")) == 10
        return
    for call in (lambda: cofire.analysis.collect(gated, tiny_images(10).loader(5), text=""), lambda: gated.masks):
        with pytest.raises(ConfigError, match=f"{method} decides on masks of another kind"):
            call()


def test_one_step_of_two_processes_leaves_no_parameter_out(tmp_path: Path) -> None:
    workers = start([sys.executable, str(Path(__file__)), str(tmp_path)])
    texts = [worker.communicate(timeout=200) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], texts
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert list(ranks[0]) == METHODS
    assert ranks[0] == ranks[1]  # the same weights on both sides after the step


def _two_processes(out: Path) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    found = {}
    for method in METHODS:
        gated = make("resnet8_digits", method)
        fit(gated, data.synthetic(32, (1, 8, 8)).loader(16, train=True), Recipe(epochs=1, lr=0.05))
        # batch statistics are each process's own
        found[method] = digest(torch.nn.ParameterList([p for p in gated.parameters()]))
    (out / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    _two_processes(Path(sys.argv[1]))
