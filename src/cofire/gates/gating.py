"""gate(model, config) -> GatedModel: the same network with a gate before each unit, written into its traced calls."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from cofire.backbones import Backbone
from cofire.errors import ConfigError, DataError, TrainingError, unknown
from cofire.files.strict import unstructure
from cofire.files.tensors import write_model
from cofire.gates.base import AbstractMethod, Decision, GateConfig, Step, method_of
from cofire.gates.forward import forward_of, say_what_to_fuse, training_forward
from cofire.gates.switchboard import Forced, Observer, Switchboard
from cofire.graph.cost import Cost, cost, expected_macs, site_size
from cofire.graph.graph import Graph, trace
from cofire.graph.live import Live
from cofire.graph.masks import AbstractMask, mask_of
from cofire.graph.tracing import evaluating, require_followable
from cofire.graph.units import Unit, Units


class GatedModel(nn.Module):
    """A backbone whose convs run behind gates; made by :func:`gate`.

    The backbone's state_dict keys are unchanged; the gates' begin with ``gates.``. Calling it gives logits like
    any other model; what the gates decided for that batch is in ``decisions``. ``print(gated.code)`` shows
    the forward with the gates in it.
    """

    def __init__(self, backbone: nn.Module, graph: Graph, method: AbstractMethod) -> None:
        super().__init__()
        if "gates" in dict(backbone.named_children()):
            raise ConfigError("the model has a submodule named 'gates', which is where cofire keeps its own; rename it")
        self.graph = graph
        self.code, self._run = forward_of(graph)
        self._run_training = training_forward(graph, method) if graph.training is not None else self._run
        # The same modules and tensors under the same names, whatever the names are. The backbone itself stays out
        # of the module tree: the generated forward looks its calls up there, and deepcopy and pickle rebuild a
        # gated model from it, because generated code does neither.
        self.__dict__["_backbone"] = backbone
        self._parameters = backbone._parameters
        self._buffers = backbone._buffers
        self._non_persistent_buffers_set = backbone._non_persistent_buffers_set
        self._modules.update(backbone._modules)
        self._modules["gates"] = method
        self.switchboard = Switchboard(method)
        self._images: Tensor | None = None
        self._logits_BK: Any = None
        self.training = backbone.training
        method.train(backbone.training)

    def forward(self, x_BCHW: Tensor) -> Any:
        """What the backbone returns for a batch of images (B, C, H, W): logits, or whatever it makes."""
        channels = self.graph.input_shape[0]
        if x_BCHW.ndim != 4 or x_BCHW.shape[1] != channels:
            raise DataError(f"images must have shape (B, {channels}, H, W), got {tuple(x_BCHW.shape)}")
        self.backbone.training = self.training
        self.switchboard.begin(x_BCHW)
        run = self._run_training if self.training else self._run
        logits_BK = run(self.backbone, x_BCHW, self.switchboard)
        self._images, self._logits_BK = (x_BCHW, logits_BK) if self.gates.training else (None, None)
        return logits_BK

    def __getattr__(self, name: str) -> Any:
        """The backbone's own attributes; not its methods, which know nothing of gates."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            backbone = self.__dict__.get("_backbone")
            if backbone is None or not _is_data(backbone, name):
                raise
            return getattr(backbone, name)

    @property
    def gates(self) -> AbstractMethod:
        """The method; a mapping, site -> what it holds there, in execution order."""
        return cast(AbstractMethod, self._modules["gates"])

    @property
    def config(self) -> GateConfig:
        """Of the method."""
        config: GateConfig = self.gates.config
        return config

    @property
    def backbone(self) -> nn.Module:
        """The plain model inside; it shares its weights with this one."""
        return cast(nn.Module, self.__dict__["_backbone"])

    @property
    def units(self) -> Units:
        """Every conv, gated or not, in execution order; prints as a table."""
        return self.graph.units

    @property
    def last_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of the last forward's input; the graph's before the first."""
        channels, height, width = self.switchboard.input_shape or self.graph.input_shape
        return channels, height, width

    @property
    def decisions(self) -> dict[str, Decision]:
        """Site -> what was decided there in the last forward; empty before the first."""
        return dict(self.switchboard.decisions)

    @property
    def masks(self) -> dict[str, Tensor]:
        """Group -> bool (B, O) of the last forward, for methods that decide on filters."""
        require_filters(self, "gated.masks")
        return {name: decision.mask.bits for name, decision in self.decisions.items()}

    @property
    def threshold(self) -> float | None:
        """What has a logit above this runs; 0 as trained, higher is cheaper. A dial at deploy time.

        None for a method that does not decide by one.
        """
        threshold: float | None = self.gates.threshold
        return threshold

    @threshold.setter
    def threshold(self, value: float | None) -> None:
        if (value is None) != (self.gates.threshold is None):
            who = type(self.config).__name__
            raise ConfigError(f"threshold: {who} does not decide by one" if value is not None else f"{who} needs one")
        self.gates.threshold = None if value is None else float(value)

    def cost(
        self,
        masks: Mapping[str, AbstractMask | Tensor | Live] | None = None,
        input_shape: tuple[int, int, int] | None = None,
    ) -> Cost:
        """MACs of the last forward, or of the masks given, at an input shape (default: the graph's)."""
        heads = {name: self.gates.head_macs(site) for name, site in self.gates.sites.items()}
        decided = {name: decision.mask for name, decision in self.switchboard.decisions.items()}
        return cost(self.graph, decided if masks is None else masks, input_shape, heads)

    @contextmanager
    def force(self, masks: Forced | Mapping[str, Tensor | AbstractMask]) -> Iterator[None]:
        """Inside the block gates do not decide: all open, or their targets, or the masks given.

        ``masks`` maps sites to masks of their kind or tensors of 0/1, for filters (O,) or (B, O); sites left out decide
        for themselves.
        """
        if isinstance(masks, str):
            if masks not in ("open", "targets"):
                raise unknown("forced masks", masks, ("open", "targets"))
            if masks == "open" and not self.gates.opens:
                raise ConfigError(f"{type(self.config).__name__} has no open state: what it scales has no dense form")
            forced: dict[str, Any] = dict.fromkeys(self.gates, masks)
        else:
            forced = {name: self._mask(name, mask) for name, mask in masks.items()}
        before = dict(self.switchboard.forced)
        self.switchboard.forced.update(forced)
        try:
            yield
        finally:
            self.switchboard.forced = before

    def _mask(self, name: str, mask: Tensor | AbstractMask) -> AbstractMask:
        sites = self.gates.sites
        if name not in sites:
            raise unknown("group", name, sites)
        found = mask_of(sites[name], mask, site_size(self.graph, sites[name]))
        return found if found.on.is_floating_point() else type(found)(found.on.float())

    @contextmanager
    def observe(self, observer: Observer) -> Iterator[None]:
        """Inside the block ``observer(site, decision, y_BOHW)`` sees each site's unmasked output as it is made."""
        self.switchboard.observer = observer
        try:
            yield
        finally:
            self.switchboard.observer = None

    def rerun(self, x_BCHW: Tensor, masks: Mapping[str, Tensor]) -> Tensor:
        """Logits under other masks, in eval mode and without gradient; what the last forward left stays."""
        board, self.switchboard = self.switchboard, Switchboard(self.gates)
        kept = self._images, self._logits_BK
        try:
            with torch.no_grad(), evaluating(self), self.force(masks):
                logits_BK: Tensor = self(x_BCHW)
        finally:
            self.switchboard = board
            self._images, self._logits_BK = kept
        return logits_BK

    def step(self, labels: Tensor | None = None, taught_BK: Tensor | None = None) -> Step:
        """The last forward in training mode, for the method's loss."""
        board = self.switchboard
        if self._images is None or self._logits_BK is None or not board.seen:
            raise TrainingError(
                "mask_loss needs a forward in training mode with free gates: call gated.train(), gated(x)"
            )
        images = self._images
        return Step(
            rerun=lambda masks: self.rerun(images, masks),
            share=self._expected_share,
            images=images,
            logits_BK=self._logits_BK,
            labels=labels,
            taught_BK=taught_BK,
            decisions={name: board.decisions[name] for name in board.seen},
            seen=board.seen,
        )

    def _expected_share(self, shares: Mapping[str, Tensor]) -> Tensor:
        graph = self.graph.at(self.last_shape)
        heads = sum(self.gates.head_macs(self.gates.sites[name]) for name in shares)
        return (expected_macs(graph, shares) + heads) / graph.dense_macs

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
        return _rebuild, (self.backbone, self.gates, selected, self.graph.input_shape, self.training)


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
        config: of a registered method.
        filter_fn: called with each :class:`Unit` that could be gated; False leaves it open.
        input_shape: (C, H, W) of an image, for the MACs and for leaving out gates that cannot pay. Default:
            what a registered backbone was made for, else 224 x 224.

    Raises:
        TraceError: the model cannot be traced, or does not run at ``input_shape``.
        NoUnitError: nothing can be gated; says why.
    """
    if isinstance(model, GatedModel):
        raise ConfigError("the model is gated already; gate its plain form, gated.backbone")
    require_followable(model)
    return _gated(copy.deepcopy(model), config, filter_fn, input_shape)


def describe_backbone(model: nn.Module) -> dict[str, Any] | None:
    """Name and arguments of a registered backbone; None for any other model."""
    return {"name": model.spec.name, "args": model.spec.args} if isinstance(model, Backbone) else None


def num_filters(model: nn.Module) -> dict[str, int]:
    """Conv name -> how many filters it has: what pruning changes, beside a backbone's name and arguments."""
    return {name: module.out_channels for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}


def mask_loss(gated: nn.Module, labels: Tensor | None = None, taught_BK: Tensor | None = None) -> Tensor:
    """The gates' loss for the last forward in training mode: a scalar to add to the task loss.

    Args:
        gated: a gated model, or a model that holds some; their losses are added up.
        labels: (B,), for methods that learn from them.
        taught_BK: a teacher's logits, for methods that learn from those.
    """
    losses = []
    for part in gated_parts(gated):
        step = part.step(labels, taught_BK)
        total = part.gates.loss(step)
        losses.append(total / len(step.seen) if part.config.reduction == "mean" else total)
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum()


def gated_parts(model: nn.Module) -> list[GatedModel]:
    """The gated models in a model, which may be one itself or be wrapped (DistributedDataParallel, torch.compile).

    Raises:
        ConfigError: there is none.
    """
    found = [module for module in model.modules() if isinstance(module, GatedModel)]
    if not found:
        raise ConfigError(
            f"a gated model is needed, got {type(model).__name__}; make one with cofire.gate(model, config)"
        )
    return found


def has_gates(model: nn.Module) -> bool:
    """Whether a model is gated, or has a part that is."""
    return any(isinstance(module, GatedModel) for module in model.modules())


def require_filters(gated: GatedModel, who: str) -> None:
    """Raise unless the method's masks are of filters: ``who`` cannot handle another kind."""
    other = next((site for site in gated.gates.sites.values() if site.kind != "filters"), None)
    if other is not None:
        raise ConfigError(
            f"{who} handles masks of filters, but {type(gated.config).__name__} decides on masks of another kind at "
            f"{other.name!r}: {other.kind}"
        )


def _gated(
    backbone: nn.Module,
    config: GateConfig,
    filter_fn: Callable[[Unit], bool] | None,
    input_shape: tuple[int, int, int] | None,
) -> GatedModel:
    kind = method_of(config)
    say_what_to_fuse(backbone)
    graph = kind.place(trace(backbone, input_shape), config, filter_fn)
    method = kind(config, graph).to(next(backbone.parameters()).dtype)
    method.prepare(graph)
    return GatedModel(backbone, graph, method)


def _is_data(backbone: nn.Module, name: str) -> bool:
    """Whether a model has an attribute of this name that is no method."""
    return not name.startswith("_") and hasattr(backbone, name) and not callable(getattr(backbone, name))


def _rebuild(
    backbone: nn.Module,
    method: AbstractMethod,
    selected: tuple[str, ...],
    input_shape: tuple[int, int, int],
    training: bool,
) -> GatedModel:
    modes = method.training
    graph = method.place(trace(backbone, input_shape), method.config, lambda unit: unit.name in selected)
    gated = GatedModel(backbone, graph, method)
    gated.training = training
    method.train(modes)
    return gated
