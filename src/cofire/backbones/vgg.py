"""VGG 11/13/16/19, with and without batch norm, for 32x32 (CIFAR) and 224x224 (ImageNet)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from cofire.backbones.registry import Backbone, init_weights, register_backbone

STAGE_CHANNELS = (64, 128, 256, 512, 512)
STAGE_CONVS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}


@final
class VGG(Backbone):
    """Stages of 3x3 convs, each closed by a 2x2 max pool (Simonyan & Zisserman 2015, table 1).

    State-dict keys are torchvision's; with a single linear layer as classifier, ``classifier.weight``.

    Args:
        num_convs: convs per stage.
        pool_size: height and width the last feature map is averaged to.
        classifier: takes 512 * pool_size**2 features.
    """

    def __init__(self, num_convs: Sequence[int], *, batch_norm: bool, pool_size: int, classifier: nn.Module) -> None:
        super().__init__()
        self.features = _features(num_convs, batch_norm)
        self.avgpool = nn.AdaptiveAvgPool2d(pool_size)
        self.classifier = classifier
        init_weights(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.avgpool(self.features(x))
        logits: Tensor = self.classifier(torch.flatten(x, 1))
        return logits


def _features(num_convs: Sequence[int], batch_norm: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    in_channels = 3
    for channels, count in zip(STAGE_CHANNELS, num_convs, strict=True):
        for _ in range(count):
            layers.append(nn.Conv2d(in_channels, channels, 3, padding=1))
            if batch_norm:
                layers.append(nn.BatchNorm2d(channels))
            layers.append(nn.ReLU(inplace=True))
            in_channels = channels
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers)


def _imagenet_classifier(num_classes: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(512 * 7 * 7, 4096),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Linear(4096, 4096),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Linear(4096, num_classes),
    )


def _register(depth: int, batch_norm: bool) -> None:
    name = f"vgg{depth}_bn" if batch_norm else f"vgg{depth}"
    num_convs = STAGE_CONVS[depth]

    @register_backbone(name, input_shape=(3, 32, 32))
    def cifar(num_classes: int = 10) -> VGG:
        return VGG(num_convs, batch_norm=batch_norm, pool_size=1, classifier=nn.Linear(512, num_classes))

    @register_backbone(f"{name}_imagenet", input_shape=(3, 224, 224))
    def imagenet(num_classes: int = 1000) -> VGG:
        classifier = _imagenet_classifier(num_classes)
        return VGG(num_convs, batch_norm=batch_norm, pool_size=7, classifier=classifier)


for _depth in STAGE_CONVS:
    _register(_depth, batch_norm=False)
    _register(_depth, batch_norm=True)
