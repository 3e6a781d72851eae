"""The list of models that users might bring; each law about models goes over it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import patterns
import zoo
from torch import nn


@dataclass(frozen=True)
class Model:
    """A network, the side of the images it is tried on, and what is expected of it."""

    name: str
    """``torchvision/NAME``, ``timm/NAME`` or ``own/NAME``, one of `patterns.PATTERNS`."""
    side: int = 64
    options: Mapping[str, Any] = field(default_factory=dict)
    refused: str = ""
    """A regular expression of the error's text, where nothing can be gated; empty where it can."""

    def build(self) -> nn.Module:
        """With the same random weights each time, in eval mode."""
        library, _, name = self.name.partition("/")
        return patterns.build(name) if library == "own" else zoo.build(self.name, **self.options)

    def __str__(self) -> str:
        return self.name


PLAIN = {"init_weights": False}
SEGMENTATION = {"weights_backbone": None}

MODELS = [
    *(Model(f"own/{name}", 16) for name in patterns.PATTERNS),
    Model("torchvision/alexnet"),
    Model("torchvision/resnet18"),
    Model("torchvision/resnet34", 32),
    Model("torchvision/resnext50_32x4d"),
    Model("torchvision/mobilenet_v2"),
    Model("torchvision/mobilenet_v3_small"),
    Model("torchvision/mobilenet_v3_large"),
    Model("torchvision/mnasnet0_5"),
    Model("torchvision/squeezenet1_1"),
    Model("torchvision/densenet121", 32),
    Model("torchvision/googlenet", 64, PLAIN),
    Model("torchvision/inception_v3", 96, {**PLAIN, "aux_logits": False}),
    Model("torchvision/shufflenet_v2_x0_5"),
    Model("torchvision/regnet_x_400mf"),
    Model("torchvision/regnet_y_400mf"),
    Model("torchvision/efficientnet_b0"),
    Model("torchvision/efficientnet_v2_s", 32),
    Model("torchvision/convnext_tiny"),
    Model("torchvision/lraspp_mobilenet_v3_large", 64, SEGMENTATION),
    Model("torchvision/deeplabv3_mobilenet_v3_large", 64, SEGMENTATION),
    Model("torchvision/fcn_resnet50", 32, SEGMENTATION),
    Model("timm/resnet10t"),
    Model("timm/resnet26d"),
    Model("timm/resnetv2_50", 32),
    Model("timm/seresnet18"),
    Model("timm/eca_resnext26ts"),
    Model("timm/skresnet18"),
    Model("timm/resnetblur18"),
    Model("timm/resnest14d"),
    Model("timm/nf_resnet26"),
    Model("timm/resnet18", 32),
    Model("timm/efficientnet_b0"),
    Model("timm/tf_efficientnet_lite0"),
    Model("timm/mobilenetv3_small_050"),
    Model("timm/mobilenetv4_conv_small"),
    Model("timm/mixnet_s"),
    Model("timm/lcnet_050"),
    Model("timm/tinynet_e"),
    Model("timm/ghostnet_100"),
    Model("timm/regnetx_002"),
    Model("timm/regnety_002"),
    Model("timm/repvgg_a0"),
    Model("timm/mobileone_s0"),
    Model("timm/dla34"),
    Model("timm/hrnet_w18_small"),
    Model("timm/ese_vovnet19b_slim"),
    Model("timm/cspresnet50", 32),
    Model("timm/darknet53", 32),
    Model("timm/res2net50_26w_4s", 32),
    Model("timm/convnext_atto"),
    Model("timm/poolformer_s12"),
    Model("timm/starnet_s1"),
    Model("timm/efficientvit_b0"),
    Model("timm/edgenext_xx_small"),
    Model("timm/fastvit_t8"),
    Model("timm/repvit_m0_9"),
    Model("timm/vit_tiny_patch16_224", 32, {"img_size": 32}, refused="no activation comes after it: patch_embed.proj"),
]
