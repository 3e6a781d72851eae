"""gate(model, config) -> GatedModel: the same network with a gate before each unit, written into its traced calls."""

from __future__ import annotations

import copy
import linecache
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, fx, nn

from cofire.backbones import Backbone
from cofire.errors import ConfigError, DataError, TrainingError, unknown
from cofire.files.atomic import write_model
from cofire.files.strict import unstructure
from cofire.gates.base import AbstractGate, Decision, GateConfig, build_gates
from cofire.graph.cost import Cost, cost
from cofire.graph.graph import Graph, Live, trace
from cofire.graph.placement import place
from cofire.graph.units import Unit, Units

Observer = Callable[[str, Decision, Tensor], None]


class GateMap(nn.Module):
    """Group name -> gate. Parameters live under the group's name with ``.`` written as ``_``."""

    def __init__(self, gates: Mapping[str, AbstractGate]) -> None:
        super().__init__()
        self._keys = {group: group.replace(".", "_") for group in gates}
        if len(set(self._keys.values())) < len(gates):
            raise ConfigError(f"two groups have the same name once '.' is written as '_': {sorted(gates)}")
        # Not add_module, which refuses names that are methods here: a conv may be called "items".
        for group, gate in gates.items():
            self._modules[self._keys[group]] = gate
            gate.name = group

    def __getitem__(self, group: str) -> AbstractGate:
        if group not in self._keys:
            raise unknown("group", group, self._keys)
        return cast(AbstractGate, self._modules[self._keys[group]])

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def items(self) -> Iterator[tuple[str, AbstractGate]]:
        """(group, gate) in execution order."""
        return ((group, self[group]) for group in self)

    def values(self) -> Iterator[AbstractGate]:
        """The gates in execution order."""
        return (self[group] for group in self)


class GatedModel(nn.Module):
    """A backbone whose units run behind gates; made by :func:`gate`.

    The backbone's state_dict keys are unchanged; the gates' begin with ``gates.``. Calling it gives logits like
    any other model; what the gates decided for that batch is in ``decisions``. ``print(gated.code)`` shows
    the forward with the gates in it.
    """

    def __init__(
        self, backbone: nn.Module, graph: Graph, config: GateConfig, gates: Mapping[str, AbstractGate]
    ) -> None:
        super().__init__()
        if "gates" in dict(backbone.named_children()):
            raise ConfigError("the model has a submodule named 'gates', which is where cofire keeps its own; rename it")
        self.graph = graph
        self.config = config
        self.code, self._run = _compiled(_with_gates(graph))
        # The same modules and tensors under the same names, whatever the names are. The backbone itself stays out
        # of the module tree: the generated forward looks its calls up there, and deepcopy and pickle rebuild a
        # gated model from it, because generated code does neither.
        self.__dict__["_backbone"] = backbone
        self._parameters = backbone._parameters
        self._buffers = backbone._buffers
        self._non_persistent_buffers_set = backbone._non_persistent_buffers_set
        self._modules.update(backbone._modules)
        self._modules["gates"] = GateMap(gates)
        self.training = self.gates.training = backbone.training

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Logits for a batch of images (B, C, H, W)."""
        channels = self.graph.input_shape[0]
        if x_BCHW.ndim != 4 or x_BCHW.shape[1] != channels:
            raise DataError(f"images must have shape (B, {channels}, H, W), got {tuple(x_BCHW.shape)}")
        self.backbone.training = self.training
        logits: Tensor = self._run(self.backbone, x_BCHW, self.gates)
        return logits

    @property
    def gates(self) -> GateMap:
        """Group -> gate, in execution order."""
        return cast(GateMap, self._modules["gates"])

    @property
    def backbone(self) -> nn.Module:
        """The plain model inside; it shares its weights with this one."""
        return cast(nn.Module, self.__dict__["_backbone"])

    @property
    def units(self) -> Units:
        """Every conv, gated or not, in execution order; prints as a table."""
        return self.graph.units

    @property
    def decisions(self) -> dict[str, Decision]:
        """Group -> what its gate decided in the last forward; empty before the first."""
        return {group: gate.decision for group, gate in self.gates.items() if gate.decision is not None}

    @property
    def masks(self) -> dict[str, Tensor]:
        """Group -> bool (B, O) of the last forward."""
        return {group: decision.mask.detach() > 0.5 for group, decision in self.decisions.items()}

    @property
    def threshold(self) -> float:
        """A filter runs if its logit is above this; 0 as trained, higher is cheaper. A dial at deploy time."""
        return next(gate.threshold for gate in self.gates.values())

    @threshold.setter
    def threshold(self, value: float) -> None:
        for gate in self.gates.values():
            gate.threshold = float(value)

    def cost(
        self, masks: Mapping[str, Tensor | Live] | None = None, input_shape: tuple[int, int, int] | None = None
    ) -> Cost:
        """MACs of the last forward, or of the masks given, at an input shape (default: the graph's)."""
        heads = {group: gate.head_macs for group, gate in self.gates.items()}
        return cost(self.graph, self.masks if masks is None else masks, input_shape, heads)

    @contextmanager
    def force(self, masks: Literal["open", "targets"] | Mapping[str, Tensor]) -> Iterator[None]:
        """Inside the block gates do not decide: all open, or their targets, or the masks given.

        ``masks`` maps groups to (O,) or (B, O) tensors of 0/1; groups left out decide for themselves.
        """
        if isinstance(masks, str):
            if masks not in ("open", "targets"):
                raise unknown("forced masks", masks, ("open", "targets"))
            forced: dict[str, Any] = dict.fromkeys(self.gates, masks)
        else:
            forced = {group: self._mask(group, mask) for group, mask in masks.items()}
        before = {group: self.gates[group].forced for group in forced}
        for group, value in forced.items():
            self.gates[group].forced = value
        try:
            yield
        finally:
            for group, value in before.items():
                self.gates[group].forced = value

    def _mask(self, group: str, mask: Tensor) -> Tensor:
        self.gates[group]  # raises if there is no such group
        filters = self.units.groups[group][-1].out_channels
        if mask.ndim not in (1, 2) or mask.shape[-1] != filters:
            raise ConfigError(f"group {group!r}: mask must have shape (B, {filters}), got {tuple(mask.shape)}")
        return (mask if mask.is_floating_point() else mask.float()).reshape(-1, filters)

    @contextmanager
    def observe(self, observer: Observer) -> Iterator[None]:
        """Inside the block ``observer(group, decision, y_BOHW)`` sees each unit's unmasked output as it is made."""
        for group, gate in self.gates.items():
            gate.observer = lambda decision, y_BOHW, group=group: observer(group, decision, y_BOHW)
        try:
            yield
        finally:
            for gate in self.gates.values():
                gate.observer = None

    def save(self, folder: str | Path) -> Path:
        """Write ``config.json`` and ``model.safetensors`` into ``folder``, for ``cofire.load``."""
        return write_model(folder, self.state_dict(), self.describe())

    def describe(self) -> dict[str, Any]:
        """What ``config.json`` says: backbone, gate config, groups, threshold and input shape as JSON values."""
        return {
            "backbone": describe_backbone(self.backbone),
            "filters": num_filters(self.backbone),
            "gate": {"type": type(self.config).__name__, "fields": unstructure(self.config)},
            "groups": list(self.gates),
            "threshold": self.threshold,
            "input_shape": list(self.graph.input_shape),
        }

    def __reduce__(self) -> tuple[Any, ...]:
        selected = tuple(unit.name for unit in self.units if unit.gated)
        state = (dict(self.gates.items()), self.threshold, self.training)
        return _rebuild, (self.backbone, self.config, selected, self.graph.input_shape, *state)


def gate(
    model: nn.Module,
    config: GateConfig,
    *,
    filter_fn: Callable[[Unit], bool] | None = None,
    input_shape: tuple[int, int, int] | None = None,
) -> GatedModel:
    """A copy of ``model`` with a gate before each of its units; ``model`` is left alone.

    Args:
        model: any module torch.fx can trace, taking one (B, C, H, W) batch.
        config: of a registered method, e.g. ``FTWT(ratio=0.9)``.
        filter_fn: called with each :class:`Unit` that could be gated; False leaves it open.
        input_shape: (C, H, W) of an image, for the MACs and for leaving out gates that cannot pay. Default:
            what a registered backbone was made for, else 224 x 224.

    Raises:
        TraceError: the model cannot be traced, or does not run at ``input_shape``.
        NoUnitError: nothing can be gated; says why.
    """
    if isinstance(model, GatedModel):
        raise ConfigError("the model is gated already; gate its plain form, gated.backbone")
    return _gated(copy.deepcopy(model), config, filter_fn, input_shape)


def describe_backbone(model: nn.Module) -> dict[str, Any] | None:
    """Name and arguments of a registered backbone; None for any other model."""
    return {"name": model.spec.name, "args": model.spec.args} if isinstance(model, Backbone) else None


def num_filters(model: nn.Module) -> dict[str, int]:
    """Conv name -> how many filters it has: what pruning changes, beside a backbone's name and arguments."""
    return {name: module.out_channels for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}


def mask_loss(gated: nn.Module) -> Tensor:
    """The gates' loss for the last forward in training mode: a scalar to add to the task loss."""
    gated = unwrapped(gated)
    taught: dict[type[AbstractGate], list[AbstractGate]] = {}
    for gate in gated.gates.values():
        if gate.lesson is not None:
            taught.setdefault(type(gate), []).append(gate)
    if not taught:
        raise TrainingError("mask_loss needs a forward in training mode with free gates: call gated.train(), gated(x)")
    total = torch.stack([kind.total_loss(gates) for kind, gates in taught.items()]).sum()
    return total / sum(map(len, taught.values())) if gated.config.reduction == "mean" else total


def unwrapped(model: nn.Module) -> GatedModel:
    """The gated model inside DistributedDataParallel or torch.compile wrappers."""
    gated = next((module for module in model.modules() if isinstance(module, GatedModel)), None)
    if gated is None:
        raise ConfigError(
            f"a gated model is needed, got {type(model).__name__}; make one with cofire.gate(model, config)"
        )
    return gated


def _gated(
    backbone: nn.Module,
    config: GateConfig,
    filter_fn: Callable[[Unit], bool] | None,
    input_shape: tuple[int, int, int] | None,
) -> GatedModel:
    graph = place(trace(backbone, input_shape), config, filter_fn)
    gated = GatedModel(backbone, graph, config, build_gates(list(graph.units.groups.values()), config))
    gated.gates.train(backbone.training)
    return gated


def _rebuild(
    backbone: nn.Module,
    config: GateConfig,
    selected: tuple[str, ...],
    input_shape: tuple[int, int, int],
    gates: dict[str, AbstractGate],
    threshold: float,
    training: bool,
) -> GatedModel:
    graph = place(trace(backbone, input_shape), config, lambda unit: unit.name in selected)
    gated = GatedModel(backbone, graph, config, gates)
    gated.threshold = threshold
    gated.training = gated.gates.training = training
    return gated


def _with_gates(graph: Graph) -> fx.Graph:
    """The calls with two more per group: decide before the first unit's conv, mask after the last unit's end."""
    calls = copy.deepcopy(graph.calls)
    nodes = {node.name: node for node in calls.nodes}
    gates_of_masked: dict[fx.Node, fx.Node] = {}
    with calls.inserting_after(calls.find_nodes(op="placeholder")[-1]):
        gates = calls.placeholder("gates")
    for group, members in graph.units.groups.items():
        conv, out = nodes[members[0].conv], nodes[members[-1].out]
        x = conv.all_input_nodes[0]
        with calls.inserting_before(conv):
            gate_node = calls.create_node("call_function", operator.getitem, (gates, group), name="gate")
            args: list[fx.Node] = [gate_node, x]
            if x in gates_of_masked:
                args.append(calls.create_node("call_function", getattr, (gates_of_masked[x], "peak"), name="peak"))
            decision = calls.create_node("call_method", "decided", tuple(args))
        with calls.inserting_after(out):
            masked = calls.create_node("call_method", "masked", (gate_node, out, decision))
        gates_of_masked[masked] = gate_node
        out.replace_all_uses_with(masked, delete_user_cb=lambda user, masked=masked: user is not masked)
    return calls


def _compiled(calls: fx.Graph) -> tuple[str, Callable[..., Any]]:
    """Source of the forward, and the function (backbone, x, gates) it defines."""
    code = calls.python_code("self")
    name = f"<cofire gated forward {id(calls):x}>"
    scope = dict(code.globals)
    exec(compile(code.src, name, "exec"), scope)  # source made by torch.fx from the model's own calls
    linecache.cache[name] = (len(code.src), None, code.src.splitlines(keepends=True), name)  # for tracebacks
    return code.src, scope["forward"]
