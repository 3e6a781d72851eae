"""A U-Net that finds discs and boxes, trained with a loss and a metric of its own, gated, compiled.

Usage: python examples/segmentation.py [--json results/bench_segmentation.json]; about a minute.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from own_task import Task, main
from torch import Tensor, nn

CLASSES = 3  # nothing, disc, box


class UNet(nn.Module):
    """(B, 3, H, W) -> a logit for each class and pixel, (B, 3, H, W); sides divide by 4."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fine, self.middle, self.coarse = (
            _double(3, width),
            _double(width, 2 * width),
            _double(2 * width, 4 * width),
        )
        self.up_middle, self.up_fine = _double(6 * width, 2 * width), _double(3 * width, width)
        self.out = nn.Conv2d(width, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.fine(x)
        middle = self.middle(F.max_pool2d(fine, 2))
        coarse = self.coarse(F.max_pool2d(middle, 2))
        up = self.up_middle(torch.cat([F.interpolate(coarse, scale_factor=2.0), middle], 1))
        return self.out(self.up_fine(torch.cat([F.interpolate(up, scale_factor=2.0), fine], 1)))


def _double(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(_layer(inputs, outputs), _layer(outputs, outputs))


def _layer(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


def shapes(images: int, seed: int, side: int) -> tuple[Tensor, Tensor]:
    """A disc and a box of random size, place and colour on noise; the class of each pixel, (B, H, W)."""
    generator = torch.Generator().manual_seed(seed)
    place_B4 = side * (0.25 + 0.5 * torch.rand(images, 4, generator=generator))
    radius_B2 = side * (0.1 + 0.12 * torch.rand(images, 2, generator=generator))
    colour_B2C = torch.rand(images, 2, 3, generator=generator) + torch.eye(2, 3)  # discs are redder, boxes greener
    x_BCHW = 0.3 * torch.randn(images, 3, side, side, generator=generator)
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    class_BHW = torch.zeros(images, side, side, dtype=torch.long)
    for n in range(images):
        y, x, top, left = place_B4[n]
        disc_HW = (rows - y) ** 2 + (columns - x) ** 2 < radius_B2[n, 0] ** 2
        box_HW = torch.maximum((rows - top).abs(), (columns - left).abs()) < radius_B2[n, 1]
        for kind, inside_HW in enumerate((disc_HW, box_HW)):  # the box lies above the disc
            class_BHW[n][inside_HW] = 1 + kind
            x_BCHW[n, :, inside_HW] += colour_B2C[n, kind][:, None]
    return x_BCHW, class_BHW


def loss(output_BKHW: Tensor, class_BHW: Tensor) -> Tensor:
    return F.cross_entropy(output_BKHW, class_BHW, weight=torch.tensor([0.3, 1.0, 1.0]))  # most pixels are nothing


def metric(output_BKHW: Tensor, class_BHW: Tensor) -> dict[str, Tensor]:
    """Intersection over union, mean over discs and boxes."""
    found_BHW = output_BKHW.argmax(1)
    shares = []
    for kind in range(1, CLASSES):
        found, true = found_BHW == kind, class_BHW == kind
        shares.append((found & true).sum((1, 2)) / (found | true).sum((1, 2)).clamp(min=1))
    return {"IoU": torch.stack(shares).mean(0)}


def task(*, width: int = 16, side: int = 64) -> Task:
    torch.manual_seed(0)
    return Task("segmentation", UNet(width), lambda images, seed: shapes(images, seed, side), loss, metric)


if __name__ == "__main__":
    main(task(), "IoU")
