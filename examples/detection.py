"""A YOLO-like network that finds a small and a large thing: own loss and metric, gated, compiled.

Usage: python examples/detection.py [--json results/bench_detection.json]; about a minute.
Shapes: B images, L levels, K kinds of things. A box is (y, x, half its side), in shares of the image.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from own_task import Task, main
from torch import Tensor, nn

KINDS = 2  # disc, box
SIZES = ((0.06, 0.1), (0.15, 0.25))  # half a side: of what the fine level finds, of what the coarse one finds


class Detector(nn.Module):
    """(B, 3, H, W) -> a map for each level, (B, 4 + K, H / 4, W / 4) and (B, 4 + K, H / 8, W / 8).

    Of each cell: is a centre in it? where? how large is the box? which kind?
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        w = width
        self.stem = _layer(3, w, 3, 2)
        self.fine = nn.Sequential(_layer(w, 2 * w, 3, 2), Split(2 * w))
        self.coarse = nn.Sequential(_layer(2 * w, 4 * w, 3, 2), Split(4 * w))
        self.upwards, self.down, self.downwards = (
            _layer(6 * w, 2 * w, 1),
            _layer(2 * w, 2 * w, 3, 2),
            _layer(6 * w, 4 * w, 1),
        )
        self.heads = nn.ModuleList(nn.Sequential(_layer(i, i, 3), nn.Conv2d(i, 4 + KINDS, 1)) for i in (2 * w, 4 * w))

    def forward(self, x: Tensor) -> list[Tensor]:
        fine = self.fine(self.stem(x))
        coarse = self.coarse(fine)
        fine = self.upwards(torch.cat([F.interpolate(coarse, scale_factor=2.0), fine], 1))
        coarse = self.downwards(torch.cat([self.down(fine), coarse], 1))
        return [head(level) for head, level in zip(self.heads, (fine, coarse), strict=True)]


class Split(nn.Module):
    """Half of the channels go through two convs; then all are joined."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        self.enter, self.leave = _layer(channels, channels, 1), _layer(3 * half, channels, 1)
        self.inner = nn.Sequential(_layer(half, half, 3), _layer(half, half, 3))

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.enter(x).chunk(2, 1)
        return self.leave(torch.cat([one, two, two + self.inner(two)], 1))


def _layer(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.SiLU())


def things(images: int, seed: int, side: int) -> tuple[Tensor, dict[str, Tensor]]:
    """A small and a large disc or box on noise; ``box``: (B, L, 3), ``kind``: (B, L)."""
    generator = torch.Generator().manual_seed(seed)
    box_BL3 = 0.25 + 0.5 * torch.rand(images, len(SIZES), 3, generator=generator)
    kind_BL = torch.randint(KINDS, (images, len(SIZES)), generator=generator)
    x_BCHW = 0.3 * torch.randn(images, 3, side, side, generator=generator)
    rows, columns = torch.meshgrid(*2 * [(torch.arange(side) + 0.5) / side], indexing="ij")
    for level, (least, most) in reversed(list(enumerate(SIZES))):  # the small one lies above the large one
        box_BL3[:, level, 2] = least + (most - least) * torch.rand(images, generator=generator)
        for n in range(images):
            y, x, half = box_BL3[n, level]
            down_HW, right_HW = (rows - y).abs(), (columns - x).abs()
            far_HW = torch.maximum(down_HW, right_HW) if kind_BL[n, level] else (down_HW**2 + right_HW**2).sqrt()
            x_BCHW[n, :, far_HW < half] = (
                torch.rand(3, 1, generator=generator) + torch.eye(KINDS, 3)[kind_BL[n, level]][:, None]
            )
    return x_BCHW, {"box": box_BL3, "kind": kind_BL}


def loss(output: list[Tensor], target: dict[str, Tensor]) -> Tensor:
    total = torch.zeros(())
    for level, map_BAHW in enumerate(output):
        box_B3, side = target["box"][:, level], map_BAHW.shape[-1]
        cell_B, within_B2 = _cell(box_B3, side)
        flat_BAS = map_BAHW.flatten(2)
        at_cell_BA = flat_BAS[torch.arange(len(cell_B)), :, cell_B]
        total = total + F.cross_entropy(flat_BAS[:, 0], cell_B)
        total = total + F.cross_entropy(at_cell_BA[:, 4:], target["kind"][:, level])
        total = total + F.smooth_l1_loss(at_cell_BA[:, 1:3].sigmoid(), within_B2)
        total = total + F.smooth_l1_loss(at_cell_BA[:, 3], box_B3[:, 2].log())
    return total


def metric(output: list[Tensor], target: dict[str, Tensor]) -> dict[str, Tensor]:
    """Share of the things whose kind is right and whose box overlaps the best cell's by more than half."""
    found = []
    for level, map_BAHW in enumerate(output):
        side = map_BAHW.shape[-1]
        flat_BAS = map_BAHW.flatten(2)
        best_B = flat_BAS[:, 0].argmax(1)
        at_best_BA = flat_BAS[torch.arange(len(best_B)), :, best_B]
        corner_B2 = torch.stack([best_B // side, best_B % side], 1)
        centre_B2 = (corner_B2 + at_best_BA[:, 1:3].sigmoid()) / side
        overlap_B = _overlap(torch.cat([centre_B2, at_best_BA[:, 3:4].exp()], 1), target["box"][:, level])
        found.append((overlap_B > 0.5) & (at_best_BA[:, 4:].argmax(1) == target["kind"][:, level]))
    return {"recall": torch.stack(found).double().mean(0)}


def _cell(box_B3: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Number of the cell with the centre of a box, and where in the cell that is."""
    place_B2 = box_B3[:, :2] * side
    corner_B2 = place_B2.long()
    return corner_B2[:, 0] * side + corner_B2[:, 1], place_B2 - corner_B2


def _overlap(one_B3: Tensor, other_B3: Tensor) -> Tensor:
    """Intersection over union."""
    low = torch.maximum(one_B3[:, :2] - one_B3[:, 2:], other_B3[:, :2] - other_B3[:, 2:])
    high = torch.minimum(one_B3[:, :2] + one_B3[:, 2:], other_B3[:, :2] + other_B3[:, 2:])
    both = (high - low).clamp(min=0).prod(1)
    return both / (4 * one_B3[:, 2] ** 2 + 4 * other_B3[:, 2] ** 2 - both)


def task(*, width: int = 16, side: int = 64) -> Task:
    torch.manual_seed(0)
    return Task("detection", Detector(width), lambda images, seed: things(images, seed, side), loss, metric)


if __name__ == "__main__":
    main(task(), "recall")
