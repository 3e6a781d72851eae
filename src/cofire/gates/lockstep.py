"""A network's calls on all images up to one layer after another, so that each can be fitted before the next one runs.

Beside the network runs its dense original on the same images: behind every batch norm the new network's statistics are
measured, under the masks that were chosen before it, and its factor and shift become those that bring its output
nearest to the original's.

Images go through in chunks. What a chunk needs to go on is held where it is small. Where it is large, as in a wide
block of 224 x 224 images, the chunk is taken anew from the last place where it was small; if that is far back, what it
needs waits in a file. So memory is bounded, and the work is that of a few passes.

Shapes: N images, B of a chunk, C channels, I input channels, O filters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast, final

import torch
from torch import Tensor, fx, nn

from cofire.graph.graph import Graph
from cofire.graph.units import Site
from cofire.progress import progress

Choose = Callable[[Site, Iterable[Tensor]], Tensor]
"""Sees a site and its inputs (B, I, H, W), chunk by chunk, if it asks for them; gives the masks of all images, (N, O)
or (1, O)."""

_HELD = 1 << 30  # bytes of activations that all chunks together may hold
_PIXELS = 1 << 20  # of a chunk, times channels
_FAR = 6  # stops


def chunks(batches: Sequence[Tensor], most: int = 1 << 31) -> Iterator[Tensor]:
    """The images of batches, at most so many at a time that what a network makes of them stays small."""
    for batch in batches:
        yield from batch.split(min(most, max(1, _PIXELS // batch[0].numel())))


@torch.no_grad()
def refit(graph: Graph, original: nn.Module, batches: Sequence[Tensor], choose: Choose, text: str = "") -> None:
    """Choose masks site by site, in execution order, and fit the batch norms of ``graph.root`` to them; in place.

    Args:
        graph: with sites of filters; its root is changed.
        original: the same network as it was before.
        batches: of images.
        text: what the progress bar says; empty for none.
    """
    with TemporaryDirectory(prefix="cofire-") as folder:
        _refit(_Walk(graph, original, batches, Path(folder)), graph, choose, text)


def _refit(walk: _Walk, graph: Graph, choose: Choose, text: str) -> None:
    firsts = {site.first: site for site in graph.sites}
    calls = Counter(str(node.target) for node in walk.nodes if node.op == "call_module")
    with progress(text) as bar:
        for number, node in enumerate(bar.track(walk.nodes, description=text)):
            if (site := firsts.get(node.name)) is not None:
                walk.masks[site.name] = choose(site, walk.inputs(number, site))
            if node.op == "call_module" and calls[str(node.target)] == 1:
                norm = graph.root.get_submodule(str(node.target))
                if isinstance(norm, nn.BatchNorm2d):
                    _refit_norm(norm, walk.pairs(number))


@dataclass
class _Chunk:
    """Some images on their way through both networks: the values that call number ``at`` and later ones read."""

    rows: slice
    at: int
    own: dict[fx.Node, Any]
    dense: dict[fx.Node, Any]
    file: Path | None = None
    """Where the values wait, in place of here."""
    passed: int = 0
    """Stops for which it was taken anew."""

    @property
    def held(self) -> int:
        """Bytes."""
        tensors = (value for env in (self.own, self.dense) for value in env.values() if isinstance(value, Tensor))
        return sum(one.nbytes for one in {tensor.data_ptr(): tensor for tensor in tensors}.values())

    def put(self, file: Path) -> None:
        """Let the values wait in a file."""
        torch.save([list(self.own.values()), list(self.dense.values())], file)
        self.own, self.dense, self.file = dict.fromkeys(self.own), dict.fromkeys(self.dense), file

    def values(self) -> tuple[dict[fx.Node, Any], dict[fx.Node, Any]]:
        """Copies, for calls may write to what they read, and the chunk may be asked to start from here again."""
        envs = (self.own, self.dense)
        if self.file is None:
            own, dense = ({node: _copy(value) for node, value in env.items()} for env in envs)
        else:
            stored = torch.load(self.file, weights_only=True)
            own, dense = (dict(zip(env, values, strict=True)) for env, values in zip(envs, stored, strict=True))
        return own, dense


@final
class _Walk:
    """All images in both networks, taken to any call; calls must be asked for in execution order."""

    def __init__(self, graph: Graph, original: nn.Module, batches: Sequence[Tensor], folder: Path) -> None:
        self._folder = folder
        self.nodes = list(graph.calls.nodes)
        self.masks: dict[str, Tensor] = {}
        self._graph = graph
        self._lasts = {site.out: site.name for site in graph.sites}
        self._named = {node.name: node for node in self.nodes}
        self._own, self._dense = (
            fx.Interpreter(graph.root, graph=graph.calls),
            fx.Interpreter(original, graph=graph.calls),
        )
        image = graph.calls.find_nodes(op="placeholder")[0]
        self._start = self.nodes.index(image) + 1
        self._chunks: list[_Chunk] = []
        self._images = 0
        for batch in chunks(batches):
            rows = slice(self._images, self._images + len(batch))
            self._chunks.append(_Chunk(rows, self._start, {image: batch}, {image: batch}))
            self._images += len(batch)

    def inputs(self, number: int, site: Site) -> Iterator[Tensor]:
        """What the own network has made of each chunk at a site, (B, I, H, W), before the site's first call."""
        last = self._graph[site.first].last
        for chunk in self._at(number):
            x = chunk.own[self._named[site.x]]
            yield x.movedim(-1, 1) if last else x

    def pairs(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each chunk what the own network gives a batch norm, and what the original's makes of its own."""
        node = self.nodes[number]
        norm, x = self._dense.module.get_submodule(str(node.target)), node.all_input_nodes[0]
        for chunk in self._at(number):
            # As a norm alone: those of some packages hold the activation that follows, which must not come twice.
            yield chunk.own[x], nn.BatchNorm2d.forward(cast(nn.BatchNorm2d, norm), chunk.dense[x])

    def _at(self, number: int) -> Iterator[_Chunk]:
        for place, chunk in enumerate(self._chunks):
            moved = self._moved(chunk, number)
            yield moved
            share = _HELD * (chunk.rows.stop - chunk.rows.start) // self._images
            chunk.passed += 1
            if moved.held > max(share, chunk.held):
                if chunk.passed < _FAR:
                    continue
                moved.put(self._folder / str(place))
            self._chunks[place] = moved

    def _moved(self, chunk: _Chunk, number: int) -> _Chunk:
        own, dense = chunk.values()
        for node in self.nodes[max(chunk.at, self._start) : number]:
            for network, env in ((self._own, own), (self._dense, dense)):
                network.env = env
                env[node] = network.run_node(node)
                if network is self._own and (site := self._lasts.get(node.name)) is not None:
                    mask_NO = self.masks[site]
                    mask_BO = mask_NO if len(mask_NO) == 1 else mask_NO[chunk.rows]
                    spread = mask_BO[:, None, None] if self._graph[node.name].last else mask_BO[:, :, None, None]
                    env[node] = env[node] * spread.to(env[node].dtype)
                for unused in network.user_to_last_uses.get(node, ()):
                    env.pop(unused, None)
        return _Chunk(chunk.rows, number, own, dense)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _refit_norm(norm: nn.BatchNorm2d, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Statistics of the inputs; factor and shift by least squares, channel by channel."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    near_C = norm.running_mean.clone()  # sums of differences from it lose no digits
    sums_4C, count = torch.zeros(4, len(near_C), dtype=torch.float64, device=near_C.device), 0
    for z_BCHW, wanted_BCHW in pairs:
        off_BCHW = z_BCHW - near_C[:, None, None]
        terms = (off_BCHW, off_BCHW.square(), off_BCHW * wanted_BCHW, wanted_BCHW)
        sums_4C += torch.stack([term.sum((0, 2, 3), dtype=torch.float64) for term in terms])
        count += z_BCHW.numel() // len(near_C)
    off_C, square_C, both_C, wanted_C = sums_4C / count
    var_C = (square_C - off_C.square()).clamp_min(0)
    norm.running_mean.copy_(near_C.double() + off_C)
    norm.running_var.copy_(var_C)
    if norm.affine:
        norm.weight.copy_((both_C - off_C * wanted_C) / (var_C + norm.eps).sqrt())
        norm.bias.copy_(wanted_C)
