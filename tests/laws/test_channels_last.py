"""Linear layers on maps whose channels come last, as ConvNeXt has them, are units like convs of one tap."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from nets import SHAPE, Net, channels_last_net, conv, fc, images
from torch import Tensor, nn

from cofire import (
    FTWT,
    CompileError,
    ConfigError,
    GatedModel,
    NoUnitError,
    compile,
    cost,
    estimate,
    fit_heads,
    gate,
    load,
    mask_loss,
    quantize,
    save,
    static_twin,
    trim,
)
from cofire.bench.sliced import Sliced
from cofire.export import to_onnx
from cofire.gates.base import gate_types
from cofire.pruning.dcp import Task
from cofire.runtime.limits import Limits

QUICK = Limits(tuning_seconds=0.0)
FILTERS = ["FTWT", "FBS", "LCS", "RNP"]


def gated_by(method: str) -> GatedModel:
    torch.manual_seed(0)
    return gate(channels_last_net().eval(), gate_types()[method](always=True), input_shape=SHAPE).eval()


def test_the_wide_layers_are_units_with_their_macs_and_the_narrow_ones_say_why_not() -> None:
    units = {unit.name: unit for unit in gated_by("FTWT").units}
    assert [name for name, unit in units.items() if unit.gated] == ["wide1", "wide2"]
    wide = units["wide1"]
    assert (wide.in_channels, wide.out_channels, wide.kernel_size, wide.out_size) == (6, 24, (1, 1), (4, 4))
    assert wide.macs == 6 * 24 * 16
    assert units["narrow1"].reason == "linear: no activation comes after it"


def test_what_is_off_is_zero_for_the_layer_that_reads_it_and_counts_for_none() -> None:
    """By hand: of 24 filters 10 are on, so that both layers do 10 / 24 of their work; the rest is as it was."""
    gated, on = gated_by("FTWT"), torch.arange(24) < 10
    read: list[Tensor] = []
    gated.backbone.narrow1.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    with torch.no_grad(), gated.force({"wide1": on, "wide2": torch.ones(24)}):
        found = gated(images())
    assert read[0].shape == (3, 4, 4, 24)
    assert bool((read[0].abs().amax((0, 1, 2)) > 0).eq(on).all())
    macs = cost(gated.graph, {"wide1": on[None]})
    assert int(macs.executed["wide1"]) == int(macs.executed["narrow1"]) == 6 * 10 * 16
    assert int(macs.executed["wide2"]) == 6 * 24 * 16
    net = channels_last_net().eval()
    with torch.no_grad():
        net.narrow1.weight.mul_(on.float())
        torch.testing.assert_close(found, net(images()))


@pytest.mark.parametrize("method", FILTERS)
def test_open_is_dense_bit_by_bit_it_learns_and_comes_back_from_a_file(method: str, tmp_path: Path) -> None:
    gated, x = gated_by(method), images()
    if gated.gates.opens:
        with torch.no_grad(), gated.force("open"):
            assert torch.equal(gated(x), gated.backbone(x))
    gated.train()
    labels = torch.tensor([0, 1, 2])
    loss = F.cross_entropy(gated(x), labels) + mask_loss(gated, labels)
    loss.backward()
    assert float(gated.backbone.wide1.weight.grad.abs().max()) > 0
    assert all(parameter.grad is not None for parameter in gated.gates.parameters())
    save(gated.eval(), tmp_path)
    again = load(tmp_path, model=channels_last_net())
    with torch.no_grad():
        assert torch.equal(again(x), gated(x))


@pytest.mark.parametrize("method", ["FTWT", "FBS", "LCS"])
def test_the_engine_computes_the_same_and_executes_what_cost_counts(method: str) -> None:
    gated, x = gated_by(method), images(5)
    if method == "LCS":  # whose gates are all on at first
        with torch.no_grad():
            for gates in gated.gates.values():
                gates.gates_NO.copy_(torch.randn(gates.gates_NO.shape).clamp_min(0))
    engine = compile(gated, limits=QUICK)
    found = engine(x)
    masks = {name: torch.from_numpy(mask) for name, mask in engine.last_masks.items() if name in gated.gates.sites}
    assert any(not mask.all() for mask in masks.values()), "all filters are on: nothing is seen"
    executed = cost(gated.graph, masks).executed
    for layer in gated.graph.layers:
        assert engine.last_macs[layer].tolist() == executed[layer].tolist(), layer
    with torch.no_grad():
        wanted = gated(x)
    assert float((found - wanted).abs().max()) <= 1e-4 * float(wanted.max() - wanted.min())


def test_methods_that_leave_out_positions_take_convs_alone() -> None:
    for method in ("LCCL", "CGNet"):
        with pytest.raises(NoUnitError, match="positions can be left out of convs alone: wide1, wide2"):
            gated_by(method)


def test_the_papers_way_of_slicing_weights_refuses_them_by_name() -> None:
    with pytest.raises(ConfigError, match=r"unit 'wide1': weights are sliced for convs alone, not for Linear"):
        Sliced(gated_by("FTWT"))


def test_a_block_is_left_out_with_its_linear_layers_or_the_engine_says_why_not() -> None:
    torch.manual_seed(0)
    gated = gate(channels_last_net().eval(), gate_types()["BlockDrop"](), input_shape=SHAPE).eval()
    site = gated.graph.sites[0]
    assert [unit.name for unit in site.units] == ["depth1", "wide1", "narrow1"]
    off = cost(gated.graph, {site.name: torch.tensor([False])}).executed
    assert [int(off[name]) for name in ("depth1", "wide1", "narrow1")] == [0, 0, 0]
    with pytest.raises(CompileError, match="must end with its last layer"):
        compile(gated, limits=QUICK)


def test_estimate_fit_heads_twin_and_trim_know_where_the_channels_are() -> None:
    net, x = channels_last_net().eval(), images(40)
    table = estimate(net, FTWT(always=True), [x], [0.5])
    assert 0 < table.reduction["executed"][0] < 1
    gated = fit_heads(net, [x], macs=0.8, input_shape=SHAPE)
    with torch.no_grad():
        gated(x)
        assert float(gated.cost().total("executed+heads").double().mean()) <= 0.8 * gated.cost().dense_total
        twin = static_twin(net, gated, [x])
        twin(x)
        assert any(bool((mask_BO == 0).any()) for mask_BO in twin.masks.values())


def with_convs(net: Net) -> Net:
    """`channels_last_net` with its linear layers written as convs of one tap."""

    def block(m: Net, n: int, x: Tensor) -> Tensor:
        layers = dict(m.named_children())
        y = layers[f"norm{n}"](layers[f"depth{n}"](x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return x + 0.5 * layers[f"narrow{n}"](F.gelu(layers[f"wide{n}"](y)))

    modules = dict(net.named_children())
    for name in ("wide1", "narrow1", "wide2", "narrow2"):
        modules[name] = conv(modules[name].in_features, modules[name].out_features, 1)
    twin = Net(lambda m, x: m.logits(block(m, 2, block(m, 1, m.stem(x)))), **copy.deepcopy(modules)).eval()
    state = net.state_dict()
    twin.load_state_dict({name: state[name].view_as(tensor) for name, tensor in twin.state_dict().items()})
    return twin


@pytest.mark.parametrize("macs", [0.4, 0.5, 0.6, 0.7])
def test_fit_heads_chooses_as_for_the_same_network_written_with_convs(macs: float) -> None:
    net = channels_last_net().eval()
    twin, kind = with_convs(net), F.one_hot(torch.arange(60) % 3, 3)
    x = 0.1 * torch.randn(60, 3, 16, 16, generator=torch.Generator().manual_seed(0)) + 4 * kind[:, :, None, None]
    with torch.no_grad():
        torch.testing.assert_close(net(x), twin(x))
    found, wanted = (fit_heads(one, [x], macs=macs) for one in (net, twin))
    assert found.config.signature == wanted.config.signature
    assert found.config.fixed == wanted.config.fixed
    assert len(wanted.config.fixed) < 2, "no head decides: nothing is seen"
    with torch.no_grad():
        torch.testing.assert_close(found(x), wanted(x), rtol=1e-4, atol=1e-4)
    assert all(torch.equal(mask, wanted.masks[name]) for name, mask in found.masks.items())


def test_filters_that_never_run_are_cut_from_both_layers() -> None:
    torch.manual_seed(0)
    config = FTWT(always=True, fixed={"wide1": tuple(range(10))}, signature={"wide1": 10, "wide2": 12}, select="top")
    gated, x = gate(channels_last_net().eval(), config, input_shape=SHAPE).eval(), images(20)
    trimmed = trim(gated, [x])
    assert isinstance(trimmed, GatedModel)
    assert (trimmed.backbone.wide1.out_features, trimmed.backbone.narrow1.in_features) == (10, 10)
    with torch.no_grad():
        torch.testing.assert_close(trimmed(x), gated(x))


def test_what_is_learned_of_a_layer_to_prune_it_is_read_from_its_last_dimension() -> None:
    x, layer = torch.randn(6, 5, 4, 3), nn.Linear(3, 2)
    task = Task(layer, x, torch.arange(6) % 2)
    assert torch.equal(task.read(layer(x)), layer(x).relu().movedim(-1, 1).flatten(2).mean(2))


def test_in_int8_the_engine_computes_what_its_simulation_does() -> None:
    gated, x = gated_by("FTWT"), images(20)
    small = quantize(gated, [x])
    engine = compile(small, limits=QUICK)
    found = engine(x)
    assert any(not mask.all() for mask in engine.last_masks.values())
    with torch.no_grad():
        torch.testing.assert_close(found, small(x), rtol=1e-4, atol=1e-4)


def test_a_depthwise_conv_behind_such_a_layer_shares_its_mask() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        y = F.relu(m.wide(m.stem(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        return m.logits(F.relu(m.last(F.relu(m.depth(y)))))

    layers = {"stem": conv(3, 4), "wide": nn.Linear(4, 12), "depth": conv(12, 12, groups=12), "last": conv(12, 6)}
    net = Net(forward, **layers, fc=fc(6)).eval()
    gated = gate(net, FTWT(), input_shape=SHAPE).eval()
    assert [unit.name for unit in gated.units.groups["wide"]] == ["wide", "depth"]
    x = images()
    with torch.no_grad(), gated.force("open"):
        assert torch.equal(gated(x), net(x))
    engine = compile(gated, limits=QUICK)
    found = engine(x)
    with torch.no_grad():
        wanted = gated(x)
    assert float((found - wanted).abs().max()) <= 1e-4 * float(wanted.max() - wanted.min())
    executed = cost(gated.graph, {name: torch.from_numpy(mask) for name, mask in engine.last_masks.items()}).executed
    assert all(engine.last_macs[layer].tolist() == executed[layer].tolist() for layer in gated.graph.layers)


@pytest.mark.parametrize("act", [nn.GELU(), nn.ReLU6(), nn.Hardtanh(-1, 2), nn.LeakyReLU(0.3), nn.PReLU(), nn.PReLU(6)])
@pytest.mark.parametrize("tokens", [False, True])
def test_activations_behind_linear_layers_compile_on_maps_and_on_tokens(act: nn.Module, tokens: bool) -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        y = m.stem(x).permute(0, 2, 3, 1)
        y = 0.7 * m.act(2 * m.wide(y.flatten(1, 2) if tokens else y))
        return m.fc(y.flatten(1, -2).mean(1))

    wide = nn.Linear(4, 12)
    net = Net(forward, stem=nn.Conv2d(3, 4, 3, padding=(0, 1)), wide=wide, act=act, fc=fc(12)).eval()
    if tokens and isinstance(act, nn.PReLU) and act.num_parameters > 1:
        pytest.skip("as many slopes as tokens there are")
    engine, x = compile(net, SHAPE, limits=QUICK), images()
    with torch.no_grad():
        torch.testing.assert_close(engine(x), net(x), rtol=1e-4, atol=1e-5)


def test_a_map_of_one_row_keeps_its_channels_last() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        y = F.gelu(m.wide(m.stem(x).permute(0, 2, 3, 1)))
        return m.fc(y.mean((1, 2)))

    net = Net(forward, stem=nn.Conv2d(3, 4, (8, 1)), wide=nn.Linear(4, 12), fc=fc(12)).eval()
    gated = gate(net, FTWT(always=True), input_shape=SHAPE).eval()
    with torch.no_grad():
        assert gated(images()).shape == (3, 5)
        assert gated.masks["wide"].shape == (3, 12)


def test_forcing_with_a_mask_of_another_width_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match=r"shape \(B, 24\), got \(1, 6\)"),
        gated_by("FTWT").force({"wide1": torch.ones(1, 6)}),
    ):
        pass


def test_its_onnx_file_takes_any_batch_and_means_the_same_elsewhere(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    gated, x = gated_by("FTWT"), images(5)
    session = onnxruntime.InferenceSession(to_onnx(gated, tmp_path / "gated.onnx"))
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found), gated(x), rtol=1e-4, atol=1e-5)
