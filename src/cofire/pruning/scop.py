"""SCOP: scientific control for reliable pruning (Tang et al. 2020).

Beside each image runs a knock-off, which looks like one but says nothing of the label. Every channel is mixed,
``beta * real + (1 - beta) * knock-off``, and only the betas learn. Where the knock-off serves as well, the channel
can go.

Shapes: B images, O channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cofire.data.feeding import AnyLoader, feed
from cofire.errors import ConfigError, DataError, unknown
from cofire.graph.tracing import evaluating
from cofire.pruning.base import PruneConfig, register_criterion
from cofire.pruning.channels import Channels, ids
from cofire.pruning.probe import Change, Probe, spread

Knockoff = Callable[[Tensor, torch.Generator], Tensor]
"""(images (B, C, H, W), generator) -> as many others of the same shape."""

_knockoffs: dict[str, Knockoff] = {}


def register_knockoff(name: str) -> Callable[[Knockoff], Knockoff]:
    """Decorator: ``make(x_BCHW, generator) -> x_BCHW`` is chosen by ``SCOP(knockoff=name)``: a trained network, say."""
    if name in _knockoffs:
        raise ConfigError(f"a knock-off named {name!r} is registered already")

    def register(make: Knockoff) -> Knockoff:
        _knockoffs[name] = make
        return make

    return register


@register_knockoff("permuted")
def permuted(x_BCHW: Tensor, generator: torch.Generator) -> Tensor:
    """The images of others."""
    return x_BCHW[torch.randperm(len(x_BCHW), generator=generator)]


@register_knockoff("gaussian")
def gaussian(x_BCHW: Tensor, generator: torch.Generator) -> Tensor:
    """Noise with the mean and deviation of each pixel over the batch."""
    noise = torch.randn(x_BCHW.shape, generator=generator).to(x_BCHW)
    return x_BCHW.mean(0) + x_BCHW.std(0, correction=0) * noise


@dataclass(frozen=True, kw_only=True)
class SCOP(PruneConfig):
    """A channel's score is ``|gamma| * (2 * beta - 1)``, with gamma the scale of the norm behind its filter.

    Args:
        knockoff: where knock-offs come from: ``permuted``, ``gaussian``, or one of `register_knockoff`. The paper
            trains a generator.
        epochs: passes over the loader in which betas learn, at least 1.
        lr: of Adam, above 0.
        seed: of the knock-offs.
    """

    recovery: str = "norms"
    knockoff: str = "permuted"
    epochs: int = 5
    lr: float = 0.004
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.knockoff not in _knockoffs:
            raise unknown("knock-off", self.knockoff, _knockoffs)
        if self.epochs < 1 or self.lr <= 0:
            raise ConfigError(f"SCOP needs epochs of at least 1 and lr above 0, got {self.epochs} and {self.lr}")


@register_criterion(SCOP)
def scop_scores(model: nn.Module, channels: Channels, loader: AnyLoader | None, config: SCOP) -> dict[str, Tensor]:
    """Group -> (O,) float64."""
    if loader is None:
        raise DataError("SCOP needs labelled images: prune(model, SCOP(...), loader)")
    beta_F = trained_betas(model, channels, loader, config)
    score_F = norm_scales(model, channels) * (2 * beta_F - 1)
    return dict(zip(channels.sizes, score_F.split(list(channels.sizes.values())), strict=True))


def trained_betas(model: nn.Module, channels: Channels, loader: AnyLoader, config: SCOP) -> Tensor:
    """Each channel's beta in [0, 1], float64 (F,) over all groups; they start at a half."""
    like = next(model.parameters())
    beta_F = torch.full((sum(channels.sizes.values()),), 0.5, device=like.device, dtype=like.dtype, requires_grad=True)
    optimizer = torch.optim.Adam([beta_F], lr=config.lr, betas=(0.5, 0.9))
    generator = torch.Generator().manual_seed(config.seed)
    probe = Probe(model, channels, mixed(channels, beta_F))
    with evaluating(model):
        for _ in range(config.epochs):
            for x_BCHW, label_B in feed(loader, "training betas"):
                if label_B is None:
                    raise DataError("SCOP needs labelled images, got unlabelled ones")
                knockoff_BCHW = made(config.knockoff, x_BCHW, generator)
                logits: Tensor = probe.run(torch.cat([x_BCHW, knockoff_BCHW]).to(like.device))
                loss = F.cross_entropy(logits[: len(x_BCHW)], label_B.to(like.device))
                (beta_F.grad,) = torch.autograd.grad(loss, [beta_F])
                optimizer.step()
                with torch.no_grad():
                    beta_F.clamp_(0, 1)
    return beta_F.detach().double().cpu()


@torch.no_grad()
def made(knockoff: str, x_BCHW: Tensor, generator: torch.Generator) -> Tensor:
    """A batch's knock-offs, by the maker of this name."""
    found = _knockoffs[knockoff](x_BCHW, generator)
    if found.shape != x_BCHW.shape:
        wanted, got = tuple(x_BCHW.shape), tuple(found.shape)
        raise DataError(f"the knock-off {knockoff!r} must make images of shape {wanted}, got {got}")
    return found


def mixed(channels: Channels, beta_F: Tensor) -> Change:
    """The change that mixes the first half of a batch with the second, channel by channel."""
    reads = {op.conv.module: channels.channel_of[ids(op.reads[0])] for op in channels.graph.ops if op.conv and op.reads}
    grouped = {op.conv.module for op in channels.graph.ops if op.conv and op.conv.groups > 1}

    def change(layer: str, x: Tensor) -> Tensor:
        if layer in grouped or layer not in reads:
            return x
        beta_I = torch.cat([beta_F, beta_F.new_ones(1)])[reads[layer].to(x.device)]
        beta = spread(beta_I[None], x, last=layer in channels.linear)
        real, knockoff = x.chunk(2)
        return torch.cat([beta * real + (1 - beta) * knockoff, knockoff])

    return change


def norm_scales(model: nn.Module, channels: Channels) -> Tensor:
    """The mean absolute scale of the norms that a channel passes, float64 (F,); 1 where there is none."""
    total_F = torch.zeros(sum(channels.sizes.values()), dtype=torch.float64)
    count_F = torch.zeros_like(total_F)
    for op in channels.graph.ops:
        if op.kind != "norm" or op.name not in channels.called:
            continue
        gamma = dict(model.get_submodule(channels.called[op.name]).named_parameters()).get("weight")
        channel_C = channels.channel_of[ids(op.own)]
        mine = channel_C >= 0
        if gamma is not None and len(gamma) == len(channel_C):
            total_F.index_add_(0, channel_C[mine], gamma.detach().double().cpu().abs()[mine])
            count_F.index_add_(0, channel_C[mine], torch.ones(int(mine.sum()), dtype=torch.float64))
    return torch.where(count_F > 0, total_F / count_F.clamp(min=1), 1.0)
