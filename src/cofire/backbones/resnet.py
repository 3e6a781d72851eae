"""ResNet 20/32/44/56/110 for 32x32 (CIFAR) and 18/34/50 for 224x224 (ImageNet, torchvision's keys)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cofire.backbones.registry import Backbone, init_weights, register_backbone


@final
class ZeroPadShortcut(nn.Module):
    """Option A of the paper: every ``stride``-th pixel, with zero channels added on both sides."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.num_zeros = (out_channels - in_channels) // 2

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, self.num_zeros, self.num_zeros))


def projection_shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Sequential:
    """Option B of the paper: a 1x1 conv with batch norm."""
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False), nn.BatchNorm2d(out_channels)
    )


@final
class BasicBlock(nn.Module):
    """Two 3x3 convs beside a shortcut; ``downsample`` is None where the shortcut is the identity."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        out: Tensor = self.relu(y + shortcut)
        return out


@final
class Bottleneck(nn.Module):
    """A 3x3 conv between two 1x1 convs, beside a shortcut; the 3x3 conv has the stride, as in torchvision."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        out_channels = width * self.expansion
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        out: Tensor = self.relu(y + shortcut)
        return out


Block: TypeAlias = type[BasicBlock] | type[Bottleneck]
Shortcut: TypeAlias = Callable[[int, int, int], nn.Module]


def _stage(
    block: Block, shortcut: Shortcut, in_channels: int, width: int, num_blocks: int, stride: int
) -> nn.Sequential:
    """``num_blocks`` blocks; the first one has the stride, and a shortcut module if the shape changes."""
    out_channels = width * block.expansion
    blocks: list[nn.Module] = []
    for _ in range(num_blocks):
        reshapes = stride != 1 or in_channels != out_channels
        downsample = shortcut(in_channels, out_channels, stride) if reshapes else None
        blocks.append(block(in_channels, width, stride, downsample))
        in_channels, stride = out_channels, 1
    return nn.Sequential(*blocks)


@final
class CifarResNet(Backbone):
    """Depth 6n+2: three stages of n basic blocks, shortcuts without parameters (He et al. 2016, 4.2)."""

    def __init__(self, num_blocks: int, num_classes: int, in_channels: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = _stage(BasicBlock, ZeroPadShortcut, 16, 16, num_blocks, stride=1)
        self.layer2 = _stage(BasicBlock, ZeroPadShortcut, 16, 32, num_blocks, stride=2)
        self.layer3 = _stage(BasicBlock, ZeroPadShortcut, 32, 64, num_blocks, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.linear = nn.Linear(64, num_classes)
        init_weights(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.linear(torch.flatten(self.avgpool(x), 1))
        return logits

    @staticmethod
    def own_key(key: str) -> str:
        return f"linear.{key.removeprefix('fc.')}" if key.startswith("fc.") else key


@final
class ImageNetResNet(Backbone):
    """A 7x7 stem with max pool, then four stages (He et al. 2016, table 1)."""

    def __init__(self, block: Block, num_blocks: Sequence[int], num_classes: int) -> None:
        super().__init__()
        wide = block.expansion
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _stage(block, projection_shortcut, 64, 64, num_blocks[0], stride=1)
        self.layer2 = _stage(block, projection_shortcut, 64 * wide, 128, num_blocks[1], stride=2)
        self.layer3 = _stage(block, projection_shortcut, 128 * wide, 256, num_blocks[2], stride=2)
        self.layer4 = _stage(block, projection_shortcut, 256 * wide, 512, num_blocks[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512 * wide, num_classes)
        init_weights(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return logits


def _register_cifar(depth: int) -> None:
    @register_backbone(f"resnet{depth}", input_shape=(3, 32, 32))
    def cifar(num_classes: int = 10) -> CifarResNet:
        return CifarResNet((depth - 2) // 6, num_classes)


@register_backbone("resnet8_digits", input_shape=(1, 8, 8))
def digits(num_classes: int = 10) -> CifarResNet:
    """The same with one block per stage, for scikit-learn's digits."""
    return CifarResNet(1, num_classes, in_channels=1)


def _register_imagenet(depth: int, block: Block, num_blocks: Sequence[int]) -> None:
    @register_backbone(f"resnet{depth}", input_shape=(3, 224, 224))
    def imagenet(num_classes: int = 1000) -> ImageNetResNet:
        return ImageNetResNet(block, num_blocks, num_classes)


for _depth in (20, 32, 44, 56, 110):
    _register_cifar(_depth)
_register_imagenet(18, BasicBlock, (2, 2, 2, 2))
_register_imagenet(34, BasicBlock, (3, 4, 6, 3))
_register_imagenet(50, Bottleneck, (3, 4, 6, 3))
