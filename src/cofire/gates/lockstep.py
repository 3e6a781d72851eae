"""A network's calls run one by one on all images, so that each layer can be fitted before the next one runs.

Beside the network runs its dense original on the same images: behind every batch norm the new network's statistics are
measured, under the masks that were chosen before it, and its factor and shift become those that bring its output
nearest to the original's.

Shapes: N images, B of a batch, I input channels, O filters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, fx, nn

from cofire.graph.graph import Graph
from cofire.graph.units import Site
from cofire.progress import progress

Choose = Callable[[Site, list[Tensor]], Tensor]
"""Sees a site and its inputs (B, I, H, W), batch by batch; gives the masks of all images, (N, O) or (1, O)."""


@torch.no_grad()
def refit(graph: Graph, original: nn.Module, batches: Sequence[Tensor], choose: Choose, text: str = "") -> None:
    """Choose masks site by site, in execution order, and fit the batch norms of ``graph.root`` to them; in place.

    Args:
        graph: with sites of filters; its root is changed.
        original: the same network as it was before.
        batches: of images.
        text: what the progress bar says; empty for none.
    """
    firsts = {site.first: site for site in graph.sites}
    lasts = {site.out: site for site in graph.sites}
    calls = Counter(str(node.target) for node in graph.calls.nodes if node.op == "call_module")
    nodes = {node.name: node for node in graph.calls.nodes}
    own = [_Run(graph.root, graph.calls, batch) for batch in batches]
    dense = [_Run(original, graph.calls, batch) for batch in batches]
    masks: dict[str, Tensor] = {}
    with progress(text) as bar:
        task = bar.add_task(text, total=len(nodes))
        for node in graph.calls.nodes:
            if (site := firsts.get(node.name)) is not None:
                masks[site.name] = choose(site, [run.env[nodes[site.x]] for run in own])
            for run in dense:
                run.advance(node)
            if node.op == "call_module" and calls[str(node.target)] == 1:
                norm = graph.root.get_submodule(str(node.target))
                if isinstance(norm, nn.BatchNorm2d):
                    inputs = [run.env[node.all_input_nodes[0]] for run in own]
                    _refit_norm(norm, inputs, [run.env[node] for run in dense])
            for run in own:
                run.advance(node)
            if (site := lasts.get(node.name)) is not None:
                for run, mask in zip(own, _parts(masks.pop(site.name), batches), strict=True):
                    run.env[node] = run.env[node] * mask[:, :, None, None]
            for run in (*own, *dense):
                run.tidy(node)
            bar.advance(task)


class _Run(fx.Interpreter):
    """One batch on its way through a network."""

    def __init__(self, root: nn.Module, calls: fx.Graph, batch: Tensor) -> None:
        super().__init__(root, graph=calls)
        self.args_iter: Iterator[Tensor] = iter([batch])

    def advance(self, node: fx.Node) -> None:
        self.env[node] = self.run_node(node)

    def tidy(self, node: fx.Node) -> None:
        """Drop what no later call reads."""
        for unused in self.user_to_last_uses.get(node, ()):
            del self.env[unused]


def _parts(mask_NO: Tensor, batches: Sequence[Tensor]) -> Sequence[Tensor]:
    return [mask_NO] * len(batches) if len(mask_NO) == 1 else mask_NO.split([len(batch) for batch in batches])


def _refit_norm(norm: nn.BatchNorm2d, inputs: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """Statistics of the inputs; factor and shift by least squares, channel by channel."""
    count = sum(z.numel() // z.shape[1] for z in inputs)
    over = (0, 2, 3)
    mean_C = torch.stack([z.sum(over, dtype=torch.float64) for z in inputs]).sum(0) / count
    centred = [(z - mean_C.to(z.dtype)[:, None, None]) for z in inputs]
    var_C = torch.stack([z.square().sum(over, dtype=torch.float64) for z in centred]).sum(0) / count
    assert norm.running_mean is not None
    assert norm.running_var is not None
    norm.running_mean.copy_(mean_C)
    norm.running_var.copy_(var_C)
    if norm.affine:
        both_C = torch.stack(
            [(z * y).sum(over, dtype=torch.float64) for z, y in zip(centred, wanted, strict=True)]
        ).sum(0)
        norm.weight.copy_(both_C / count / (var_C + norm.eps).sqrt())
        norm.bias.copy_(torch.stack([y.sum(over, dtype=torch.float64) for y in wanted]).sum(0) / count)
