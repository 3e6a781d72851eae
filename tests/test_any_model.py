"""Models as users bring them: parts torch.fx cannot follow, branches on shapes and modes, several outputs."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from nets import SHAPE, Net, bn, conv, fc, gated_net, images, live_inputs, run
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from cofire import FTWT, CofireError, DataError, FileError, TraceError, compile, cost, gate, mask_loss, save, trace
from cofire.pruning.removal import removable

NONE = torch.zeros(1, 8, dtype=torch.bool)


class Picky(nn.Module):
    """Looks at values."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = conv(8, 8)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) if x.sum() > 0 else self.conv(-x)  # LINE OF THE BRANCH


class Exact(Picky):
    """Looks at values through a Python number."""

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) if x.sum().item() > 0 else self.conv(-x)


class Remembering(Picky):
    """Keeps what it computes."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.conv(x)
        return self.last


class PerSample(Picky):
    """Loops over the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.conv(x[i : i + 1]) for i in range(x.shape[0])])


class Paired(Picky):
    """Takes and gives tuples."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        left, right = pair
        return (self.conv(left), right) if left.sum() > 0 else (self.conv(-left), right)


class Filling(Picky):
    """Writes on the list it is given."""

    def forward(self, parts: list[Tensor]) -> list[Tensor]:
        parts[0] = self.conv(parts[0] if parts[0].sum() > 0 else -parts[0])
        return parts


class Named(Picky):
    """Takes and gives dicts."""

    def forward(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"out": self.conv(parts["x"] if parts["x"].sum() > 0 else -parts["x"])}


def around(body: nn.Module, call: Any = lambda m, x: m.body(x)) -> Net:
    return Net(
        lambda m, x: m.logits(F.relu(m.two(call(m, F.relu(m.one(x)))))),
        one=conv(3, 8),
        body=body,
        two=conv(8, 8),
        fc=fc(8),
    )


OPAQUE = {
    "values": around(Picky()),
    "a value as a number": around(Exact()),
    "state": around(Remembering()),
    "the batch": around(PerSample()),
    "tuples": around(Paired(), lambda m, x: m.body((x, x))[0]),
    "a list that is written on": around(Filling(), lambda m, x: m.body([x, x])[0]),
    "dicts": around(Named(), lambda m, x: m.body({"x": x})["out"]),
    "deep inside": around(nn.Sequential(nn.Sequential(Picky()), nn.ReLU())),
}


@pytest.mark.parametrize("what", OPAQUE)
def test_a_module_that_cannot_be_followed_is_one_call_and_the_rest_is_gated(what: str) -> None:
    net, x = OPAQUE[what].eval(), images()
    before = dict(vars(net.body))
    gated = gated_net(net)
    assert vars(net.body) == before
    assert [unit.name for unit in gated.units if unit.gated] == ["one", "two"]
    assert torch.equal(run(gated, x, "open"), net(x))
    assert torch.equal(run(gated, x[:1], "open"), net(x[:1]))
    (op,) = gated.graph.opaque
    assert Path(__file__).name in op.reason
    hidden = next(unit for unit in gated.units if unit.name.endswith("conv"))
    assert op.reason in hidden.reason
    assert "run as it is" in str(gated.units).replace("\n", " ") or "cannot follow" in str(gated.units)


def test_the_reason_has_the_file_and_the_line() -> None:
    lines = Path(__file__).read_text().splitlines()
    line = 1 + next(i for i, text in enumerate(lines) if "# LINE OF THE BRANCH" in text)
    (op,) = gated_net(around(Picky())).graph.opaque
    assert op.reason.endswith(f"({__file__}:{line})")
    assert op.what == "Picky"


@pytest.mark.parametrize("what", OPAQUE)
def test_layers_inside_count_with_all_their_macs_and_what_follows_is_live(what: str) -> None:
    net = OPAQUE[what]
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        net(images(1))
    assert 2 * cost(trace(net, SHAPE), {}).dense_total == counter.get_total_flops()
    gated = gated_net(net)
    found = gated.cost({"one": NONE})
    inner = next(name for name in found.dense if name.endswith(".conv"))
    assert found.executed[inner].tolist() == [found.dense[inner]] == [8 * 8 * 9 * 64]
    assert live_inputs(gated, "two", {"one": NONE}) == [8]


def test_a_module_that_writes_on_its_input_makes_it_live_for_later_readers() -> None:
    class Writing(Picky):
        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x.add_(1.0)) if x.sum() > -1e9 else x

    net = Net(
        lambda m, x: (lambda y: m.logits(m.body(y) + F.relu(m.two(y))))(F.relu(m.one(x))),
        one=conv(3, 8),
        body=Writing(),
        two=conv(8, 8),
        fc=fc(8),
    )
    gated = gated_net(net)
    assert torch.equal(run(gated, images(), "open"), net(images()))
    assert live_inputs(gated, "two", {"one": NONE}) == [8]


def test_a_module_that_gives_no_tensors_makes_the_one_around_it_one_call() -> None:
    class Odd(Picky):
        def forward(self, x: Tensor) -> Any:
            return [self.conv(x), "text"] if x.sum() > 0 else [x, "text"]

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd = Odd()

        def forward(self, x: Tensor) -> Tensor:
            return self.odd(x)[0]

    gated = gated_net(around(Around()))
    assert [op.what for op in gated.graph.opaque] == ["Around"]


# Branches on shapes


def shape_net() -> Net:
    """Asks for shapes in all the ways of real networks: checks, loops, padding where sizes differ."""

    def forward(m: Net, x: Tensor) -> Tensor:
        batch, channels, height, _ = x.shape
        if x.dim() != 4 or channels != 3:
            raise ValueError(f"images wanted, got {channels} channels")
        assert height >= 4, "too small"
        skip = F.relu(m.one(x))
        y = F.interpolate(F.relu(m.two(F.max_pool2d(skip, 2))), scale_factor=2)
        if y.shape[-2:] != skip.shape[-2:]:
            y = F.pad(y, [0, skip.shape[3] - y.shape[3], 0, skip.shape[2] - y.shape[2]])
        parts = [y[:, i : i + 2] for i in range(0, y.size(1), 2)]
        y = torch.cat([*parts, skip], 1)
        return m.logits(F.relu(m.three(y.view(batch, -1, *y.shape[2:]))))

    return Net(forward, one=conv(3, 8), two=conv(8, 8), three=conv(16, 8), fc=fc(8))


@pytest.mark.parametrize("size", [8, 9])
def test_branches_on_shapes_are_followed_at_the_given_size(size: int) -> None:
    net, shape = shape_net(), (3, size, size)
    gated, x = gated_net(net, shape), images(3, shape)
    assert not gated.graph.opaque
    assert [unit.name for unit in gated.units if unit.gated] == ["one", "two", "three"]
    assert torch.equal(run(gated, x, "open"), net(x))
    assert live_inputs(gated, "three", {"two": NONE}) == [8]
    larger = (3, size + 4, size + 4)  # all answers are the same there
    assert torch.equal(run(gated, images(1, larger), "open"), net(images(1, larger)))
    assert gated.cost({}, larger).dense_total == cost(trace(net, larger), {}).dense_total


def test_a_size_for_which_the_forward_takes_another_way_is_refused() -> None:
    gated = gated_net(shape_net(), (3, 8, 8))
    with pytest.raises(DataError, match=r"another way for images of this size.*test_any_model\.py:\d+ was False"):
        gated(images(1, (3, 9, 9)))
    with pytest.raises(TraceError, match="another way for images of this size"):
        gated.cost({}, (3, 9, 9))


def test_a_check_that_fails_at_the_given_size_is_an_error_that_says_so() -> None:
    with pytest.raises(TraceError, match=r"too small \(.*test_any_model\.py:\d+\)"):
        trace(shape_net(), (3, 2, 2))


def test_a_branch_on_values_in_the_models_own_forward_names_file_line_and_ways_out() -> None:
    net = Net(lambda m, x: m.fc(x.mean((2, 3))) if x.sum() > 0 else x, one=conv(3, 8), fc=fc(3))
    with pytest.raises(TraceError, match=r"looks at values.*\(.*test_any_model\.py:\d+\)") as raised:
        trace(net, SHAPE)
    for way in ("the model's own forward (Net)", "torch.fx.wrap", "model.features = cofire.gate(model.features"):
        assert way in str(raised.value)


# Branches on self.training


class WithAuxiliary(nn.Module):
    """A second head that runs in training mode only, as in GoogLeNet and Inception."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.bn = conv(3, 8), conv(8, 8), bn(8)
        self.side, self.aux, self.fc = conv(8, 8), fc(8), fc(8)

    def forward(self, x: Tensor) -> Any:
        y = F.relu(self.one(x))
        side = self.aux(F.relu(self.side(y)).mean((2, 3))) if self.training else None
        logits = self.fc(F.relu(self.bn(self.two(y))).mean((2, 3)))
        return logits if side is None else (logits, side)


@pytest.mark.parametrize("copied", ["not", "deepcopy", "pickle"])
def test_an_auxiliary_head_runs_and_learns_in_training_mode_only(copied: str) -> None:
    net, x = WithAuxiliary(), images()
    gated = gated_net(net)
    gated = {"not": lambda g: g, "deepcopy": copy.deepcopy, "pickle": lambda g: pickle.loads(pickle.dumps(g))}[copied](
        gated
    )
    assert [unit.name for unit in gated.units if unit.gated] == ["one", "two"]
    assert torch.equal(run(gated.eval(), x, "open"), net.eval()(x))
    with gated.train().force("open"):
        expected, found = net.train()(x), gated(x)
    assert all(torch.equal(theirs, ours) for theirs, ours in zip(expected, found, strict=True))
    logits, side = gated(x)
    (logits.sum() + side.sum() + mask_loss(gated)).backward()
    assert gated.side.weight.grad.any()
    assert gated.aux.weight.grad.any()
    with gated.force({"one": torch.zeros(8), "two": torch.zeros(8)}):  # the mask is there in training mode too
        _, side = gated(x)
    empty = gated.aux(F.relu(gated.side(torch.zeros(3, 8, 8, 8))).mean((2, 3)))
    assert torch.equal(side, empty)


def test_a_training_forward_that_cannot_be_followed_is_refused_when_it_is_called() -> None:
    class Strange(WithAuxiliary):
        def forward(self, x: Tensor) -> Any:
            y = F.relu(self.one(x))
            if self.training and y.sum() > 0:
                y = y * 2
            return self.fc(F.relu(self.two(y)).mean((2, 3)))

    net, x = Strange(), images()
    gated = gated_net(net)
    assert torch.equal(run(gated, x, "open"), net(x))
    with pytest.raises(TraceError, match=r"another in training mode.*test_any_model\.py:\d+"):
        gated.train()(x)


def test_the_same_calls_in_both_modes_are_traced_to_one_forward() -> None:
    net = around(nn.Dropout(0.5), lambda m, x: F.dropout(m.body(x), 0.5, m.training))
    assert trace(net, SHAPE).training is None


def test_a_forward_that_takes_more_arguments_is_called_with_images_alone() -> None:
    class Open(WithAuxiliary):
        def forward(self, x: Tensor, *args: Any, scale: float = 1.0, **options: Any) -> Any:
            y = scale * self.fc(F.relu(self.two(F.relu(self.one(x)))).mean((2, 3)))
            return (y, args) if args or options else y

    net, x = Open(), images()
    gated = gated_net(net)
    assert torch.equal(run(gated, x, "open"), net(x))


class Weighted(nn.Module):
    """A module that makes a tensor in its forward, from nothing but numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = conv(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(x)) * torch.linspace(0.5, 2.0, 4).view(1, 4, 1, 1) + torch.tensor(0.25)


def test_a_tensor_that_a_forward_makes_of_numbers_is_followed_and_left_off_the_model() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        y = m.weighted(F.relu(m.one(x)) * torch.tensor([0.5, 1.0, 2.0, 3.0]).view(1, 4, 1, 1))
        return m.logits(F.relu(m.two(y)))

    net = Net(forward, one=conv(3, 4), weighted=Weighted(), two=conv(4, 6), fc=fc(6)).eval()
    before = set(vars(net))
    gated, x = gated_net(net), images()
    assert set(vars(net)) == before
    assert {unit.name for unit in gated.units if unit.gated} == {"one", "weighted.conv", "two"}
    with torch.no_grad(), gated.force("open"):
        assert torch.equal(gated(x), net(x))
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(gated)(x), gated(x))
        torch.testing.assert_close(compile(net, SHAPE)(x), net(x), rtol=1e-4, atol=1e-5)


def test_prune_leaves_channels_that_meet_such_a_tensor() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        y = F.relu(m.one(x)) * torch.tensor([0.5, 1.0, 2.0, 3.0]).view(1, 4, 1, 1)
        return m.logits(F.relu(m.two(y)))

    found = removable(Net(forward, one=conv(3, 4), two=conv(4, 6), fc=fc(6)).eval(), SHAPE)
    assert found.reasons["one"] == "mul (mul) has a tensor of its own (constant)"
    assert "two" in found.groups


# What is no model yet, or none that can be followed


def small() -> nn.Module:
    return nn.Sequential(conv(3, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 5))


def without_values() -> nn.Module:
    with torch.device("meta"):
        return small()


class Summing(Picky):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return self.conv(x + y)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
@pytest.mark.parametrize(
    ("make", "way_out"),
    [
        (lambda: torch.jit.script(small()), "pass the module it was made of"),
        (lambda: torch.compile(small()), r"pass the module itself: model\._orig_mod"),
        (lambda: nn.Sequential(nn.LazyConv2d(8, 3)), r"'0\.weight' has no values yet; run a lazy module once"),
        (without_values, r"'0\.weight' has no values yet; .* load the weights"),
        (
            lambda: F.relu,
            r"torch\.nn\.Module is needed, got .*; call it in the forward|a program of torch\.export is needed",
        ),
        (Summing, r"got 2 inputs: x, y\nWays out: .*joined along channels"),
    ],
    ids=["script", "compiled", "lazy", "meta", "function", "two inputs"],
)
def test_what_cannot_be_followed_is_refused_with_a_way_out(make: Any, way_out: str) -> None:
    model = make()
    for attempt in (lambda: gate(model, FTWT(), input_shape=SHAPE), lambda: compile(model, SHAPE)):
        with pytest.raises(CofireError, match=way_out):
            attempt()


@pytest.mark.filterwarnings("ignore:.*deprecated")  # says torch.ao.quantization
def test_weights_that_are_packed_are_refused_by_name(tmp_path: Path) -> None:
    packed = torch.ao.quantization.quantize_dynamic(small(), {nn.Linear})
    with pytest.raises(FileError, match=r"'3\._packed_params\.dtype' .* must be a tensor .*cofire\.quantize"):
        save(packed, tmp_path)


class Found(NamedTuple):
    logits: Tensor
    parts: tuple[Tensor, Tensor]


def test_a_named_tuple_comes_out_of_the_engine_as_a_plain_one() -> None:
    def forward(m: Net, x: Tensor) -> Found:
        y = F.relu(m.one(x))
        return Found(m.logits(y), (m.two(y), y))

    net = Net(forward, one=conv(3, 8), two=conv(8, 2), fc=fc(8))
    gated = gated_net(net).eval()
    logits, parts = compile(gated, SHAPE)(images())
    with torch.no_grad():
        expected = gated(images())
    torch.testing.assert_close([logits, *parts], [expected.logits, *expected.parts])
