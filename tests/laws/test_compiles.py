"""Networks of the kinds that people bring compile, and the engine says what PyTorch says.

Gated ones execute as many MACs as ``cost`` counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from laws.models import MODELS, Model
from nets import randomise
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from cofire import FTWT, compile, cost, gate
from cofire.errors import CompileError
from cofire.runtime.limits import Limits

SHAPE = (3, 32, 32)
NEAR = 1e-4  # of the outputs' spread


def block(inputs: int, outputs: int, stride: int = 1, act: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
        nn.BatchNorm2d(outputs),
        act(),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        act(),
    )


class UNet(nn.Module):
    def __init__(self, up: str) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = block(3, 8), block(8, 12), block(12, 16)
        self.up2: nn.Module = nn.ConvTranspose2d(16, 12, 2, 2) if up == "transposed" else nn.Conv2d(16, 12, 1)
        self.mode, self.join2, self.join1 = up, block(24, 12), block(20, 8)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        deep = self.bottom(F.max_pool2d(second, 2))
        up = (
            self.up2(deep)
            if self.mode == "transposed"
            else self.up2(F.interpolate(deep, scale_factor=2, mode=self.mode))
        )
        up = self.join2(torch.cat([up, second], 1))
        up = F.interpolate(up, size=first.shape[-2:], mode="bilinear", align_corners=True)
        return self.head(self.join1(torch.cat([up, first], 1)))


class Detector(nn.Module):
    """Blocks of split channels, maps of three sizes that meet on the way up, a head for each."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.c3 = block(3, 8, 2, nn.SiLU), block(8, 12, 2, nn.SiLU)
        self.c4, self.c5 = block(12, 16, 2, nn.SiLU), block(16, 16, 2, nn.SiLU)
        self.split, self.joined = nn.Conv2d(16, 8, 1), nn.Conv2d(20, 16, 1)
        self.inner = block(4, 4, act=nn.SiLU)
        self.lat4, self.lat3 = nn.Conv2d(32, 12, 1), nn.Conv2d(24, 8, 1)
        self.heads = nn.ModuleList(nn.Conv2d(width, 9, 1) for width in (8, 12, 16))

    def forward(self, x: Tensor) -> list[Tensor]:
        three = self.c3(self.stem(x))
        four = self.c4(three)
        five = self.c5(four)
        one, two = self.split(five).chunk(2, 1)
        pooled = F.max_pool2d(two, 3, 1, 1)
        five = self.joined(torch.cat([one, two, self.inner(two), pooled, F.max_pool2d(pooled, 3, 1, 1)], 1))
        four = self.lat4(torch.cat([F.interpolate(five, scale_factor=2), four], 1))
        three = self.lat3(torch.cat([F.interpolate(four, scale_factor=2), three], 1))
        return [head(maps).flatten(2).sigmoid() for head, maps in zip(self.heads, (three, four, five), strict=True)]


class SuperResolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act = nn.Conv2d(3, 12, 3, padding=1, padding_mode="reflect"), nn.PReLU(12)
        self.body, self.up = (
            nn.ModuleList(block(12, 12, act=nn.GELU) for _ in range(2)),
            nn.Conv2d(12, 12, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.first(x))
        for part in self.body:
            y = y + 0.5 * part(y)
        return F.pixel_shuffle(self.up(y), 2) + F.interpolate(x, scale_factor=2, mode="bicubic")


class Attending(nn.Module):
    """A network with one kind of attention behind its conv."""

    def __init__(self, attend: nn.Module) -> None:
        super().__init__()
        self.first, self.attend, self.second, self.fc = block(3, 8), attend, block(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.second(self.attend(self.first(x))).mean((2, 3)))


class ChannelAndSpace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Conv2d(8, 4, 1), nn.ReLU(), nn.Conv2d(4, 8, 1))
        self.space = nn.Conv2d(2, 1, 7, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.sigmoid(self.mlp(x.mean((2, 3), keepdim=True)) + self.mlp(x.amax((2, 3), keepdim=True)))
        return x * self.space(torch.cat([x.mean(1, keepdim=True), x.max(1, keepdim=True)[0]], 1)).sigmoid()


class AcrossChannels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.conv(x.mean((2, 3)).unsqueeze(1)).sigmoid()
        return x * weights.transpose(1, 2).unsqueeze(-1)


class Coordinates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.squeeze, self.rows, self.columns = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1), nn.Conv2d(4, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = x.mean(3, keepdim=True), x.mean(2, keepdim=True).permute(0, 1, 3, 2)
        both = F.hardswish(self.squeeze(torch.cat([rows, columns], 2)))
        rows, columns = both.split([32, 32], 2)
        return x * self.rows(rows).sigmoid() * self.columns(columns.permute(0, 1, 3, 2)).sigmoid()


class Branches(nn.Module):
    """Two branches, each filter's share of them by a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=2, dilation=2)
        self.down, self.up = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.stack([self.one(x), self.two(x)], 1)
        shares = self.up(self.down(both.sum(1).mean((2, 3), keepdim=True)).relu())
        return (both * shares.view(x.shape[0], 2, 8, 1, 1).softmax(1)).sum(1)


class ChannelsLast(nn.Module):
    """A depthwise conv, then norm and a perceptron with the channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.spread, self.norm = nn.Conv2d(8, 8, 7, padding=3, groups=8), nn.LayerNorm(8, eps=1e-6)
        self.wide, self.narrow = nn.Linear(8, 24), nn.Linear(24, 8)
        self.gamma = nn.Parameter(torch.full((8,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.spread(x).permute(0, 2, 3, 1))
        y = self.gamma * self.narrow(F.gelu(self.wide(y)))
        return x + y.permute(0, 3, 1, 2)


def group_normed() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.GELU(), nn.Conv2d(8, 8, 3), nn.GroupNorm(1, 8), nn.Mish()
    )


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.fc, self.maps = block(3, 8), nn.Linear(8, 5), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.trunk(x)
        return {"classes": F.log_softmax(self.fc(y.mean((2, 3))), 1), "maps": (self.maps(y), F.normalize(y))}


OWN: dict[str, Callable[[], nn.Module]] = {
    "U-Net, transposed": lambda: UNet("transposed"),
    "U-Net, nearest": lambda: UNet("nearest"),
    "detector": Detector,
    "super resolution": SuperResolution,
    "attention to channels and space": lambda: Attending(ChannelAndSpace()),
    "attention across channels": lambda: Attending(AcrossChannels()),
    "attention to coordinates": lambda: Attending(Coordinates()),
    "attention to branches": lambda: Attending(Branches()),
    "channels last": lambda: Attending(ChannelsLast()),
    "group norm": group_normed,
    "two heads": TwoHeads,
}
THEIRS = [
    *("timm/convnext_atto", "timm/resnest14d", "timm/inception_next_atto", "timm/starnet_s1", "timm/fasternet_t0"),
    *("timm/lcnet_050", "torchvision/lraspp_mobilenet_v3_large", "torchvision/shufflenet_v2_x0_5"),
]
SLOW = [
    *("timm/skresnet18", "timm/ecaresnet26t", "timm/efficientnet_b0", "timm/ghostnet_050", "timm/regnetx_002"),
    *("timm/mobilenetv4_conv_small", "timm/resnetblur18", "timm/poolformer_s12", "timm/nfnet_l0", "timm/dm_nfnet_f0"),
    *("timm/hrnet_w18_small", "timm/res2net50_26w_4s", "timm/cspresnet50", "timm/resnetv2_50", "timm/xception41"),
    *("torchvision/fcn_resnet50", "torchvision/deeplabv3_mobilenet_v3_large", "torchvision/mnasnet0_5"),
    *("torchvision/convnext_tiny", "torchvision/densenet121"),
]


def check(model: nn.Module, shape: tuple[int, int, int]) -> None:
    engine = compile(model, shape, limits=Limits(tuning_seconds=0.0, memory=2 << 30, work=1e12))
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = model(x)
    wanted, form = tree_flatten(dict(wanted) if isinstance(wanted, dict) else wanted)
    found, found_form = tree_flatten(engine(x))
    assert found_form == form
    for one, other in zip(found, wanted, strict=True):
        assert float((one - other).abs().max()) <= NEAR * float(other.max() - other.min())


def randomised(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    randomise(model)
    return model.eval()


@pytest.mark.parametrize("name", OWN)
def test_own_networks_compile(name: str) -> None:
    check(randomised(OWN[name]()), SHAPE)


@pytest.mark.parametrize("name", [name for name in OWN if name != "group norm"])  # whose statistics a mask would change
def test_gated_ones_execute_what_cost_counts(name: str) -> None:
    gated = gate(randomised(OWN[name]()), FTWT(), input_shape=SHAPE).eval()
    engine = compile(gated, limits=Limits(tuning_seconds=0.0))
    x = torch.randn(3, *SHAPE, generator=torch.Generator().manual_seed(0))
    found, _ = tree_flatten(engine(x))
    masks = {group: torch.from_numpy(mask) for group, mask in engine.last_masks.items()}
    assert any(not mask.all() for mask in masks.values()), "all filters are on: nothing is seen"
    executed = cost(gated.graph, masks).executed
    for layer, macs in engine.last_macs.items():
        assert macs.tolist() == executed[layer].tolist(), layer
    with torch.no_grad():
        wanted, _ = tree_flatten(gated(x))
    for one, other in zip(found, wanted, strict=True):
        assert float((one - other).abs().max()) <= NEAR * float(other.max() - other.min())


@pytest.mark.skipif(bool(zoo.why_not), reason=zoo.why_not)
@pytest.mark.parametrize("name", [*THEIRS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_published_networks_compile(name: str) -> None:
    options = {"weights_backbone": None} if any(word in name for word in ("fcn", "deeplab", "lraspp")) else {}
    model = zoo.build(name, num_classes=5, **options)
    for key, tensor in model.state_dict().items():  # weights as they are made, which keeps numbers within range
        if key.endswith("running_mean"):
            tensor.normal_(0, 0.1)
        elif key.endswith("running_var"):
            tensor.uniform_(0.5, 1.5)
    check(model, (3, 64, 64))


@pytest.mark.parametrize("norm", [nn.GroupNorm(4, 4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True)])
def test_a_norm_over_space_alone_is_no_scale_and_shift(norm: nn.Module) -> None:
    check(randomised(nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU())), (3, 8, 8))


@pytest.mark.parametrize("kernel", [2, 3])
@pytest.mark.parametrize("side", [17, 18])
def test_windows_that_only_begin_in_the_map_are_pooled(kernel: int, side: int) -> None:
    pool = nn.MaxPool2d(kernel, 2, kernel // 3, ceil_mode=True)
    check(randomised(nn.Sequential(nn.Conv2d(3, 4, 1), pool)), (3, side, side))


PATTERNS = [model for model in MODELS if model.name.startswith("own/")]
HOLD_OPAQUE_MODULES = {"own/yolo": "'head'", "own/picky": "'body'"}  # torch.fx cannot look into these


@pytest.mark.parametrize("model", PATTERNS, ids=lambda model: model.name)
def test_patterns_compile_or_the_error_names_the_module(model: Model) -> None:
    shape = (3, model.side, model.side)
    if model.name in HOLD_OPAQUE_MODULES:
        with pytest.raises(CompileError, match=HOLD_OPAQUE_MODULES[model.name]):
            compile(model.build(), shape)
    else:
        check(model.build(), shape)
