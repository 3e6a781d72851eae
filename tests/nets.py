"""Small networks for tests: modules by name and a forward in one expression."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cofire import FTWT, GatedModel, gate

SHAPE = (3, 8, 8)
HALF = torch.tensor([[1, 1, 1, 1, 0, 0, 0, 0]], dtype=torch.bool)  # of eight filters
NONE = torch.zeros(1, 8, dtype=torch.bool)
Forward = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    """``forward(net, x)`` over the modules given; ends in a linear layer named ``fc`` where ``logits`` is called."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.call = forward
        randomise(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)

    def logits(self, x: Tensor) -> Tensor:
        return self.fc(x.mean((2, 3)))


class FrozenNorm(nn.Module):
    """Norm with a batch norm's tensors as buffers, as in detection libraries."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean"):
            self.register_buffer(name, torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + 1e-5).rsqrt()
        shift = self.bias - self.running_mean * scale
        return x * scale[None, :, None, None] + shift[None, :, None, None]


class NormAct(nn.BatchNorm2d):
    """Batch norm that applies an activation of its own, as timm's does."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))


def conv(in_channels: int, out_channels: int, size: int = 3, **options: Any) -> nn.Conv2d:
    """A conv that keeps the map's size."""
    return nn.Conv2d(in_channels, out_channels, size, padding=size // 2, **options)


def bn(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels)


def fc(channels: int, classes: int = 5) -> nn.Linear:
    return nn.Linear(channels, classes)


def residual_net(activated: bool = True, in_place: bool = False) -> Net:
    def forward(m: Net, x: Tensor) -> Tensor:
        x = F.relu(m.stem(x))
        y = m.bn2(m.two(F.relu(m.bn1(m.one(x)))))
        if in_place:
            y += x
        else:
            y = y + x
        return m.logits(F.relu(y) if activated else y)

    return Net(forward, stem=conv(3, 8), one=conv(8, 8), bn1=bn(8), two=conv(8, 8), bn2=bn(8), fc=fc(8))


def depthwise_net(between: Callable[[Any, Tensor], Tensor] = lambda m, x: x, **modules: nn.Module) -> Net:
    return Net(
        lambda m, x: m.logits(F.relu(m.point(F.relu(m.bn2(m.depth(between(m, F.relu(m.bn1(m.wide(x)))))))))),
        wide=conv(3, 8, 1),
        bn1=bn(8),
        depth=conv(8, 8, groups=8),
        bn2=bn(8),
        point=conv(8, 8, 1),
        **modules,
        fc=fc(8),
    )


def chain(middle: Callable[[Any, Tensor], Tensor], width: int = 8, **modules: nn.Module) -> Net:
    return Net(
        lambda m, x: m.logits(F.relu(m.last(middle(m, F.relu(m.first(x)))))),
        first=conv(3, 8),
        **modules,
        last=conv(width, 8),
        fc=fc(8),
    )


def option_a_net() -> Net:
    """Residual blocks: an identity, one widened by padding with zeros, one projected."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = F.relu(m.bn0(m.stem(x)))
        x = F.relu(m.bn1(m.a2(F.relu(m.a1(x)))) + x)
        x = F.relu(m.bn2(m.b2(F.relu(m.b1(x)))) + F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 3, 3)))
        x = F.relu(m.bn3(m.c2(F.relu(m.c1(x)))) + m.down(x))
        return m.fc(F.max_pool2d(x, 2).flatten(1))

    modules = {
        "stem": conv(3, 6),
        "a1": conv(6, 5),
        "a2": conv(5, 6),
        "b1": nn.Conv2d(6, 7, 3, 2, 1),
        "b2": conv(7, 12),
    }
    modules |= {"c1": conv(12, 4), "c2": conv(4, 8), "down": conv(12, 8, 1)}
    norms = {"bn0": bn(6), "bn1": bn(6), "bn2": bn(12), "bn3": bn(8)}
    return Net(forward, **modules, **norms, fc=fc(8 * 4))


def inverted_net() -> Net:
    """Inverted residual blocks with depthwise convs."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = F.relu6(m.bn0(m.stem(x)) * 0.01)
        x = x + m.low1(F.relu(m.depth1(F.relu(m.high1(x)))))
        x = m.low2(F.relu(m.bn2(m.depth2(F.max_pool2d(F.relu(m.bn1(m.high2(x))), 2)))))
        return m.logits(F.relu(m.last(x)))

    modules = {"stem": conv(3, 4), "bn0": bn(4), "high1": conv(4, 9, 1), "depth1": conv(9, 9, groups=9)}
    modules |= {"low1": conv(9, 4, 1), "high2": conv(4, 7, 1), "bn1": bn(7), "depth2": conv(7, 7, groups=7)}
    return Net(forward, **modules, bn2=bn(7), low2=conv(7, 5, 1), last=conv(5, 6), fc=fc(6))


def channels_last_net() -> Net:
    """Blocks as in ConvNeXt: a depthwise conv, then a norm and linear layers on maps whose channels come last."""

    def block(m: Net, n: int, x: Tensor) -> Tensor:
        layers = dict(m.named_children())
        y = layers[f"norm{n}"](layers[f"depth{n}"](x).permute(0, 2, 3, 1))
        y = layers[f"narrow{n}"](F.dropout(F.gelu(layers[f"wide{n}"](y)), 0.5, m.training))
        return x + 0.5 * y.permute(0, 3, 1, 2)

    def forward(m: Net, x: Tensor) -> Tensor:
        return m.logits(block(m, 2, block(m, 1, m.stem(x))))

    modules: dict[str, nn.Module] = {"stem": nn.Conv2d(3, 6, 2, 2)}
    for n in (1, 2):
        modules |= {f"depth{n}": conv(6, 6, groups=6), f"norm{n}": nn.LayerNorm(6)}
        modules |= {f"wide{n}": nn.Linear(6, 24), f"narrow{n}": nn.Linear(24, 6)}
    return Net(forward, **modules, fc=fc(6))


def mixed_net() -> Net:
    """Groups, shuffle, squeeze-and-excite, split and concatenation."""

    def forward(m: Net, x: Tensor) -> Tensor:
        left, right = F.relu(m.stem(x)).chunk(2, 1)
        y = F.relu(m.bn1(m.grouped(torch.cat([right, left, F.relu(m.side(x))], 1))))
        y = m.shuffle(y)
        y = y * torch.sigmoid(m.up(F.relu(m.squeeze(y.mean((2, 3), keepdim=True)))))
        a, b = torch.split(y, [5, 3], 1)
        return m.logits(torch.cat([F.relu(m.left(a)), F.dropout(b, 0.5, m.training), torch.sigmoid(left)], 1))

    modules = {"stem": conv(3, 8), "side": conv(3, 4), "grouped": conv(12, 8, groups=2), "bn1": bn(8)}
    modules |= {"shuffle": nn.ChannelShuffle(4), "squeeze": conv(8, 2, 1), "up": conv(2, 8, 1), "left": conv(5, 6)}
    return Net(forward, **modules, fc=fc(6 + 3 + 4))


def randomise(model: nn.Module, seed: int = 0) -> None:
    """Random weights and norm statistics, so that no channel is zero unless a mask makes it so."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("running_var") or name.endswith("bn.weight"):
                tensor.uniform_(0.5, 1.5, generator=generator)
            elif tensor.is_floating_point():
                tensor.normal_(0.0, 0.5, generator=generator)


def gated_net(
    model: nn.Module, shape: tuple[int, int, int] = SHAPE, filter_fn: Any = None, **options: Any
) -> GatedModel:
    """``model`` in eval mode behind FTWT gates, also where a head does not pay."""
    torch.manual_seed(0)  # of the heads' weights
    return gate(model.eval(), FTWT(**{"always": True, **options}), input_shape=shape, filter_fn=filter_fn)


def images(batch: int = 3, shape: tuple[int, int, int] = SHAPE, seed: int = 1) -> Tensor:
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(seed))


def random_masks(gated: GatedModel, batch: int, keep: float = 0.5, seed: int = 2) -> dict[str, Tensor]:
    """A bool mask (B, O) for every group."""
    generator = torch.Generator().manual_seed(seed)
    widths = {group: units[-1].out_channels for group, units in gated.units.groups.items()}
    return {group: torch.rand(batch, width, generator=generator) < keep for group, width in widths.items()}


@torch.no_grad()
def run(gated: GatedModel, x: Tensor, masks: Mapping[str, Tensor] | str) -> Tensor:
    """Logits under forced masks."""
    with gated.force(masks):
        return gated(x)


def live_inputs(gated: GatedModel, layer: str, masks: Mapping[str, Tensor]) -> list[int]:
    """Channels (features of a linear layer) that an ungated or fully open layer reads, per sample."""
    module = gated.get_submodule(layer)
    width = module.in_features if isinstance(module, nn.Linear) else module.in_channels
    cost = gated.cost(masks)
    assert cost.dense[layer] % width == 0
    per_channel = cost.dense[layer] // width
    return [macs // per_channel for macs in cost.executed[layer].tolist()]
