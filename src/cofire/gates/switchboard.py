"""What a gated forward calls at each site: decisions, forced masks, and what is kept of the last batch.

Shapes: B samples, O filters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, final

from torch import Tensor

from cofire.errors import ConfigError
from cofire.gates.base import AbstractMethod, Decision
from cofire.graph.masks import AbstractMask, mask_of
from cofire.graph.units import Site

Observer = Callable[[str, Decision, Tensor], None]
Forced = Literal["open", "targets"]


@final
class Switchboard:
    """What the generated forward calls at each site; keeps what was decided for the last batch.

    It is no part of the model's state: ``deepcopy`` and ``pickle`` leave it behind.
    """

    def __init__(self, method: AbstractMethod) -> None:
        self.method = method
        self.forced: dict[str, AbstractMask | Forced] = {}
        self.observer: Observer | None = None
        self.decisions: dict[str, Decision] = {}
        self.seen: dict[str, Any] = {}
        self.input_shape: tuple[int, ...] | None = None

    def begin(self, x_BCHW: Tensor) -> None:
        """A new batch."""
        self.decisions, self.seen = {}, {}
        self.input_shape = tuple(x_BCHW.shape[1:])
        self.method.begin(x_BCHW)

    def decided(self, name: str, x_BIHW: Tensor) -> Decision | None:
        """The decision at a site, taken before the site's first conv runs; None if the output is needed to force it."""
        site, forced = self.method.sites[name], self.forced.get(name)
        if forced is None:
            return self.method.decide(site, x_BIHW)
        if isinstance(forced, AbstractMask):
            return self.method.forced(site, x_BIHW, _for_batch(site, forced, len(x_BIHW)))
        return None

    def masked(self, name: str, y_BOHW: Tensor, decision: Decision | None) -> Tensor:
        """The site's output under its decision, which is none where a word forces it."""
        site, forced = self.method.sites[name], self.forced.get(name)
        kept = None
        if decision is None:
            decision = Decision(None, self._mask_by_word(site, y_BOHW))
        elif forced is None and self.method.training:
            kept = self.seen[name] = self.method.observe(site, decision, y_BOHW)
        self.decisions[name] = decision
        if self.observer is not None:
            self.observer(name, decision, y_BOHW)
        if not isinstance(forced, AbstractMask) and forced == "open":
            return y_BOHW
        return self.method.masked(site, decision, y_BOHW, alone=not _hangs_on_a_graph(kept))

    def _mask_by_word(self, site: Site, y_BOHW: Tensor) -> AbstractMask:
        size, one = tuple(y_BOHW.shape[2:]), y_BOHW.new_ones(())
        if self.forced[site.name] == "targets":
            target = self.method.target(site, y_BOHW)
            if target is None:
                raise ConfigError(f"{type(self.method.config).__name__} has no targets to force")
            return mask_of(site, target.to(y_BOHW.dtype), size)
        shapes = {"filters": y_BOHW.shape[:2], "pixels": (len(y_BOHW), 1, *size), "block": y_BOHW.shape[:1]}
        return mask_of(site, one.expand(shapes[site.kind]), size)


def _for_batch(site: Site, mask: AbstractMask, batch: int) -> AbstractMask:
    """A forced mask with a row for each sample."""
    if len(mask.on) not in (1, batch):
        rows = f"a row for each of {batch} samples, got {len(mask.on)}"
        raise ConfigError(f"group {site.name!r}: a forced mask must have one row or {rows}")
    return type(mask)(mask.on.expand(batch, *mask.on.shape[1:]))


def _hangs_on_a_graph(kept: Any) -> bool:
    """Whether what a method keeps for its loss may need the output as it was in a backward pass."""
    parts = kept if isinstance(kept, (tuple, list)) else [kept]
    return any(isinstance(part, Tensor) and part.requires_grad for part in parts)
