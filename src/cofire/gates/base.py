"""What a method is: one object per gated model that decides at every site and learns; and the registry.

Shapes: B samples, I input channels, O filters, K classes.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, Self, cast, runtime_checkable

import torch
from torch import Tensor, nn

from cofire.errors import ConfigError, unknown
from cofire.gates.heads import InnerMap
from cofire.gates.targets import largest
from cofire.graph.graph import Graph
from cofire.graph.masks import AbstractMask, FilterMask, switched_off
from cofire.graph.placement import Filter, place
from cofire.graph.units import Placement, Site, head_macs


@dataclass(frozen=True)
class Decision:
    """What a method decided at one site for one batch.

    Args:
        logits_BO: what the mask was made of, if that is one number per filter.
        mask: what runs; a tensor (B, O) is taken for a mask of filters. Carries a gradient where the method lets one
            through.
        scale_BO: for methods that also rescale what they keep: (B, O), or of any shape that multiplies the output.
        shift_O: added to rescaled filters that are on, (O,).
        partial_BOHW: at a site with `Site.partial`, the sums that stay where the mask is off; None: zeros.
    """

    logits_BO: Tensor | None
    mask: AbstractMask
    scale_BO: Tensor | None = None
    shift_O: Tensor | None = None
    partial_BOHW: Tensor | None = None

    def __init__(
        self,
        logits_BO: Tensor | None,
        mask: AbstractMask | Tensor,
        scale_BO: Tensor | None = None,
        shift_O: Tensor | None = None,
        partial_BOHW: Tensor | None = None,
    ) -> None:
        found = mask if isinstance(mask, AbstractMask) else FilterMask(mask)
        given = {"logits_BO": logits_BO, "mask": found, "scale_BO": scale_BO, "shift_O": shift_O}
        for name, value in {**given, "partial_BOHW": partial_BOHW}.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One forward in training mode, as a method's loss sees it.

    Args:
        rerun: the logits (B, K) that other masks give for the same images, site -> mask; in eval mode, no gradient.
        share: the share of the dense MACs, decisions included, to be expected where filters, positions or branches run
            with these probabilities, site -> tensor of the masks' shape; (B,), differentiable. See `expected_macs`.
        images: (B, C, H, W).
        logits_BK: what the model made of them; carries a gradient.
        labels: (B,), or None for unlabelled images.
        taught_BK: the teacher's logits, if there is one.
        decisions: site -> what was decided, of the sites that decided by themselves.
        seen: site -> what `AbstractMethod.observe` kept of the site's output.
    """

    rerun: Callable[[Mapping[str, Tensor]], Tensor]
    share: Callable[[Mapping[str, Tensor]], Tensor]
    images: Tensor
    logits_BK: Tensor
    labels: Tensor | None
    taught_BK: Tensor | None
    decisions: Mapping[str, Decision]
    seen: Mapping[str, Any]

    def labelled(self, who: str) -> Tensor:
        """The labels, or an error that says who needs them."""
        if self.labels is None:
            raise ConfigError(f"{who} learns from labels: train on a labelled set, or call mask_loss(gated, labels)")
        return self.labels


@dataclass(frozen=True, kw_only=True)
class GateConfig(Placement):
    """Base of every method's config: placement options plus how the sites' losses become one."""

    reduction: Literal["mean", "sum"] = "mean"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"default": {}}
    forms: ClassVar[Mapping[str, Mapping[str, Any]]] = {"": {}}
    """The forms of the method that `compare` runs, by what is put behind its name; none for what is no method."""
    alone: ClassVar[bool] = False
    """Whether `compare` trains what the method adds alone, at the network's rate, and leaves the network as it is."""

    @property
    def label(self) -> str:
        """The method and its knob in a few words, for tables."""
        return type(self).__name__

    @property
    def foretold(self) -> bool:
        """Whether `estimate` can tell what it will cost before training; such a config has a ``ratio``."""
        return False

    @property
    def knob(self) -> str | None:
        """The option by which `compare` meets a budget; None if there is none, so that the cost is what comes out.

        ``macs`` is the budget itself, ``signature`` the number of filters per group, ``threshold`` that of the trained
        gates, which `calibrate` sets, ``target`` what training aims at, see `aimed`; any other is a number in (0, 1]
        with which the cost grows.
        """
        return None

    def aimed(self, macs: float) -> Self:
        """The config whose training aims at a share ``macs`` of the MACs; for the knob ``target``."""
        raise ConfigError(f"{type(self).__name__} has no target to aim with")

    def twin(self, macs: float, recipe: Any) -> tuple[Any, Any] | None:
        """The static method and the recipe that a run of this one is held against; None: its filters most often on.

        ``macs`` is the share of the MACs that the run executes, ``recipe`` its own.
        """
        return None

    @classmethod
    def preset(cls, name: str, **options: Any) -> Self:
        """The config of a named preset, with ``options`` on top."""
        if name not in cls.presets:
            raise unknown(f"{cls.__name__} preset", name, cls.presets)
        return cls(**{**cls.presets[name], **options})


class AbstractMethod(nn.Module):
    """The gates of one model. A subclass implements ``decide`` and ``loss``; the rest has defaults.

    It is also a mapping, site -> the module that holds what is learned there, for methods that have one per site;
    parameters live under the site's name with ``.`` written as ``_``.
    """

    config: Any
    threshold: Any = None
    """Logit above which something runs, a dial at deploy time; None for a method without such a dial."""
    opens: ClassVar[bool] = True
    """Whether there is a state in which it leaves the network as it was: `force("open")`."""
    pace: ClassVar[Literal["heads", "backbone"]] = "heads"
    """Whose rate and weight decay its parameters learn at: convs, norms and what else the network computes with learn
    as the ``backbone`` does."""

    def __init__(self, config: Any, graph: Graph) -> None:
        super().__init__()
        self.config = config
        self.sites = {site.name: site for site in graph.sites}
        self._keys = {name: name.replace(".", "_") for name in self.sites}
        if len(set(self._keys.values())) < len(self.sites):
            raise ConfigError(f"two groups have the same name once '.' is written as '_': {sorted(self.sites)}")

    # Where it acts, and what it needs there

    @classmethod
    def place(cls, graph: Graph, config: Any, filter_fn: Filter | None) -> Graph:
        """``graph`` with the units and sites at which the method acts; here groups of filters at their units' ends."""
        return place(graph, config, filter_fn)

    def prepare(self, graph: Graph) -> None:
        """Change the backbone, ``graph.root``, once, when the model is gated; here nothing."""

    def head_macs(self, site: Site) -> int:
        """MACs of one sample's decision at a site; here those of a linear map from input channels to filters."""
        return head_macs(list(site.units))

    # One forward

    def begin(self, x_BCHW: Tensor) -> None:
        """Look at the images before the first layer does; here nothing."""

    @abstractmethod
    def decide(self, site: Site, x_BIHW: Tensor) -> Decision:
        """The decision on a site's input (B, I, H, W), before the site's first conv runs."""

    def forced(self, site: Site, x_BIHW: Tensor, mask: AbstractMask) -> Decision:
        """The decision that a mask from outside stands for; here the mask alone."""
        return Decision(None, mask)

    def masked(self, site: Site, decision: Decision, y_BOHW: Tensor, alone: bool) -> Tensor:
        """The site's output with what is off at exactly zero, or at the decision's partial sums.

        Args:
            alone: nobody else keeps ``y_BOHW`` for a backward pass, so that it may be written to.
        """
        mask = decision.mask.spread(y_BOHW)
        if decision.scale_BO is not None:
            scale = decision.scale_BO.to(y_BOHW.dtype)
            scaled = y_BOHW * scale.reshape(*scale.shape, *[1] * (y_BOHW.ndim - scale.ndim))
            if decision.shift_O is not None:
                scaled = scaled + decision.shift_O.to(y_BOHW.dtype).reshape(-1, *[1] * (y_BOHW.ndim - 2))
            return scaled * mask
        if decision.partial_BOHW is not None:
            return y_BOHW * mask + decision.partial_BOHW * (1 - mask)
        return switched_off(y_BOHW, mask) if alone else y_BOHW * mask

    def observe(self, site: Site, decision: Decision, y_BOHW: Tensor) -> Any:
        """What the loss needs of the unmasked output: called in training, before anything may change it."""
        return None

    def target(self, site: Site, y_BOHW: Tensor) -> Tensor | None:
        """What the mask should have been, bool, of the mask's shape; None for a method without targets."""
        return None

    # Learning

    def taught_by(self, teacher: nn.Module) -> nn.Module:
        """The teacher as training will run it beside the model; a method may put one there that it can watch."""
        return teacher

    @abstractmethod
    def loss(self, step: Step) -> Tensor:
        """A scalar to add to the task loss: the sum over the sites of ``step.decisions``, mean over the batch."""

    def parameter_groups(self, recipe: Any) -> list[dict[str, Any]]:
        """The method's parameters as groups of the run's optimiser; ``lr`` is what the schedule multiplies."""
        lr, decay = recipe.lr, recipe.weight_decay
        if self.pace == "heads":
            lr, decay = recipe.head_lr, recipe.head_weight_decay
        parameters = list(self.parameters())
        return [{"params": parameters, "lr": lr, "weight_decay": decay}] if parameters else []

    def on_epoch(self, epoch: int, epochs: int) -> None:
        """Called before the first step of each epoch, and of the rest of one after a resume; here nothing."""

    def on_step(self) -> None:
        """Called after each step of the optimiser; here nothing."""

    # The mapping

    def hold(self, modules: Mapping[str, nn.Module]) -> None:
        """Keep one module per site."""
        # Not add_module, which refuses names that are methods here: a conv may be called "items".
        for name, module in modules.items():
            self._modules[self._keys[name]] = module

    def __getitem__(self, site: str) -> Any:
        if site not in self.sites:
            raise unknown("group", site, self.sites)
        return cast(nn.Module, self._modules[self._keys[site]])

    def __iter__(self) -> Iterator[str]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def items(self) -> Iterator[tuple[str, Any]]:
        """(site, module) in execution order."""
        return ((name, self[name]) for name in self)

    def values(self) -> Iterator[Any]:
        """The modules in execution order."""
        return (self[name] for name in self)


@runtime_checkable
class Foretelling(Protocol):
    """A method whose cost is known before training, for any ratio, from activations of the dense network."""

    def activity(self, site: Site, y_BOHW: Tensor) -> Tensor:
        """What the masks of all ratios follow from, (B, O)."""

    def levels(self, site: Site, activity_BO: Tensor, ratios: list[float]) -> Tensor:
        """The first of nested ratios whose mask has a filter on, R if none has; int (B, O)."""

    def nested(self, ratios: Sequence[float]) -> list[list[float]]:
        """The ratios in ascending runs within each of which a larger ratio keeps all that a smaller one does."""


@runtime_checkable
class Shifting(Protocol):
    """A method whose logits can be moved, filter by filter, for good."""

    sites: dict[str, Site]

    def shift(self, site: Site, by_O: Tensor) -> None:
        """Add ``by_O`` (O,) to the logits of a site from now on."""


@dataclass(frozen=True, kw_only=True)
class LinearHead:
    """How the native engine decides at a site of filters: pooled input -> linear map -> which filters run.

    Args:
        weight: (O, I), or (O, 2 I) where ``pool`` is ``both``: first for the maxima, then for the means.
        pool: over space: ``max``, ``avg``, ``abs`` (mean of absolute values) or ``both`` (max, then mean).
        softmax: over the pooled channels.
        bias: (O,).
        top: so many filters with the largest logits run; None: those above the threshold.
        scale: filters that run are multiplied with max(logit, 0), ``shift`` (O,) is added.
        source: the head reads what this module makes of the image, not the site's input. A single row of ``weight``
            decides for a branch as a whole.
        answers: ``source`` gives two outputs, what the head reads and what stands in for the branch where it is off.
        choice: the head reads what this one chooses on the site's input, 1 or 0 for each of its rows: ``weight`` has as
            many columns.
        inner: comes before ``weight``, which has as many columns as it has rows.
    """

    weight: Tensor
    bias: Tensor | None
    pool: Literal["max", "avg", "abs", "both"] = "max"
    softmax: bool = False
    top: int | None = None
    scale: bool = False
    shift: Tensor | None = None
    source: nn.Module | None = None
    answers: bool = False
    choice: LinearHead | None = None
    inner: InnerMap | None = None

    def chosen(
        self, x_BIHW: Tensor, threshold: float, pooled: Callable[[Tensor], Tensor] = lambda x_BI: x_BI
    ) -> Tensor:
        """Which filters run for an input, bool (B, O): the definition, in a few lines of PyTorch.

        Args:
            pooled: applied to each pooled input (B, I), where ``x_BIHW`` holds live channels only.
        """
        flat_BIS = x_BIHW.flatten(2)
        pools: dict[str, Callable[[], list[Tensor]]] = {
            "max": lambda: [flat_BIS.amax(2)],
            "avg": lambda: [flat_BIS.mean(2)],
            "abs": lambda: [flat_BIS.abs().mean(2)],
            "both": lambda: [flat_BIS.amax(2), flat_BIS.mean(2)],
        }
        if self.choice is None:
            features = torch.cat([pooled(part) for part in pools[self.pool]()], 1)
        else:
            features = self.choice.chosen(x_BIHW, threshold, pooled).to(self.weight.dtype)
        features = torch.softmax(features, 1) if self.softmax else features
        features = features if self.inner is None else self.inner(features)
        logits_BO = nn.functional.linear(features, self.weight, self.bias)
        if self.top is None:
            return logits_BO > threshold
        return largest(logits_BO, self.top)


@runtime_checkable
class Compiling(Protocol):
    """A method that the native engine can run."""

    def lower(self, site: Site) -> LinearHead:
        """The head that decides at a site of filters, or for a branch."""


_methods: dict[type[GateConfig], type[AbstractMethod]] = {}


def register_method(config_type: type[GateConfig]) -> Callable[[type[AbstractMethod]], type[AbstractMethod]]:
    """Class decorator: this method is what configs of ``config_type`` stand for."""
    if not (dataclasses.is_dataclass(config_type) and issubclass(config_type, GateConfig)):
        raise ConfigError(f"a method needs a dataclass derived from GateConfig as its config, got {config_type!r}")
    if any(known.__name__ == config_type.__name__ for known in _methods):
        raise ConfigError(f"a gate config named {config_type.__name__!r} is registered already")

    def register(method: type[AbstractMethod]) -> type[AbstractMethod]:
        _methods[config_type] = method
        return method

    return register


def gate_types() -> dict[str, type[GateConfig]]:
    """Name -> config type of every registered method."""
    return {config_type.__name__: config_type for config_type in _methods}


def method_of(config: GateConfig) -> type[AbstractMethod]:
    """The registered method of a config."""
    if type(config) not in _methods:
        raise unknown("gate config", type(config).__name__, gate_types())
    return _methods[type(config)]
