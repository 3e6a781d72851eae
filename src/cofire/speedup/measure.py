"""What a gated program does beside its dense network: agreement, MACs, milliseconds; no labels.

Shapes: N images, B of a batch, T that are timed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from cofire.bench.rounds import Contestant, interleaved
from cofire.evaluation import bits_per_filter
from cofire.gates.gating import GatedModel
from cofire.gates.lockstep import chunks
from cofire.graph.tracing import evaluating
from cofire.runtime.engine import Engine
from cofire.runtime.latency import mean_over_images
from cofire.text import percent, rendered

_TIMED = 20  # images that take turns
_EACH = 3  # rounds of one image


@dataclass(frozen=True, kw_only=True)
class Speedup:
    """A faster model and what is known of it; shares in [0, 1].

    ``agreement``, ``twin_agreement``: of the held-out images, the share that the class of the dense network is kept
    for, by the model and by its static twin (as many MACs, the same filters for every image, trained alike). ``tried``:
    what was made -> how often it agrees there, or why it could not be made. ``macs``: share of the dense MACs that is
    executed, heads included. ``milliseconds``: of one image on one thread, the mean over images, by contestant.
    """

    model: nn.Module
    """As deployed: gated, or plain where no group is left that decides anything."""
    gated: GatedModel
    """The same before what never runs was cut out."""
    twin: nn.Module
    engine: Engine
    fitted_on: int
    held_out: int
    agreement: float
    twin_agreement: float
    tried: dict[str, float | str]
    dense_macs: int
    macs: float
    bits: float
    milliseconds: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """The figures as JSON values."""
        models = ("model", "gated", "twin", "engine")
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in models}

    def __str__(self) -> str:
        return rendered(self.__rich__())

    def __rich__(self) -> Table:
        title = f"fitted on {self.fitted_on} images, tested on {self.held_out} others"
        table = Table(title=title, title_justify="left", show_header=False)
        table.add_row("agrees with the dense network", percent(self.agreement))
        for what, found in self.tried.items():
            table.add_row(f"- {what}", found if isinstance(found, str) else percent(found))
        table.add_row("its static twin agrees", percent(self.twin_agreement))
        table.add_row("MACs executed, heads included", f"{percent(self.macs)} of {self.dense_macs:,}")
        table.add_row("bits per filter", f"{self.bits:.3f}")
        for name, ms in self.milliseconds.items():
            table.add_row(name, f"{ms:.3f} ms per image, one thread")
        return table


def answers(model: nn.Module, batches: Sequence[Tensor]) -> Tensor:
    """The class of each image, (N,)."""
    with torch.no_grad(), evaluating(model):
        return torch.cat([model(batch).argmax(1) for batch in chunks(batches)])


def executed(gated: GatedModel, batches: Sequence[Tensor]) -> Tensor:
    """MACs of each image with heads, float64 (N,)."""
    totals = []
    with torch.no_grad(), evaluating(gated):
        for batch in chunks(batches):
            gated(batch)
            totals.append(gated.cost(input_shape=gated.last_shape).total("executed+heads").double().expand(len(batch)))
    return torch.cat(totals)


def bits(gated: GatedModel, batches: Sequence[Tensor]) -> float:
    """Bits per filter; a network that runs or rests as a whole counts as one."""
    on: dict[str, list[Tensor]] = {}
    with torch.no_grad(), evaluating(gated):
        for batch in chunks(batches):
            gated(batch)
            for name, decision in gated.decisions.items():
                on.setdefault(name, []).append(decision.mask.bits)
    return bits_per_filter(torch.cat([torch.cat(parts).double().mean(0).flatten() for parts in on.values()]))


def spread_by_cost(gated: GatedModel, batches: Sequence[Tensor]) -> Tensor:
    """A few images from the cheapest to the dearest, evenly, so that their mean cost is that of all; (T, C, H, W)."""
    order_N = executed(gated, batches).argsort(stable=True)
    chosen_T = order_N[(torch.linspace(0, 1, 2 * min(_TIMED, len(order_N)) + 1)[1::2] * len(order_N)).long()]
    return torch.cat(list(batches))[chosen_T]


def timed(engines: Mapping[str, Engine], model: nn.Module, images_TCHW: Tensor) -> dict[str, float]:
    """Milliseconds of one image, the mean over images, everyone in turn; ``model`` runs in PyTorch."""
    current = images_TCHW[:1]

    @contextmanager
    def at(number: int) -> Iterator[None]:
        nonlocal current
        current = images_TCHW[number % len(images_TCHW)][None]
        yield

    def in_torch() -> None:
        with torch.inference_mode():
            model(current)

    contestants = {name: Contestant(_calling(engine, lambda: current), at) for name, engine in engines.items()}
    contestants["PyTorch, dense"] = Contestant(in_torch, at)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with evaluating(model):
            seconds = interleaved(contestants, _EACH * len(images_TCHW), warm_up=3)
    finally:
        torch.set_num_threads(threads)
    return {name: 1e3 * mean_over_images(values, len(images_TCHW)) for name, values in seconds.items()}


def _calling(engine: Engine, current: Any) -> Any:
    return lambda: engine(current())
