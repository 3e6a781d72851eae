"""What a bench runs on: a gated model, images, and masks to force."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cofire.backbones import create_backbone
from cofire.bench.masks import MaskPool, pool_for_keep, pool_for_macs
from cofire.bench.peers import Array
from cofire.gates import DEFAULT
from cofire.gates.gating import GatedModel, gate
from cofire.graph.graph import default_input_shape

SETS = 16  # different masks, and different random images


@dataclass(frozen=True)
class Plan:
    """What a bench runs on: a gated model, images (N, C, H, W), and masks to force; None: its gates decide."""

    network: str
    gated: GatedModel
    images: Array
    inputs: str
    pools: tuple[MaskPool | None, ...]
    asked: tuple[float | None, ...]
    seed: int = 0
    labels: NDArray[np.int64] | None = None
    """Of the images, (N,), where they are known."""
    calibration: Array | None = None
    """What int8 fits its ranges to, (M, C, H, W); default: the images."""

    def image(self, n: int) -> Array:
        """Image of round ``n``, (1, C, H, W)."""
        n %= len(self.images)
        return self.images[n : n + 1]

    @property
    def shown(self) -> Array:
        """What int8 fits its ranges to."""
        return self.images if self.calibration is None else self.calibration


def random_plan(
    backbone: str | nn.Module,
    *,
    input_shape: tuple[int, int, int] | None = None,
    macs: Iterable[float] = (),
    keep: Iterable[float] = (),
    seed: int = 0,
) -> Plan:
    """A network with random weights, images and masks; the default method's gates in their places.

    Args:
        backbone: a name of the registry, or a plain model, whose weights are taken as they are.
        input_shape: (C, H, W). Default: what the backbone was made for.
        macs: shares of the dense MACs that REMAIN, one point each.
        keep: keep rates, one more point each.
        seed: of all that is random.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        plain = create_backbone(backbone) if isinstance(backbone, str) else copy.deepcopy(backbone)
        shape = input_shape or default_input_shape(plain)
        if isinstance(backbone, str):
            randomise_norms(plain)
        gated = gate(plain.eval(), DEFAULT(), input_shape=shape)
        images = torch.randn(SETS, *shape).numpy()
    shares = tuple(macs)
    pools = [pool_for_macs(gated, share, sets=SETS, seed=seed) for share in shares]
    more = [pool_for_keep(gated, rate, sets=SETS, seed=seed) for rate in keep]
    name = backbone if isinstance(backbone, str) else type(backbone).__name__
    asked = (*shares, *[None] * len(more))
    return Plan(name, gated, images, "random", (*pools, *more), asked, seed)


def own_plan(
    network: str,
    gated: GatedModel,
    images: Tensor,
    inputs: str,
    *,
    labels: Tensor | None = None,
    calibration: Tensor | None = None,
) -> Plan:
    """A trained model on real images (N, C, H, W), whose own gates decide; labels and calibration as in `Plan`."""
    return Plan(
        *(network, gated, images.numpy(), inputs, (None,), (None,)),
        labels=None if labels is None else labels.numpy(),
        calibration=None if calibration is None else calibration.numpy(),
    )


def randomise_norms(model: nn.Module) -> None:
    """Give fresh batch norms something to fold, in place.

    Not the statistics of random images: those are so much alike that norms which tell them apart make the logits a
    hundred times as sensitive to rounding, and engines that are right would fail the check.
    """
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.1)
            if module.running_mean is not None and module.running_var is not None:
                nn.init.normal_(module.running_mean, std=0.1)
                nn.init.uniform_(module.running_var, 0.5, 1.5)
