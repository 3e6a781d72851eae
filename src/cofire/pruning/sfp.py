"""SFP: soft filter pruning. While a model is trained, the weakest filters are set to zero after every epoch and go on
learning; what is zero in the end leaves.

He et al. 2018, "Soft filter pruning for accelerating deep convolutional neural networks".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from cofire.data.feeding import AnyLoader
from cofire.errors import ConfigError
from cofire.pruning.apply import removable_for
from cofire.pruning.base import PruneConfig, allocate, recover, register_criterion, scores
from cofire.pruning.channels import Channels
from cofire.pruning.surgery import cut
from cofire.training.callbacks import AbstractCallback, Run


@dataclass(frozen=True, kw_only=True)
class SFP(PruneConfig):
    """A channel's score is the sum of its filters' L2 norms. `SoftPruning` asks for it after every epoch of training;
    given to `prune`, it is asked once.

    The paper tests the network as the last zeroing leaves it. The statistics of its norms are then those of a network
    whose zeroed filters had grown again; the form ``norms`` measures them anew, which the paper does not.
    """

    soft: bool = True
    forms: ClassVar[Mapping[str, Mapping[str, Any]]] = {"": {}, "norms": {"recovery": "norms"}}


@register_criterion(SFP)
def l2_scores(model: nn.Module, channels: Channels, loader: AnyLoader | None, config: SFP) -> dict[str, Tensor]:
    """Group -> (O,) float64."""

    def norms(layer: str) -> Tensor:
        weight = model.get_submodule(layer).get_parameter("weight").detach().double()
        return weight.square().flatten(1).sum(1).sqrt()

    return {name: group.total(norms) for name, group in channels.groups.items()}


@final
class SoftPruning(AbstractCallback):
    """A callback of `fit` that sets channels to zero after every epoch, and cuts them out when training is over.

    >>> soft = SoftPruning(model, SFP(macs=0.5))
    >>> fit(model, train, recipe, callbacks=[soft])
    >>> small = soft.cut(model)

    Args:
        config: of a method that needs no images, such as ``SFP`` or ``FPGM``.
        input_shape: as in `prune`.
    """

    def __init__(
        self, model: nn.Module, config: PruneConfig, *, input_shape: tuple[int, int, int] | None = None
    ) -> None:
        self.config = config
        self.channels = removable_for(model, config, input_shape)
        self.masks: Mapping[str, Tensor] = {}
        """Group -> bool (O,): the channels that were not zeroed after the last epoch."""

    def on_epoch(self, run: Run) -> None:
        self.masks = self._choice(run.model)
        with torch.no_grad():
            for name, group in self.channels.groups.items():
                for layer, channel_W in group.filters.items():
                    off_W = _looked_up(~self.masks[name], channel_W)
                    for parameter in run.model.get_submodule(layer).parameters(recurse=False):
                        parameter[off_W.to(parameter.device)] = 0

    def cut(self, model: nn.Module, loader: AnyLoader | None = None) -> nn.Module:
        """The smaller module, without the channels that are zero in ``model``; ``loader`` is for the recovery."""
        if not self.masks:
            raise ConfigError("SoftPruning has seen no epoch yet: train with fit(..., callbacks=[soft]) first")
        masks = self._choice(model)
        smaller = cut(model, self.channels, masks)
        recover(model, smaller, self.channels, masks, loader, self.config)
        return smaller

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.masks)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.masks = dict(state)

    def _choice(self, model: nn.Module) -> Mapping[str, Tensor]:
        """The channels that stay: the best ones, those that are zero last of all."""
        found = dict(scores(model, self.channels, None, self.config))
        for name, group in self.channels.groups.items():
            size_O = group.total(lambda layer: _size(model.get_submodule(layer)))
            found[name] = torch.where(size_O == 0, found[name].min() - 1, found[name])
        return allocate(model, self.channels, None, self.config, found)


def _size(layer: nn.Module) -> Tensor:
    """The largest absolute weight of each filter, (filters,)."""
    return layer.get_parameter("weight").detach().abs().flatten(1).amax(1)


def _looked_up(value_O: Tensor, channel_W: Tensor) -> Tensor:
    """The value of each filter's channel; False for filters that are of no channel here."""
    return torch.cat([value_O, value_O.new_zeros(1)])[channel_W]
