"""RNP, "Runtime Neural Pruning" (Lin et al. 2017): one agent walks through the layers and says how wide each one is.

Before each group of filters the agent sees the mean input and what it remembers of the layers before, and chooses how
many of the group's parts are computed, from the first on. It learns by Q-learning: every part beyond the first has a
price, and at the end the loss of the task is what remains to be paid.

Shapes: B samples, S sites, A actions, M remembered numbers, I input channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cofire.errors import ConfigError
from cofire.files.strict import check
from cofire.gates.base import AbstractMethod, Decision, GateConfig, Step, register_method
from cofire.graph.graph import Graph
from cofire.graph.placement import Filter, place
from cofire.graph.units import Site, Unit


@dataclass(frozen=True, kw_only=True)
class RNP(GateConfig):
    """The method's options.

    Args:
        parts: equal parts of a group's filters; the first 1, 2, ... or all of them run.
        price: of all parts beyond the first together; each costs as much as any other.
        blame: weight of the task loss in the last reward.
        explore: share of decisions in training that are drawn at random, in [0, 1].
        exploring: epochs over which that share falls from 1 to ``explore``.
        memory: numbers that the agent remembers.
    """

    parts: int = 4
    price: float = 0.5
    blame: float = 1.0
    explore: float = 0.1
    exploring: int = 0
    memory: int = 32

    def __post_init__(self) -> None:
        check(self)
        if self.parts < 1 or self.memory < 1:
            raise ConfigError(f"RNP.parts and RNP.memory must be at least 1, got {self.parts} and {self.memory}")
        if not 0.0 <= self.explore <= 1.0:
            raise ConfigError(f"RNP.explore must be in [0, 1], got {self.explore}")
        if min(self.price, self.blame, self.exploring) < 0:
            got = f"{self.price}, {self.blame} and {self.exploring}"
            raise ConfigError(f"RNP.price, RNP.blame and RNP.exploring must be >= 0, got {got}")

    @property
    def label(self) -> str:
        return f"RNP price = {self.price:g}"


class Agent(nn.Module):
    """What all layers share: how memory goes on, and what each action is worth given it."""

    def __init__(self, config: RNP) -> None:
        super().__init__()
        self.again = nn.Linear(config.memory, config.memory, bias=False)
        self.worth = nn.Linear(config.memory, config.parts)
        nn.init.constant_(self.worth.bias[-1:], 1.0)  # it begins with the network as it is

    def forward(self, seen_BM: Tensor, memory_BM: Tensor | None) -> Tensor:
        """The memory after something was seen."""
        before_BM = torch.zeros_like(seen_BM) if memory_BM is None else memory_BM
        return torch.tanh(seen_BM + self.again(before_BM))


@final
@register_method(RNP)
class RNPMethod(AbstractMethod):
    """How many parts of each group run, layer after layer."""

    config: RNP
    pace: ClassVar[Literal["heads", "backbone"]] = "backbone"

    def __init__(self, config: RNP, graph: Graph) -> None:
        super().__init__(config, graph)
        if "agent" in self._keys.values():
            raise ConfigError("a group is named 'agent', as the agent of RNP is; rename its module")
        self.hold({name: nn.Linear(site.units[0].in_channels, config.memory) for name, site in self.sites.items()})
        self.agent = Agent(config)
        self.chance = 1.0 if config.exploring else config.explore  # of a random decision
        self._memory_BM: Tensor | None = None
        self._worth_BA = torch.zeros(0)

    def __getstate__(self) -> dict[str, object]:
        """What deepcopy and pickle take along: nothing of the last batch."""
        return self.__dict__ | {"_memory_BM": None, "_worth_BA": torch.zeros(0)}

    @classmethod
    def place(cls, graph: Graph, config: RNP, filter_fn: Filter | None) -> Graph:
        return place(graph, config, filter_fn, head=lambda units: _agent_macs(units[0], config))

    def head_macs(self, site: Site) -> int:
        return _agent_macs(site.units[0], self.config)

    def begin(self, x_BCHW: Tensor) -> None:
        self._memory_BM = None

    def decide(self, site: Site, x_BIHW: Tensor) -> Decision:
        # The backbone learns from the task alone, so nothing goes back to it from here.
        seen_BM = self[site.name](x_BIHW.detach().flatten(2).mean(2))
        self._memory_BM = self.agent(seen_BM, self._memory_BM)
        self._worth_BA = self.agent.worth(self._memory_BM)
        action_B = self._worth_BA.detach().argmax(1)
        if self.training:
            drawn_B = torch.randint(self.config.parts, action_B.shape, device=action_B.device)
            action_B = torch.where(torch.rand(action_B.shape, device=action_B.device) < self.chance, drawn_B, action_B)
        return Decision(None, self.prefixes(site).to(x_BIHW)[action_B])

    def prefixes(self, site: Site) -> Tensor:
        """The mask of each action, (A, O): the first of equal parts, each action's part of the next one's."""
        upto_A = [-(-site.filters * (action + 1) // self.config.parts) for action in range(self.config.parts)]
        return torch.arange(site.filters) < torch.tensor(upto_A)[:, None]

    def observe(self, site: Site, decision: Decision, y_BOHW: Tensor) -> Tensor:
        return self._worth_BA

    def loss(self, step: Step) -> Tensor:
        worth_BSA = torch.stack([step.seen[name].float() for name in step.decisions], 1)
        action_BS = torch.stack([self._action(name, decision) for name, decision in step.decisions.items()], 1)
        task_B = F.cross_entropy(step.logits_BK.detach().float(), step.labelled("RNP"), reduction="none")
        task_B = task_B.clamp(max=math.log(step.logits_BK.shape[1]))  # worse than a guess is no worse than one
        target_BS = self.targets(worth_BSA.detach(), action_BS, task_B)
        taken_BS = worth_BSA.gather(2, action_BS[:, :, None])[:, :, 0]
        return F.smooth_l1_loss(taken_BS, target_BS, reduction="none").mean(0).sum()

    def _action(self, name: str, decision: Decision) -> Tensor:
        """Which of the nested masks was taken, (B,): the first that is as wide."""
        width_A = self.prefixes(self.sites[name]).sum(1).to(decision.mask.on.device)
        return torch.searchsorted(width_A, decision.mask.bits.sum(1))

    def targets(self, worth_BSA: Tensor, action_BS: Tensor, task_B: Tensor) -> Tensor:
        """What the actions taken should be worth, (B, S): their price, and the best that the next site promises.

        After the last site the task loss is all that comes. There is nothing to be earned, so a promise above 0 is an
        error of the agent, and counts as 0.
        """
        promised_BS = worth_BSA.amax(2)[:, 1:].clamp(max=0.0)
        price = self.config.price / max(1, worth_BSA.shape[1] * (self.config.parts - 1))
        return -price * action_BS + torch.cat([promised_BS, -self.config.blame * task_B[:, None]], 1)

    def on_epoch(self, epoch: int, epochs: int) -> None:
        done = min(1.0, epoch / self.config.exploring) if self.config.exploring else 1.0
        self.chance = 1.0 - (1.0 - self.config.explore) * done


def _agent_macs(unit: Unit, config: RNP) -> int:
    """MACs of one decision: what is seen, what is remembered, what actions are worth."""
    return config.memory * (unit.in_channels + config.memory + config.parts)
