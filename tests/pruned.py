"""What a pruned network must compute, found without surgery."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from cofire.pruning import Channels


@torch.no_grad()
def unheard(model: nn.Module, channels: Channels, masks: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Outputs of a copy in which every layer that reads a removed channel has a weight of zero for it."""
    deaf = copy.deepcopy(model)
    for name, group in channels.groups.items():
        for layer, channel_I in group.inputs.items():
            off_I = torch.cat([~masks[name], torch.tensor([False])])[channel_I]
            deaf.get_submodule(layer).weight[:, off_I] = 0
    return deaf(x)
