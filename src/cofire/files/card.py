"""A model's card: what it expects, and what is known of it. It travels in the model's ``config.json``."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass, field

from cofire.errors import ConfigError
from cofire.files.strict import check


@dataclass(frozen=True, kw_only=True)
class Card:
    """With it a model can be compiled, run and timed where its data set is not.

    Args:
        input_shape: (C, H, W) of an image.
        mean: of the normalisation of pixels in [0, 1], one value per channel.
        std: the same, above 0.
        classes: their names, in the order of the logits.
        data: the data set it was trained on.
        n: images it was tested on.
        top1: share of those that were right, in [0, 1].
        macs: MACs executed per image, mean over those.
        cofire: the version that wrote the card.
    """

    input_shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...] = ()
    data: str = ""
    n: int = 0
    top1: float | None = None
    macs: int | None = None
    cofire: str = field(default_factory=lambda: importlib.metadata.version("cofire"))

    def __post_init__(self) -> None:
        check(self)
        if min(self.input_shape) < 1:
            raise ConfigError(f"Card.input_shape must be (C, H, W), each at least 1, got {self.input_shape}")
        channels = self.input_shape[0]
        if len(self.mean) != channels or len(self.std) != channels or min(self.std) <= 0:
            raise ConfigError(
                f"Card.mean and Card.std must have a value for each of {channels} channels, std above 0, "
                f"got {self.mean} and {self.std}"
            )

    def __str__(self) -> str:
        shape = "x".join(map(str, self.input_shape))
        parts = [f"{shape} pixels in [0, 1], less {list(self.mean)}, over {list(self.std)}"]
        if self.classes:
            parts.append(f"{len(self.classes)} classes")
        if self.data:
            parts.append(f"trained on {self.data}")
        if self.top1 is not None:
            parts.append(f"top-1 {100 * self.top1:.2f} % on {self.n} images")
        if self.macs is not None:
            parts.append(f"{self.macs:,} MACs executed")
        return "; ".join(parts)
