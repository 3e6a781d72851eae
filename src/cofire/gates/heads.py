"""A unit's input -> one logit per filter: the only part of a gate that the native engine has to mirror.

Shapes: B samples, I input channels, O filters, F pooled features: I, or 2 I where maximum and mean are both pooled; R
numbers between the two maps of a head that has two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor, nn

from cofire.gates.pooling import peak

Pool = Literal["max", "avg", "both"]


@dataclass(frozen=True)
class InnerMap:
    """The first of a head's two maps: weight (R, F), bias (R,), and whether a ReLU follows."""

    weight: Tensor
    bias: Tensor
    relu: bool

    def __call__(self, features: Tensor) -> Tensor:
        """From pooled features (B, F) to (B, R)."""
        found = nn.functional.linear(features, self.weight, self.bias)
        return torch.relu(found) if self.relu else found


@final
class PoolingHead(nn.Module):
    """Global pooling over space, a normalisation of what was pooled, a linear map (section 3.3 of the paper).

    Args:
        in_channels, out_channels: I and O.
        pool: global ``max``, ``avg``, or ``both``: the maxima, then the means.
        softmax: normalise the pooled input over its channels.
        standardise: normalise each feature over images instead, as a batch norm without factor and shift does; `folded`
            makes it part of the linear map.
        bias: of the linear map.
        rank: so many numbers between two linear maps in place of one, R; 0: one map.
        hidden: the same with a ReLU between them: a hidden layer.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        pool: Pool,
        softmax: bool,
        bias: bool,
        standardise: bool = False,
        rank: int = 0,
        hidden: int = 0,
    ) -> None:
        super().__init__()
        self.pool = pool
        self.softmax = softmax
        self.relu = hidden > 0
        features = in_channels * (2 if pool == "both" else 1)
        self.norm = nn.BatchNorm1d(features, affine=False) if standardise else None
        between = rank or hidden
        self.inner = nn.Linear(features, between) if between else None
        self.linear = nn.Linear(between or features, out_channels, bias=bias)

    @property
    def first(self) -> nn.Linear:
        """The map that reads what was pooled."""
        return self.linear if self.inner is None else self.inner

    @property
    def macs(self) -> int:
        """MACs for one sample."""
        return self.macs_of(self.linear.out_features)

    def macs_of(self, filters: int) -> int:
        """The same where only so many filters are decided on."""
        inner = 0 if self.inner is None else self.inner.in_features * self.inner.out_features
        return inner + self.linear.in_features * filters

    def forward(self, x_BIHW: Tensor, peak_BI: Tensor | None = None) -> Tensor:
        """Logits (B, O) for an input (B, I, H, W); ``peak_BI`` is its maximum over space, if known already."""
        features_BF = self.pooled(x_BIHW, peak_BI)
        if self.softmax:
            features_BF = torch.softmax(features_BF, dim=1)
        if self.norm is not None and torch.onnx.is_in_onnx_export():  # which has no batch norm of what was joined
            found = nn.functional.linear(features_BF, *self.folded())
        else:
            found = self.first(features_BF if self.norm is None else self.norm(features_BF))
        if self.inner is not None:
            found = self.linear(torch.relu(found) if self.relu else found)
        return found

    def pooled(self, x_BIHW: Tensor, peak_BI: Tensor | None = None) -> Tensor:
        """What the head sees of its input, (B, F)."""
        if self.pool == "avg":
            return x_BIHW.flatten(2).mean(2)
        highest_BI = peak(x_BIHW) if peak_BI is None else peak_BI
        return highest_BI if self.pool == "max" else torch.cat([highest_BI, x_BIHW.flatten(2).mean(2)], 1)

    def narrowed(self, filters_O: Tensor, inputs_I: Tensor) -> dict[str, Tensor]:
        """The state of a head for fewer filters and inputs (bool): what leaves is always zero in its input."""
        state = {key: value.clone() for key, value in self.state_dict().items()}
        inputs_F = torch.cat([inputs_I] * (self.first.in_features // len(inputs_I)))
        first = "linear" if self.inner is None else "inner"
        if self.norm is not None and not bool(inputs_F.all()):
            gone_F = -state["norm.running_mean"] / (state["norm.running_var"] + self.norm.eps).sqrt()
            state[f"{first}.bias"] += state[f"{first}.weight"][:, ~inputs_F] @ gone_F[~inputs_F]
        for key in ("norm.running_mean", "norm.running_var"):
            if key in state:
                state[key] = state[key][inputs_F]
        state[f"{first}.weight"] = state[f"{first}.weight"][:, inputs_F]
        for key in ("linear.weight", "linear.bias"):
            if key in state:
                state[key] = state[key][filters_O]
        return state

    def folded(self) -> tuple[Tensor, Tensor | None]:
        """Weight (O, F) and bias (O,) of the first map with the standardisation, as it is in eval mode, in it.

        (R, F) and (R,) where there are two maps.
        """
        weight, bias = self.first.weight, self.first.bias
        if self.norm is None:
            return weight, bias
        mean_F, var_F = self.norm.running_mean, self.norm.running_var
        assert mean_F is not None
        assert var_F is not None
        scaled = weight.double() / (var_F.double() + self.norm.eps).sqrt()
        shift = -(scaled @ mean_F.double())
        return scaled.to(weight.dtype), (shift if bias is None else bias.double() + shift).to(weight.dtype)
