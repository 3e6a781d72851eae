"""BlockDrop (Wu et al. 2018): a policy network looks at the image once and says which residual branches run.

It learns by policy gradients: a sample of its own decisions is rewarded for few branches if the answer is right and
fined if it is wrong, compared with what its most likely decisions earn. In the first epochs only the last branches are
at its disposal, then more and more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal, final

import torch
from torch import Tensor, nn

from cofire.errors import ConfigError
from cofire.files.strict import check
from cofire.gates.base import AbstractMethod, Decision, GateConfig, LinearHead, Step, register_method
from cofire.graph.cost import cost
from cofire.graph.graph import Graph, trace
from cofire.graph.masks import BlockMask
from cofire.graph.placement import Filter, place_blocks
from cofire.graph.units import Site


@dataclass(frozen=True, kw_only=True)
class BlockDrop(GateConfig):
    """The method's options.

    Args:
        penalty: what a wrong answer is fined with, at least 0.
        curriculum: epochs after which the policy has all branches at its disposal; it begins with the last one.
        squash: how far sampling follows the policy, in (0.5, 1]: p becomes squash p + (1 - squash) (1 - p).
        entropy: weight of the entropy of the sampled decisions.
        width: channels of the policy network's first layer.
    """

    penalty: float = 5.0
    curriculum: int = 0
    squash: float = 0.8
    entropy: float = 0.1
    width: int = 16
    reduction: Literal["mean", "sum"] = "sum"

    def __post_init__(self) -> None:
        check(self)
        if not 0.5 < self.squash <= 1.0:
            raise ConfigError(f"BlockDrop.squash must be in (0.5, 1], got {self.squash}")
        if min(self.penalty, self.curriculum, self.entropy) < 0 or self.width < 1:
            got = f"{self.penalty}, {self.curriculum}, {self.entropy} and {self.width}"
            raise ConfigError(f"BlockDrop needs penalty, curriculum, entropy >= 0 and width >= 1, got {got}")


class Policy(nn.Module):
    """Images (B, channels, H, W) -> a logit per branch: three strided convs, a mean, a linear map."""

    def __init__(self, channels: int, width: int, branches: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        sizes = (channels, width, 2 * width, 4 * width)
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        self.features = nn.Sequential(*layers)
        self.linear = nn.Linear(sizes[-1], branches)
        nn.init.constant_(self.linear.bias, 2.0)  # most branches run at the beginning

    def forward(self, x_BCHW: Tensor) -> Tensor:
        logits_BS: Tensor = self.linear(self.features(x_BCHW).mean((2, 3)))
        return logits_BS


@final
@register_method(BlockDrop)
class BlockDropMethod(AbstractMethod):
    """One look at the image decides for every branch."""

    config: BlockDrop
    threshold = 0.0
    pace: ClassVar[Literal["heads", "backbone"]] = "backbone"

    def __init__(self, config: BlockDrop, graph: Graph) -> None:
        super().__init__(config, graph)
        if "policy" in self._keys.values():
            raise ConfigError("a residual branch is named 'policy', as the policy network is; rename its module")
        self.policy = Policy(graph.input_shape[0], config.width, len(self.sites))
        self.policy_macs = cost(trace(self.policy, graph.input_shape), {}).dense_total
        self.free = 1 if config.curriculum else len(self.sites)  # how many of the last branches it decides on
        self._logits_BS = torch.zeros(0)

    def __getstate__(self) -> dict[str, object]:
        """What deepcopy and pickle take along: nothing of the last batch."""
        return self.__dict__ | {"_logits_BS": torch.zeros(0)}

    @classmethod
    def place(cls, graph: Graph, config: BlockDrop, filter_fn: Filter | None) -> Graph:
        return place_blocks(graph, filter_fn)

    def head_macs(self, site: Site) -> int:
        """The policy is asked once, so its MACs stand at the first site."""
        return self.policy_macs if site.name == next(iter(self.sites)) else 0

    def begin(self, x_BCHW: Tensor) -> None:
        self._logits_BS = self.policy(x_BCHW)

    def decide(self, site: Site, x_BIHW: Tensor) -> Decision:
        number = list(self.sites).index(site.name)
        logit_B = self._logits_BS[:, number]
        on_B = (logit_B > self.threshold).to(x_BIHW.dtype)
        if self.training:
            on_B = torch.bernoulli(self._probability(logit_B.detach())).to(x_BIHW.dtype)
            on_B = on_B if self._is_free(number) else torch.ones_like(on_B)
        return Decision(logit_B[:, None], BlockMask(on_B))

    def _is_free(self, number: int) -> bool:
        return number >= len(self.sites) - self.free

    def _probability(self, logit: Tensor) -> Tensor:
        """Of sampling that a branch runs."""
        p = torch.sigmoid(logit.float())
        return self.config.squash * p + (1 - self.config.squash) * (1 - p)

    def loss(self, step: Step) -> Tensor:
        label_B = step.labelled("BlockDrop")
        decided = list(step.decisions.values())
        logits_BS = torch.cat([decision.logits_BO for decision in decided if decision.logits_BO is not None], 1)
        on_BS = torch.stack([decision.mask.on for decision in decided], 1)
        places = [list(self.sites).index(name) for name in step.decisions]
        free_S = torch.tensor([self._is_free(place) for place in places], device=on_BS.device)
        likely_BS = torch.where(free_S, (logits_BS.detach() > 0).to(on_BS.dtype), 1.0)
        likely_logits_BK = step.rerun({name: likely_BS[:, s] for s, name in enumerate(step.decisions)})
        won_B = self.reward(step.logits_BK, label_B, on_BS) - self.reward(likely_logits_BK, label_B, likely_BS)
        sampled = torch.distributions.Bernoulli(self._probability(logits_BS).clamp(1e-4, 1 - 1e-4))
        likelihood_B: Tensor = (sampled.log_prob(on_BS) * free_S).sum(1)
        entropy_B: Tensor = (sampled.entropy() * free_S).sum(1)
        return -(won_B * likelihood_B + self.config.entropy * entropy_B).mean()

    def reward(self, logits_BK: Tensor, label_B: Tensor, on_BS: Tensor) -> Tensor:
        """What decisions earn, (B,): 1 - (share of branches that ran) ^ 2 for a right answer, else -penalty."""
        right_B = logits_BK.detach().argmax(1) == label_B
        return torch.where(right_B, 1 - on_BS.mean(1).square(), -self.config.penalty)

    def lower(self, site: Site) -> LinearHead:
        number = list(self.sites).index(site.name)
        linear = self.policy.linear
        weight, bias = linear.weight[number : number + 1], linear.bias[number : number + 1]
        return LinearHead(weight=weight, bias=bias, pool="avg", source=self.policy.features)

    def on_epoch(self, epoch: int, epochs: int) -> None:
        branches, curriculum = len(self.sites), self.config.curriculum
        done = min(1.0, (epoch + 1) / curriculum) if curriculum else 1.0
        self.free = max(1, math.ceil(done * branches))
