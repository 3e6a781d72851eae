"""The registered methods in the forms they are compared in, and each one's experiment at a budget of MACs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from cofire.data.feeding import AnyLoader, first_images
from cofire.errors import ConfigError, unknown
from cofire.estimate import estimate
from cofire.experiments.recipes import BudgetPart, Experiment, SignaturePart
from cofire.experiments.runs import build_model, read_sets
from cofire.gates.base import GateConfig, gate_types
from cofire.gates.gating import gate
from cofire.graph.tracing import evaluating
from cofire.plugins import load_installed
from cofire.pruning import PruneConfig, prune_types

Sort = Literal["static", "dynamic"]
_IMAGES = 500  # on which the cost of a knob's value is counted
_NEAR = 0.002  # of the dense MACs: near enough
_SMALLEST, _STEP = 0.01, 5e-4  # of a knob: its least value, and how finely it is turned


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A method in one of its forms: ``name`` is the method's, with the form's behind it."""

    name: str
    config_type: type[PruneConfig] | type[GateConfig]
    options: Mapping[str, Any]

    @property
    def sort(self) -> Sort:
        """Whether the same filters leave for every image."""
        return "static" if issubclass(self.config_type, PruneConfig) else "dynamic"


def contenders() -> dict[str, Contender]:
    """Name -> every form of every registered method, static ones first."""
    load_installed()
    static = {
        config_type.__name__: config_type for config_type in prune_types().values()
    }  # each under its present name
    registered: dict[str, type[PruneConfig] | type[GateConfig]] = {**static, **gate_types()}
    found = {}
    for method, config_type in registered.items():
        for form, options in config_type.forms.items():
            name = f"{method}-{form}" if form else method
            found[name] = Contender(name=name, config_type=config_type, options=options)
    return found


def chosen(methods: str) -> list[Contender]:
    """The contenders that a text names: ``all``, ``static``, ``dynamic``, or names with commas between them."""
    known = contenders()
    found: dict[str, Contender] = {}
    for part in (part.strip() for part in methods.split(",")):
        several = {name: one for name, one in known.items() if part in ("all", one.sort)}
        if not several and part not in known:
            raise unknown("method", part, [*known, "all", "static", "dynamic"])
        found |= several or {part: known[part]}
    return list(found.values())


def at_budget(contender: Contender, base: Experiment, macs: float) -> Experiment:
    """The experiment that trains ``base`` under a method, at ``macs`` of the dense MACs where the method has a knob.

    Args:
        base: neither pruned nor gated.
        macs: share of the MACs that remains, column ``executed+heads``, in (0, 1).

    Raises:
        ConfigError: no value of the knob meets the budget, or the method cannot handle the model; says why.
    """
    name = f"{base.name}-{contender.name}"
    own = dict(contender.options)
    if any(option.name == "seed" for option in dataclasses.fields(contender.config_type)):
        own["seed"] = base.train.seed
    if issubclass(contender.config_type, PruneConfig):
        return dataclasses.replace(base, name=name, prune=contender.config_type(macs=macs, **own))
    config = contender.config_type(**own)
    if config.alone:
        train = dataclasses.replace(base.train, train="heads", head_lr=base.train.lr, distill=0.0)
        base = dataclasses.replace(base, train=train)
    if config.knob == "threshold":
        return dataclasses.replace(base, name=name, gate=config, budget=BudgetPart(macs=macs))
    if config.knob == "signature":
        signature = SignaturePart(kind="mass" if config.foretold else "uniform", macs=macs)
        return dataclasses.replace(base, name=name, gate=config, signature=signature)
    if config.knob == "target":  # an earlier epoch may not have come to it yet
        base = dataclasses.replace(base, train=dataclasses.replace(base.train, select="last"))
    if config.knob is not None:
        config = _turned(config, config.knob, base, macs)
    return dataclasses.replace(base, name=name, gate=config)


def _turned(config: GateConfig, knob: str, base: Experiment, macs: float) -> GateConfig:
    if knob == "macs":
        return _with(config, knob, macs)
    if knob == "target":
        return config.aimed(macs)
    sets = read_sets(base)
    model = build_model(base, sets).eval()
    loader = sets.train.take(slice(0, _IMAGES)).loader(base.data.eval_batch_size)

    def share(value: float) -> float:
        return _share(model, _with(config, knob, value), loader)

    low, high = _SMALLEST, 1.0
    if (least := share(low)) > macs + _NEAR:
        raise ConfigError(f"macs={macs} cannot be reached: with {knob} = {low}, {least:.3f} of the MACs remain")
    if share(high) <= macs:
        return _with(config, knob, high)
    while high - low > _STEP:
        middle = (low + high) / 2
        found = share(middle)
        if abs(found - macs) <= _NEAR:
            low = high = middle
        elif found > macs:
            high = middle
        else:
            low = middle
    return _with(
        config, knob, round(math.floor(low / _STEP) * _STEP, 4)
    )  # downwards: a share of filters may be a step just above


def _with(config: GateConfig, knob: str, value: float) -> GateConfig:
    changed: dict[str, Any] = {knob: value}
    return dataclasses.replace(config, **changed)


def _share(model: nn.Module, config: Any, loader: AnyLoader) -> float:
    """Share of the MACs before training: with targets as masks if the method foretells, else as its gates begin."""
    if config.foretold:
        return 1 - estimate(model, config, loader, [config.ratio], cascade=True).reduction["executed+heads"][0]
    batches = first_images(loader, _IMAGES)
    _, channels, height, width = batches[0].shape
    gated = gate(model, config, input_shape=(channels, height, width))
    shares = []
    with torch.no_grad(), evaluating(gated):
        for batch in batches:
            gated(batch)
            shares.append(1 - gated.cost(input_shape=gated.last_shape).reduction("executed+heads").expand(len(batch)))
    return float(torch.cat(shares).mean())
