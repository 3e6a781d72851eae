"""A short bench, with PyTorch in place of our engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from cofire import GatedModel
from cofire.bench import PEERS, Peer, Plan, Result, bench, random_plan


class StubEngine:
    """PyTorch behind the interface of our engine; remembers whether heads were asked for."""

    def __init__(self, model: nn.Module, input_shape: tuple[int, int, int]) -> None:
        self.model, self.input_shape = model.eval(), input_shape
        self.heads: list[bool] = []
        self.last_macs: dict[str, Any] = {}
        self.last_masks: dict[str, Any] = {}

    @torch.no_grad()
    def __call__(self, x: Any, threads: int = 1) -> Any:
        logits = self.model(torch.as_tensor(x))
        if isinstance(self.model, GatedModel):
            self.last_macs = {name: macs.numpy() for name, macs in self.model.cost().executed.items()}
            self.last_masks = {group: mask.numpy() for group, mask in self.model.masks.items()}
        return logits

    @contextmanager
    def force(self, masks: Mapping[str, Any], *, heads: bool = False) -> Iterator[None]:
        assert isinstance(self.model, GatedModel)
        self.heads.append(heads)
        with self.model.force({group: torch.as_tensor(mask) for group, mask in masks.items()}):
            yield


def small_bench(plan: Plan | None = None, peers: tuple[Peer, ...] = PEERS[:1], **options: Any) -> Result:
    plan = plan or random_plan("resnet8_digits", macs=[0.5, 0.7])
    options = {"rounds": 3, "warm_up": 1, "compile": StubEngine, "text": "", **options}
    return bench(plan, peers=peers, **options)
