"""fit(): one training loop for plain and gated models, its recipe, its log and its checkpoints."""

from cofire.training.loop import EpochRecord, FitResult, fit
from cofire.training.recipe import Recipe

__all__ = ["EpochRecord", "FitResult", "Recipe", "fit"]
