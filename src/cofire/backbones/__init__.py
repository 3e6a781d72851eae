"""Plain CNNs by name: VGG, ResNet and MobileNet for CIFAR-sized and ImageNet-sized images."""

from cofire.backbones import mobilenet, resnet, vgg
from cofire.backbones.registry import (
    Backbone,
    BackboneSpec,
    create_backbone,
    list_backbones,
    load_weights,
    register_backbone,
)

__all__ = [
    "Backbone",
    "BackboneSpec",
    "create_backbone",
    "list_backbones",
    "load_weights",
    "mobilenet",
    "register_backbone",
    "resnet",
    "vgg",
]
