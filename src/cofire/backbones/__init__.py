"""Plain CNNs by name: VGG, ResNet and MobileNet for CIFAR-sized and ImageNet-sized images, and other packages'."""

from cofire.backbones import mobilenet, packages, published, resnet, vgg
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
    "packages",
    "published",
    "register_backbone",
    "resnet",
    "vgg",
]
