"""A recipe for `cofire compare`."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from cofire import (
    save,
)

RECIPE = """
[data]
name = "digits"
batch_size = 128
val = 200

[backbone]
name = "resnet8_digits"
weights = "{weights}"

[train]
epochs = 1
lr = 0.02
distill = 0.5
schedule = "cosine"
"""


def write_recipe(folder: Path, model: nn.Module) -> Path:
    """With ``model`` as its baseline."""
    save(model, folder / "dense")
    path = folder / "tiny.toml"
    path.write_text(RECIPE.format(weights=folder / "dense"))
    return path
