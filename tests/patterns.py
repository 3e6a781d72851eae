"""Small networks of the kinds that users bring: segmentation, detection, super-resolution, attention, several outputs.

All take (B, 3, H, W). They are our own, written after the patterns of their kinds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def layer(i: int, o: int, size: int = 3, stride: int = 1, act: type[nn.Module] = nn.ReLU, **options: Any) -> nn.Module:
    """Conv, batch norm, activation."""
    conv = nn.Conv2d(i, o, size, stride, size // 2, bias=False, **options)
    return nn.Sequential(conv, nn.BatchNorm2d(o), act())


class Classifier(nn.Module):
    """A stem, a body and the mean of its maps into a linear layer."""

    def __init__(self, body: nn.Module, channels: int = 16, classes: int = 5) -> None:
        super().__init__()
        self.stem, self.body, self.fc = layer(3, channels), body, nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.body(self.stem(x)).mean((2, 3)))


class UNet(nn.Module):
    """Down, up by interpolation with padding where sizes differ, skips by concatenation; a map of class logits."""

    def __init__(self, width: int = 8, classes: int = 3) -> None:
        super().__init__()
        w = width
        self.enter, self.down1, self.down2 = _double(3, w), _double(w, 2 * w), _double(2 * w, 4 * w)
        self.up1, self.up2 = _double(6 * w, 2 * w), _double(3 * w, w)
        self.out = nn.Conv2d(w, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] < 8 or x.shape[-2] < 8:
            raise ValueError(f"the sides must be at least 8, got {tuple(x.shape[-2:])}")
        fine = self.enter(x)
        middle = self.down1(F.max_pool2d(fine, 2))
        coarse = self.down2(F.max_pool2d(middle, 2))
        up = self.up1(torch.cat([self._as_large(coarse, middle), middle], 1))
        return self.out(self.up2(torch.cat([self._as_large(up, fine), fine], 1)))

    @staticmethod
    def _as_large(x: Tensor, like: Tensor) -> Tensor:
        x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        if x.shape[2:] != like.shape[2:]:
            x = F.pad(x, (0, like.shape[3] - x.shape[3], 0, like.shape[2] - x.shape[2]))
        return x


def _double(i: int, o: int) -> nn.Module:
    return nn.Sequential(layer(i, o), layer(o, o))


class TransposedUNet(nn.Module):
    """The same idea with transposed convs and bilinear upsampling to the input's size."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.enter, self.down = layer(3, width), layer(width, 2 * width, stride=2)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.merge, self.out = layer(2 * width, width), nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.enter(x)
        y = self.merge(torch.cat([self.up(self.down(fine)), fine], 1))
        return torch.sigmoid(F.interpolate(self.out(y), size=x.shape[2:], mode="bilinear", align_corners=False))


class Csp(nn.Module):
    """Two halves, one through bottlenecks, all parts concatenated, as in YOLO's backbones."""

    def __init__(self, channels: int, depth: int = 1) -> None:
        super().__init__()
        half = channels // 2
        self.split = layer(channels, channels, 1, act=nn.SiLU)
        self.blocks = nn.ModuleList(
            nn.Sequential(layer(half, half, act=nn.SiLU), layer(half, half, act=nn.SiLU)) for _ in range(depth)
        )
        self.join = layer((2 + depth) * half, channels, 1, act=nn.SiLU)

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.split(x).chunk(2, 1))
        parts.extend(parts[-1] + block(parts[-1]) for block in self.blocks)
        return self.join(torch.cat(parts, 1))


class PoolPyramid(nn.Module):
    """A max pooling three times over, concatenated (SPPF)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.into, self.pool = layer(channels, channels // 2, 1, act=nn.SiLU), nn.MaxPool2d(5, 1, 2)
        self.out = layer(2 * channels, channels, 1, act=nn.SiLU)

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.into(x)]
        parts.extend(self.pool(parts[-1]) for _ in range(3))
        return self.out(torch.cat(parts, 1))


class Detect(nn.Module):
    """Boxes and classes at each level; in eval mode decoded on a grid that it keeps, as YOLO's head does."""

    def __init__(self, widths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.boxes = nn.ModuleList(nn.Sequential(layer(w, w, act=nn.SiLU), nn.Conv2d(w, 4, 1)) for w in widths)
        self.scores = nn.ModuleList(nn.Sequential(layer(w, w, act=nn.SiLU), nn.Conv2d(w, classes, 1)) for w in widths)
        self.shape: Any = None
        self.grid = torch.empty(0)

    def forward(self, levels: list[Tensor]) -> Any:
        maps = [torch.cat([b(x), s(x)], 1) for b, s, x in zip(self.boxes, self.scores, levels, strict=True)]
        if self.training:
            return maps
        if self.shape != [tuple(m.shape[2:]) for m in maps]:
            self.shape = [tuple(m.shape[2:]) for m in maps]
            self.grid = torch.cat([_grid(*size) for size in self.shape], 1)
        flat = torch.cat([m.flatten(2) for m in maps], 2)
        boxes, scores = flat[:, :4], flat[:, 4:]
        return torch.cat([boxes[:, :2] + self.grid, boxes[:, 2:].exp(), scores.sigmoid()], 1), maps


def _grid(height: int, width: int) -> Tensor:
    y, x = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    return torch.stack([x.flatten() / width, y.flatten() / height])


class Yolo(nn.Module):
    """Backbone, a path up and a path down between two levels, and a head that torch.fx cannot follow."""

    def __init__(self, width: int = 8, classes: int = 2) -> None:
        super().__init__()
        w = width
        self.stem = layer(3, w, stride=2, act=nn.SiLU)
        self.fine = nn.Sequential(layer(w, 2 * w, stride=2, act=nn.SiLU), Csp(2 * w))
        self.coarse = nn.Sequential(layer(2 * w, 4 * w, stride=2, act=nn.SiLU), Csp(4 * w), PoolPyramid(4 * w))
        self.up = nn.Upsample(scale_factor=2, mode="nearest")
        self.merge_up = layer(6 * w, 2 * w, 1, act=nn.SiLU)
        self.down = layer(2 * w, 2 * w, stride=2, act=nn.SiLU)
        self.merge_down = layer(6 * w, 4 * w, 1, act=nn.SiLU)
        self.head = Detect((2 * w, 4 * w), classes)

    def forward(self, x: Tensor) -> Any:
        fine = self.fine(self.stem(x))
        coarse = self.coarse(fine)
        fine = self.merge_up(torch.cat([self.up(coarse), fine], 1))
        coarse = self.merge_down(torch.cat([self.down(fine), coarse], 1))
        return self.head([fine, coarse])


class Pyramid(nn.Module):
    """A feature pyramid: maps of three sizes as a dict."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            [layer(3, width), layer(width, 2 * width, stride=2), layer(2 * width, 32, stride=2)]
        )
        self.lateral = nn.ModuleList(nn.Conv2d(i, width, 1) for i in (width, 2 * width, 32))
        self.smooth = nn.ModuleList(layer(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        found: list[Tensor] = []
        for stage in self.stages:
            x = stage(x)
            found.append(x)
        maps = [lateral(level) for lateral, level in zip(self.lateral, found, strict=True)]
        for n in (1, 0):
            maps[n] = maps[n] + F.interpolate(maps[n + 1], size=maps[n].shape[-2:], mode="nearest")
        return {f"p{n}": smooth(level) for n, (smooth, level) in enumerate(zip(self.smooth, maps, strict=True))}


class TwoHeaded(nn.Module):
    """A class and a box for each image."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.body = nn.Sequential(layer(3, width), layer(width, width, stride=2), layer(width, width, stride=2))
        self.classes, self.box = nn.Linear(width, 5), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.body(x).mean((2, 3))
        return self.classes(y), self.box(y)


class Auxiliary(nn.Module):
    """A second classifier on an early map, in training mode only."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.early, self.late = layer(3, width), nn.Sequential(layer(width, width), layer(width, width))
        self.side, self.aux, self.fc = layer(width, width), nn.Linear(width, 5), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Any:
        y = self.early(x)
        side = self.aux(self.side(y).mean((2, 3))) if self.training else None
        logits = self.fc(self.late(y).mean((2, 3)))
        return logits if side is None else {"out": logits, "aux": side}


class SuperResolution(nn.Module):
    """Residual blocks without norms, then pixels out of channels."""

    def __init__(self, width: int = 16, scale: int = 2) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))
            for _ in range(2)
        )
        self.out = nn.Sequential(nn.Conv2d(width, 3 * scale**2, 3, padding=1), nn.PixelShuffle(scale))

    def forward(self, x: Tensor) -> Tensor:
        y = self.enter(x)
        for block in self.blocks:
            y = y + 0.1 * block(y)
        return self.out(y) + F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)


class Cbam(nn.Module):
    """Attention over channels by pooled maxima and means, then over positions."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.before = layer(channels, channels)
        self.mlp = nn.Sequential(nn.Conv2d(channels, 4, 1), nn.ReLU(), nn.Conv2d(4, channels, 1))
        self.place, self.after = nn.Conv2d(2, 1, 7, padding=3), layer(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        y = y * torch.sigmoid(self.mlp(F.adaptive_avg_pool2d(y, 1)) + self.mlp(F.adaptive_max_pool2d(y, 1)))
        where = torch.cat([y.mean(1, keepdim=True), y.amax(1, keepdim=True)], 1)
        return self.after(y * torch.sigmoid(self.place(where)))


class Eca(nn.Module):
    """Attention over channels by a Conv1d."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.before, self.after = layer(channels, channels), layer(channels, channels)
        self.conv = nn.Conv1d(1, 1, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        weight = self.conv(y.mean((2, 3)).unsqueeze(1)).transpose(1, 2).unsqueeze(-1)
        return self.after(y * torch.sigmoid(weight).expand_as(y))


class CoordinateAttention(nn.Module):
    """Attention by pooling along each side."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.before, self.after = layer(channels, channels), layer(channels, channels)
        self.mix = layer(channels, 8, 1, act=nn.Hardswish)
        self.tall, self.wide = nn.Conv2d(8, channels, 1), nn.Conv2d(8, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        height, width = y.shape[2:]
        along = torch.cat([y.mean(3, keepdim=True), y.mean(2, keepdim=True).permute(0, 1, 3, 2)], 2)
        tall, wide = torch.split(self.mix(along), [height, width], 2)
        weight = torch.sigmoid(self.tall(tall)) * torch.sigmoid(self.wide(wide.permute(0, 1, 3, 2)))
        return self.after(y * weight)


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of a map."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class GeluBlock(nn.Module):
    """ConvNeXt's block with 1x1 convs."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.depth = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = ChannelNorm(channels)
        self.widen, self.act, self.shrink = nn.Conv2d(channels, 64, 1), nn.GELU(), nn.Conv2d(64, channels, 1)
        self.scale = nn.Parameter(torch.full((channels, 1, 1), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.shrink(self.act(self.widen(self.norm(self.depth(x)))))


def group_norm(channels: int = 16) -> nn.Module:
    """Convs behind group norms, which cannot be gated, and one without."""
    normed = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(4, channels), nn.ReLU())
    return nn.Sequential(normed, nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU())


class PickyBlock(nn.Module):
    """Looks at values, which torch.fx cannot follow."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.conv, self.after = layer(channels, channels), layer(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.after(y if float(y.sum()) > 0 else y.flip(3))


class SqueezeExcite(nn.Module):
    """Channels rescaled by what their means say."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.before, self.after = layer(channels, channels), layer(channels, channels)
        self.mlp = nn.Sequential(nn.Linear(channels, 4), nn.ReLU(), nn.Linear(4, channels), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        return self.after(y * self.mlp(y.mean((2, 3)))[:, :, None, None])


PATTERNS: dict[str, Callable[[], nn.Module]] = {
    "unet": UNet,
    "transposed_unet": TransposedUNet,
    "yolo": Yolo,
    "pyramid": Pyramid,
    "two_headed": TwoHeaded,
    "auxiliary": Auxiliary,
    "super_resolution": SuperResolution,
    "cbam": lambda: Classifier(Cbam()),
    "eca": lambda: Classifier(Eca()),
    "coordinate_attention": lambda: Classifier(CoordinateAttention()),
    "gelu_blocks": lambda: Classifier(nn.Sequential(GeluBlock(), GeluBlock())),
    "group_norm": lambda: Classifier(group_norm()),
    "picky": lambda: Classifier(PickyBlock()),
    "squeeze_excite": lambda: Classifier(SqueezeExcite()),
    "csp": lambda: Classifier(nn.Sequential(Csp(16, 2), PoolPyramid(16))),
}
"""Name -> a network with random weights."""


def build(name: str) -> nn.Module:
    """The same weights each time."""
    torch.manual_seed(0)
    return PATTERNS[name]().eval()
