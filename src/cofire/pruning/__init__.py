"""Static pruning: filters leave for good. Criterion, allocation, surgery and recovery are a file each.

A method of its own is one more file here: a config derived from `PruneConfig`, and a function that scores filters.
"""

from cofire.pruning.apply import prune
from cofire.pruning.base import PruneConfig, prune_types, register_criterion
from cofire.pruning.l1 import L1
from cofire.pruning.taylor import Taylor
from cofire.pruning.uniform import Uniform

__all__ = ["L1", "PruneConfig", "Taylor", "Uniform", "prune", "prune_types", "register_criterion"]
