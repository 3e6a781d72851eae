"""Many methods at one budget, from one baseline, under one recipe."""

from cofire.comparison.compare import compare
from cofire.comparison.contenders import contenders
from cofire.comparison.table import Comparison

__all__ = ["Comparison", "compare", "contenders"]
