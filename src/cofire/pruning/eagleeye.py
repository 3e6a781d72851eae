"""EagleEye: how much each group keeps is searched (Li et al. 2020, "EagleEye: fast sub-net evaluation").

Random signatures of the wanted cost are tried: filters leave by their weights, batch norms are measured anew, and the
candidate that does best on held-out images wins. Measured norms are what makes the comparison fair before training.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cofire.data.feeding import AnyLoader, feed
from cofire.data.images import Batch
from cofire.errors import ConfigError, DataError
from cofire.graph.tracing import evaluating
from cofire.pruning.allocation import shares, within_budget
from cofire.pruning.base import Masks, PruneConfig, Scores, register_allocation, register_criterion
from cofire.pruning.channels import Channels
from cofire.pruning.l1 import l1_scores
from cofire.pruning.recovery import recalibrate
from cofire.pruning.surgery import cut

_EACH = 4  # of so many batches one is held out


@dataclass(frozen=True, kw_only=True)
class EagleEye(PruneConfig):
    """A channel's score is that of `L1`; the signature is the best of some random ones.

    Args:
        candidates: how many are tried, at least 1.
        least: the smallest share a group keeps beside one that keeps all, in (0, 1], before the budget is met.
        seed: of the draw.
    """

    allocation: str = "search"
    recovery: str = "norms"
    candidates: int = 20
    least: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.candidates < 1:
            raise ConfigError(f"EagleEye.candidates must be at least 1, got {self.candidates}")
        if not 0.0 < self.least <= 1.0:
            raise ConfigError(f"EagleEye.least must be in (0, 1], got {self.least}")


register_criterion(EagleEye)(l1_scores)


@register_allocation("search")
def search(
    model: nn.Module, channels: Channels, loader: AnyLoader | None, config: PruneConfig, scores: Scores
) -> Masks:
    """The candidate that does best; for other methods' scores with EagleEye's defaults."""
    options = config if isinstance(config, EagleEye) else EagleEye(macs=config.macs)
    if loader is None:
        raise DataError("a search needs labelled images: prune(model, EagleEye(...), loader)")
    batches = list(feed(loader))
    held_out = max(1, len(batches) // _EACH)
    seen = batches[:-held_out] or batches
    tried = candidates(channels, scores, options)
    return max(tried, key=lambda masks: quality(model, channels, masks, seen, batches[-held_out:]))


def candidates(channels: Channels, scores: Scores, config: EagleEye) -> list[Masks]:
    """Random signatures of the wanted cost, each with the best channels of every group."""
    generator = torch.Generator().manual_seed(config.seed)
    ranks = shares(scores)
    found: list[Masks] = []
    for _ in range(config.candidates):
        share_G = config.least + (1 - config.least) * torch.rand(len(ranks), generator=generator)
        # A group keeps ranks above 1 - t * share; t follows from the budget.
        tilted = {name: (rank_O - 1) / share for (name, rank_O), share in zip(ranks.items(), share_G, strict=True)}
        found.append(within_budget(tilted, config.macs, channels.remaining))
    return found


@torch.no_grad()
def quality(
    model: nn.Module, channels: Channels, masks: Masks, seen: list[Batch], held_out: list[Batch]
) -> tuple[float, float]:
    """Top-1 on held-out images once norms have been measured on others, and minus the loss, for equal ones."""
    smaller = cut(model, channels, masks, check=False)
    recalibrate(smaller, seen, text="")
    device = next(smaller.parameters()).device
    right, loss, count = 0, 0.0, 0
    with evaluating(smaller):
        for x_BCHW, label_B in held_out:
            if label_B is None:
                raise DataError("a search needs labelled images, got unlabelled ones")
            logits_BK: Tensor = smaller(x_BCHW.to(device)).cpu()
            right += int((logits_BK.argmax(1) == label_B).sum())
            loss += float(F.cross_entropy(logits_BK, label_B, reduction="sum"))
            count += len(label_B)
    return right / count, -loss / count
