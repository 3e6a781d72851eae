"""What a run is made of before its first step: its length, what learns, its seeds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from cofire.data.feeding import AnyLoader, num_batches
from cofire.data.images import Loader
from cofire.errors import ConfigError, DataError
from cofire.gates.gating import gated_parts, has_gates
from cofire.training.recipe import Recipe


def length(train: AnyLoader, accumulate: int) -> int:
    """Steps of an epoch."""
    batches = num_batches(train)
    if not batches:
        raise DataError("the training loader must have a length of at least one batch, got an empty or endless one")
    if batches < accumulate:
        raise ConfigError(f"Recipe.accumulate must be at most {batches}, the batches of an epoch, got {accumulate}")
    return batches // accumulate


def described(train: AnyLoader) -> dict[str, Any] | None:
    """What a resumed run must find again in its loader."""
    if not isinstance(train, Loader):
        return None
    options = {name: getattr(train, name) for name in ("batch_size", "augment", "pad", "seed")}
    return {"name": train.images.name, "n": len(train.images), **options}


@contextmanager
def only_learning(model: nn.Module, recipe: Recipe) -> Iterator[None]:
    """Inside the block only what the recipe trains requires a gradient."""
    frozen: list[nn.Parameter] = []
    if recipe.only_heads(0, 1) and not has_gates(model):
        raise ConfigError(
            "training heads, by train='heads' or warm_heads, needs a gated model: cofire.gate(model, config)"
        )
    if recipe.train == "heads":
        heads = {p for part in gated_parts(model) for p in part.gates.parameters()}
        frozen = [p for p in model.parameters() if p.requires_grad and p not in heads]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)


def parameter_groups(model: nn.Module, recipe: Recipe) -> list[dict[str, Any]]:
    """The groups of the run's optimiser: the backbone, then what the methods of gated parts learn (``heads``).

    ``lr`` is the rate that the schedule begins from; a method's group without one learns at ``Recipe.head_lr``.
    """
    parts = gated_parts(model) if has_gates(model) else []
    of_heads = {p for part in parts for p in part.gates.parameters()}
    backbone = [p for p in model.parameters() if p.requires_grad and p not in of_heads]
    own = [group for part in parts for group in part.gates.parameter_groups(recipe)]
    heads = [{"lr": recipe.head_lr, **group, "heads": True} for group in own]
    network = {"params": backbone, "lr": recipe.lr, "weight_decay": recipe.weight_decay, "heads": False}
    return [*([network] if backbone else []), *heads]


def seed(*parts: int) -> int:
    """One seed for some numbers, unlike that of any others."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest(), "big")
