"""Graph -> the groups of channels that can leave for good, such that what is left equals the masked network.

Ops that treat channels one by one couple them: what an addition adds, what a norm scales, what a depthwise conv reads
and writes is one channel. So are all channels of one group of a grouped conv. Channels that something else needs whole
are *pinned*, with a reason, and so is all that is coupled with them.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrize import is_parametrized

from cofire.errors import NoUnitError, TraceError
from cofire.graph.following import Constant
from cofire.graph.graph import Graph, trace
from cofire.graph.ops import DEAD, LIVE, Op
from cofire.pruning.channels import ChannelGroup, Channels, ids
from cofire.pruning.flow import Arrivals, arrivals, blamed

_TRIALS = 2  # subsets of channels that must pass every split, shuffle and padding


def removable(model: nn.Module, input_shape: tuple[int, int, int] | None = None, *, streams: bool = False) -> Channels:
    """The channels of ``model`` that can leave; every other conv says why it stays.

    Args:
        input_shape: as in `trace`.
        streams: whether channels that pass an addition may leave, from all convs that write to the sum and all that
            read it. Without, they stay whole, as in Li et al. 2017.

    Raises:
        NoUnitError: no filter can leave.
        TraceError: a layer computes its weight from others, or runs in training mode only.
    """
    _check_weights(model)
    graph = trace(model, input_shape)
    _check_modes(graph)
    rules = _Rules(graph, streams)
    found = rules.channels()
    generator = torch.Generator().manual_seed(0)
    trials = 0
    while found.groups and trials < _TRIALS:
        rank = {name: torch.rand(size, generator=generator) for name, size in found.sizes.items()}
        some = {name: (rank_O < 0.6) | (rank_O == rank_O.min()) for name, rank_O in rank.items()}
        wrong = blamed(graph, rules.whole, found.kept_ids(some))
        for i, reader in wrong.items():
            way = "through a split, shuffle or shape that fits no other width"
            rules.pin([i], f"{rules.described(graph[reader])} reads it {way}")
        trials = 0 if wrong else trials + 1
        found = rules.channels() if wrong else found
    if not found.groups:
        raise NoUnitError(f"no filter can be removed from this model:\n{found.units}")
    return found


def _check_modes(graph: Graph) -> None:
    """What runs in training mode only would read channels that have left."""
    in_training = graph.in_training().layers.keys() - graph.layers.keys()
    if in_training:
        names = ", ".join(sorted(in_training)[:3])
        raise TraceError(
            f"{names} run in training mode only (auxiliary heads?), so that what they read cannot be told from the "
            "forward that is pruned: take them out first, e.g. aux_logits=False, or model.aux1 = None"
        )


def _check_weights(model: nn.Module) -> None:
    for name, module in model.named_modules():
        layer = isinstance(module, (nn.modules.conv._ConvNd, nn.Linear, _NormBase))
        if layer and (is_parametrized(module) or "weight" not in module._parameters):
            raise TraceError(
                f"{name} ({type(module).__name__}) computes its weight from other tensors (weight norm, spectral "
                "norm); filters can leave a weight that is a plain parameter: remove the parametrisation first, with "
                "torch.nn.utils.parametrize.remove_parametrizations or torch.nn.utils.remove_weight_norm"
            )


class _Rules:
    """Which ids are coupled, and which are pinned for what reason."""

    def __init__(self, graph: Graph, streams: bool) -> None:
        self.graph = graph
        self.nodes = {node.name: node for node in graph.calls.nodes}
        self.num_ids = max([LIVE + 1, *(op.first + op.channels for op in graph.ops)])
        self.calls = Counter(str(node.target) for node in graph.calls.nodes if node.op == "call_module")
        self.pins = {DEAD: "padding with zeros fixes its place", LIVE: "mixed with other channels"}
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.whole: Arrivals = arrivals(graph, torch.ones(self.num_ids, dtype=torch.bool))
        for op in graph.ops:
            if op.kind != "move":
                self._read(op, streams)

    def pin(self, which: Iterable[int], reason: str) -> None:
        for i in which:
            self.pins.setdefault(i, reason)

    def described(self, op: Op) -> str:
        words = {"add": "an addition", "mul": "a product", "output": "the model's output", "input": "the image"}
        node = self.nodes[op.name]
        where = str(node.target) if node.op == "call_module" else op.name
        return words.get(op.kind, f"{op.what} ({where})")

    def _read(self, op: Op, streams: bool) -> None:
        """The pins and pairs that one op asks for."""
        operands = [found.channels_C if found is not None else None for found in self.whole[op.name]]
        obstacle = self._obstacle(op, streams)
        for found, read in zip(self.whole[op.name], op.reads or [None] * len(operands), strict=True):
            if found is None:
                self.pin(ids(read).tolist() if read is not None else (), f"{self.described(op)} reads it unseen")
                continue
            same = read is None or torch.equal(ids(read), found.channels_C)
            if obstacle or found.mixes or not same:
                self.pin(found.present.tolist(), obstacle or f"{self.described(op)} reads it mixed with others")
        own = ids(op.own)
        if obstacle:
            self.pin(own.tolist(), obstacle)
            return
        if op.conv is not None and op.conv.groups == 1:
            return
        if any(read_C is None for read_C in operands):
            self.pin(own.tolist(), f"{self.described(op)} reads what cannot be followed")
        groups = op.conv.groups if op.conv is not None else op.channels
        for read_C in (read_C for read_C in operands if read_C is not None):
            if len(read_C) == 1 < op.channels:  # one channel that is spread over all
                self.pin(read_C.tolist(), f"{self.described(op)} spreads it over all channels")
                continue
            first_G = own.view(groups, -1)[:, :1]
            self.pairs.append((first_G.expand(groups, len(own) // groups).flatten(), own))
            self.pairs.append((first_G.expand(groups, len(read_C) // groups).flatten(), read_C))

    def _obstacle(self, op: Op, streams: bool) -> str:
        """Why nothing that ``op`` reads or writes can leave; empty if it can."""
        if op.kind in ("input", "output", "opaque"):
            return f"{self.described(op)} {'has' if op.kind == 'input' else 'reads'} it"
        if op.kind == "add" and not streams:
            return "an addition reads it"
        node = self.nodes[op.name]
        module = self.graph.modules[str(node.target)] if node.op == "call_module" else None
        tensors = [source for source in node.all_input_nodes if _holds_a_tensor(source) and self._wide(source)]
        if op.conv is not None:
            return self._layer_obstacle(op, module)
        if tensors:
            return f"{self.described(op)} has a tensor of its own ({tensors[0].name})"
        if module is None or not module.state_dict():
            return "" if op.kind != "norm" or isinstance(module, _NormBase) else f"{self.described(op)} mixes channels"
        if self.calls[str(node.target)] > 1:
            return f"{self.described(op)} is called more than once"
        if not isinstance(module, (_NormBase, nn.PReLU)):
            return f"{self.described(op)} mixes its channels"
        return ""

    def _layer_obstacle(self, op: Op, module: nn.Module | None) -> str:
        assert op.conv is not None
        if module is None:
            return f"{self.described(op)} is a function, not a module: its weight has no layer to be cut in"
        if not isinstance(module, (nn.Conv2d, nn.Linear)):
            return f"{self.described(op)} is neither nn.Conv2d nor nn.Linear"
        if self.calls[op.conv.module] > 1:
            return f"{self.described(op)} is called more than once"
        if not _uses_its_weight_as_it_is(module):
            return f"{self.described(op)} changes its weights before it uses them"
        return ""

    def _wide(self, node: fx.Node) -> bool:
        if isinstance(node.target, Constant):
            return node.target.value.numel() > 1
        owner, _, name = str(node.target).rpartition(".")
        value = getattr(self.graph.modules[owner], name)
        return isinstance(value, Tensor) and value.numel() > 1

    def channels(self) -> Channels:
        """The groups that pairs and pins leave."""
        root_of = _connected(self.num_ids, self.pairs)
        pinned: dict[int, str] = {}
        for i, reason in self.pins.items():
            pinned.setdefault(int(root_of[i]), reason)
        layers = [(op, op.conv) for op in self.graph.ops if op.conv is not None]
        mixing = [(op, conv) for op, conv in layers if conv.groups == 1 and op.reads]
        writers = _places(root_of, [ids(op.own) for op, _ in layers])
        readers = _places(root_of, [ids(op.reads[0]) for op, _ in mixing])
        summed = _places(root_of, [ids(op.own) for op in self.graph.ops if op.kind == "add"])
        members: dict[tuple[tuple[int, ...], tuple[int, ...], bool], list[int]] = {}
        for root, written in writers.items():
            if root not in pinned and any(_has_map(layers[place][0]) for place in written):
                alike = tuple(written), tuple(readers.get(root, ())), root in summed
                members.setdefault(alike, []).append(root)
        channel_of_root = torch.full((self.num_ids,), -1)
        groups: dict[str, ChannelGroup] = {}
        for (places, reading, stream), roots in members.items():
            if len(roots) == 1:  # a group keeps at least one
                pinned[roots[0]] = "its channels could only leave all at once"
                continue
            local = torch.full((self.num_ids,), -1)
            local[torch.tensor(roots)] = torch.arange(len(roots))
            local = local[root_of]
            first = sum(group.size for group in groups.values())
            channel_of_root[torch.tensor(roots)] = torch.arange(first, first + len(roots))
            filters = {layers[place][1].module: local[ids(layers[place][0].own)] for place in places}
            inputs = {mixing[place][1].module: local[ids(mixing[place][0].reads[0])] for place in reading}
            name = _fresh(next(layers[place][1].module for place in places if _has_map(layers[place][0])), groups)
            groups[name] = ChannelGroup(name, len(roots), filters, inputs, stream)
        reasons = {
            conv.module: next((pinned[root] for root in root_of[ids(op.own)].tolist() if root in pinned), _TOO_SMALL)
            for op, conv in layers
            if op.is_conv and not any(conv.module in group.filters for group in groups.values())
        }
        return Channels(self.graph, groups, reasons, channel_of_root[root_of])


def _holds_a_tensor(node: fx.Node) -> bool:
    return node.op == "get_attr" or isinstance(node.target, Constant)


_TOO_SMALL = "works on a 1x1 map (squeeze-and-excite or the like)"


def _places(root_of: Tensor, owned: list[Tensor]) -> dict[int, list[int]]:
    """Root -> the places in ``owned`` of which it has an id, in order."""
    found: dict[int, list[int]] = {}
    for place, which in enumerate(owned):
        for root in root_of[which].unique().tolist():
            found.setdefault(root, []).append(place)
    return found


def _has_map(op: Op) -> bool:
    return op.is_conv and max(op.size) > 1


def _fresh(name: str, taken: Iterable[str]) -> str:
    """``name``, or ``name#2`` and so on where one conv's filters belong to several groups."""
    number, fresh = 1, name
    while fresh in taken:
        number += 1
        fresh = f"{name}#{number}"
    return fresh


def _connected(count: int, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Id -> the lowest id it is connected with through pairs, int64 (count,)."""
    root = torch.arange(count)
    if not pairs:
        return root
    one, other = (torch.cat(side) for side in zip(*pairs, strict=True))
    while True:
        low = torch.minimum(root[one], root[other])
        lower = root.scatter_reduce(0, root[one], low, "amin").scatter_reduce(0, root[other], low, "amin")
        lower = lower[lower]
        if torch.equal(lower, root):
            return root
        root = lower


def _uses_its_weight_as_it_is(layer: nn.Conv2d | nn.Linear) -> bool:
    """Found by trying it: a conv that standardises its weights gives the same for doubled ones."""
    if type(layer).forward in (nn.Conv2d.forward, nn.Linear.forward):
        return True
    shape = [1, layer.weight.shape[1]]
    if isinstance(layer, nn.Conv2d):
        side = 2 * max(layer.kernel_size) * max(layer.dilation) + 2
        shape = [1, layer.in_channels, side, side]
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(layer.weight)
    plain, doubled = copy.deepcopy(layer), copy.deepcopy(layer)
    with torch.no_grad():
        doubled.weight.mul_(2)
        for conv in (plain, doubled):
            if conv.bias is not None:
                conv.bias.zero_()
        return torch.allclose(doubled(noise), 2 * plain(noise), rtol=1e-3, atol=1e-5)
