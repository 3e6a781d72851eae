"""What a gated program does beside its dense network: agreement, MACs, milliseconds; no labels.

Shapes: N images, B of a batch.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from cofire.bench.rounds import Contestant, interleaved
from cofire.evaluation import bits_per_filter
from cofire.gates.ftwt_offline import keep_rates
from cofire.gates.gating import GatedModel
from cofire.gates.lockstep import chunks
from cofire.graph.tracing import evaluating
from cofire.runtime.engine import Engine
from cofire.text import percent, rendered

_ROUNDS = 30
_TIMED = 8  # images that take turns


@dataclass(frozen=True, kw_only=True)
class Speedup:
    """A faster model and what is known of it; shares in [0, 1].

    ``agreement``, ``twin_agreement``: of the held-out images, the share that the class of the dense network is kept
    for, by the model and by its static twin (as many filters, the same for every image). ``macs``: share of the dense
    MACs that is executed, heads included. ``milliseconds``: of one image on one thread, the median, by contestant.
    """

    model: nn.Module
    """As deployed: gated, or plain where no group is left that decides anything."""
    gated: GatedModel
    """The same before what never runs was cut out."""
    twin: GatedModel
    engine: Engine
    fitted_on: int
    held_out: int
    agreement: float
    twin_agreement: float
    before_distilling: float | None
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
        if self.before_distilling is not None:
            table.add_row("before distilling", percent(self.before_distilling))
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


def executed(gated: GatedModel, batches: Sequence[Tensor]) -> float:
    """MACs of one image with heads, mean over images."""
    totals = []
    with torch.no_grad(), evaluating(gated):
        for batch in chunks(batches):
            gated(batch)
            totals.append(gated.cost(input_shape=gated.last_shape).total("executed+heads").double())
    return float(torch.cat(totals).mean())


def bits(gated: GatedModel, batches: Sequence[Tensor]) -> float:
    """Bits per filter."""
    return bits_per_filter(torch.cat(list(keep_rates(gated, batches).values())))


def timed(engines: Mapping[str, Engine], model: nn.Module, batches: Sequence[Tensor]) -> dict[str, float]:
    """Milliseconds of one image, medians, everyone in turn; ``model`` runs in PyTorch."""
    images = torch.cat([batch[:_TIMED] for batch in batches[:1]])
    current = images[:1]

    @contextmanager
    def at(number: int) -> Iterator[None]:
        nonlocal current
        current = images[number % len(images)][None]
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
            seconds = interleaved(contestants, _ROUNDS, warm_up=3)
    finally:
        torch.set_num_threads(threads)
    return {name: 1e3 * statistics.median(values) for name, values in seconds.items()}


def _calling(engine: Engine, current: Any) -> Any:
    return lambda: engine(current())
