"""MobileNet V1 and V2 of any width for 32x32 (CIFAR) and 224x224 (ImageNet; V2 with torchvision's keys)."""

from __future__ import annotations

import math
import re
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cofire.backbones.registry import Backbone, init_weights, register_backbone
from cofire.errors import ConfigError

# out channels at width 1 and stride of each block
V1_BLOCKS = (
    (64, 1),
    (128, 2),
    (128, 1),
    (256, 2),
    (256, 1),
    (512, 2),
    *((512, 1),) * 5,
    (1024, 2),
    (1024, 1),
)
# expansion, out channels at width 1, number of blocks, stride of the first one
V2_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def _check_width(width: float) -> None:
    if not (width > 0 and math.isfinite(width)):
        raise ConfigError(f"width of a MobileNet must be above 0 and finite, got {width}")


@final
class SeparableBlock(nn.Module):
    """A depthwise 3x3 and a pointwise conv, each with batch norm and activation."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, *, tensorflow: bool) -> None:
        super().__init__()
        self.pads = tensorflow and stride == 2
        self.dw = _conv3x3(in_channels, in_channels, stride, groups=in_channels, pad=not self.pads)
        self.dw_bn = _batch_norm(in_channels, tensorflow)
        self.pw = nn.Conv2d(in_channels, out_channels, 1, bias=False)
        self.pw_bn = _batch_norm(out_channels, tensorflow)
        self.act = _activation(tensorflow)

    def forward(self, x: Tensor) -> Tensor:
        if self.pads:
            x = _pad_same(x)
        x = self.act(self.dw_bn(self.dw(x)))
        x = self.act(self.pw_bn(self.pw(x)))
        return x


@final
class MobileNetV1(Backbone):
    """Depthwise separable blocks in a row (Howard et al. 2017, table 1).

    Args:
        width: factor on all channels.
        stem_stride: 2 for ImageNet, 1 for CIFAR.
        tensorflow: compute as the original checkpoints expect: ReLU6, batch norm's eps 1e-3, and at stride 2
            one more row and column below and right instead of on every side. Sizes must be even there.
    """

    def __init__(self, num_classes: int, *, width: float, stem_stride: int, tensorflow: bool) -> None:
        super().__init__()
        _check_width(width)
        in_channels = max(8, int(32 * width))
        self.pads = tensorflow and stem_stride == 2
        self.conv1 = _conv3x3(3, in_channels, stem_stride, pad=not self.pads)
        self.bn1 = _batch_norm(in_channels, tensorflow)
        self.act = _activation(tensorflow)
        blocks: list[nn.Module] = []
        for channels, stride in V1_BLOCKS:
            out_channels = max(8, int(channels * width))
            blocks.append(SeparableBlock(in_channels, out_channels, stride, tensorflow=tensorflow))
            in_channels = out_channels
        self.blocks = nn.Sequential(*blocks)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(in_channels, num_classes)
        init_weights(self)

    def forward(self, x: Tensor) -> Tensor:
        if self.pads:
            x = _pad_same(x)
        x = self.blocks(self.act(self.bn1(self.conv1(x))))
        logits: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return logits

    @staticmethod
    def own_key(key: str) -> str:
        """Translates the other common spelling, ``layers.N.conv1`` .. ``layers.N.bn2`` and ``linear``."""
        names = {"conv1": "dw", "bn1": "dw_bn", "conv2": "pw", "bn2": "pw_bn"}
        if match := re.fullmatch(r"layers\.(\d+)\.(conv1|bn1|conv2|bn2)\.(\w+)", key):
            return f"blocks.{match[1]}.{names[match[2]]}.{match[3]}"
        return f"fc.{key.removeprefix('linear.')}" if key.startswith("linear.") else key


def _conv3x3(in_channels: int, out_channels: int, stride: int, *, groups: int = 1, pad: bool) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=int(pad), groups=groups, bias=False)


def _batch_norm(channels: int, tensorflow: bool) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3 if tensorflow else 1e-5)


def _activation(tensorflow: bool) -> nn.Module:
    return nn.ReLU6(inplace=True) if tensorflow else nn.ReLU(inplace=True)


def _pad_same(x: Tensor) -> Tensor:
    """TensorFlow's SAME padding of an even-sized image for a 3x3 conv of stride 2."""
    return F.pad(x, (0, 1, 0, 1))


@final
class InvertedResidual(nn.Module):
    """Pointwise expansion, depthwise conv, linear pointwise conv; with a shortcut where the shape stays."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = in_channels * expansion
        layers: list[nn.Module] = []
        if expansion != 1:
            layers.append(_conv_bn_relu6(in_channels, hidden, 1))
        layers += [
            _conv_bn_relu6(hidden, hidden, 3, stride=stride, groups=hidden),
            nn.Conv2d(hidden, out_channels, 1, bias=False),
            nn.BatchNorm2d(out_channels),
        ]
        self.conv = nn.Sequential(*layers)
        self.has_shortcut = stride == 1 and in_channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        return x + y if self.has_shortcut else y


@final
class MobileNetV2(Backbone):
    """Inverted residual blocks (Sandler et al. 2018, table 2).

    Args:
        width: factor on all channels, which are then rounded to multiples of 8.
        small_images: for 32x32: no stride in the stem and in the second stage, and no dropout.
    """

    def __init__(self, num_classes: int, *, width: float, small_images: bool) -> None:
        super().__init__()
        _check_width(width)
        in_channels = _multiple_of_8(32 * width)
        last_channels = _multiple_of_8(1280 * max(1.0, width))
        layers: list[nn.Module] = [_conv_bn_relu6(3, in_channels, 3, stride=1 if small_images else 2)]
        for stage, (expansion, channels, num_blocks, first_stride) in enumerate(V2_STAGES):
            out_channels = _multiple_of_8(channels * width)
            stride = 1 if small_images and stage == 1 else first_stride
            for _ in range(num_blocks):
                layers.append(InvertedResidual(in_channels, out_channels, stride, expansion))
                in_channels, stride = out_channels, 1
        layers.append(_conv_bn_relu6(in_channels, last_channels, 1))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Dropout(0.0 if small_images else 0.2), nn.Linear(last_channels, num_classes))
        init_weights(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.avgpool(self.features(x))
        logits: Tensor = self.classifier(torch.flatten(x, 1))
        return logits


def _conv_bn_relu6(
    in_channels: int, out_channels: int, kernel_size: int, *, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    padding = kernel_size // 2
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding, groups=groups, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU6(inplace=True),
    )


def _multiple_of_8(channels: float) -> int:
    """The nearest multiple of 8 that is not more than 10 % below ``channels``."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


@register_backbone("mobilenet_v1", input_shape=(3, 32, 32))
def mobilenet_v1(num_classes: int = 10, *, width: float = 1.0, tensorflow: bool = False) -> MobileNetV1:
    return MobileNetV1(num_classes, width=width, stem_stride=1, tensorflow=tensorflow)


@register_backbone("mobilenet_v1_imagenet", input_shape=(3, 224, 224))
def mobilenet_v1_imagenet(num_classes: int = 1000, *, width: float = 1.0, tensorflow: bool = False) -> MobileNetV1:
    return MobileNetV1(num_classes, width=width, stem_stride=2, tensorflow=tensorflow)


@register_backbone("mobilenet_v2", input_shape=(3, 32, 32))
def mobilenet_v2(num_classes: int = 10, *, width: float = 1.0) -> MobileNetV2:
    return MobileNetV2(num_classes, width=width, small_images=True)


@register_backbone("mobilenet_v2_imagenet", input_shape=(3, 224, 224))
def mobilenet_v2_imagenet(num_classes: int = 1000, *, width: float = 1.0) -> MobileNetV2:
    return MobileNetV2(num_classes, width=width, small_images=False)
