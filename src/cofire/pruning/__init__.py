"""Static pruning: filters leave for good. Criterion, allocation, surgery and recovery are a file each.

A method of its own is one more file here: a config derived from `PruneConfig`, and a function that scores channels.
"""

from cofire.pruning.allocation import within_budget
from cofire.pruning.apply import prune
from cofire.pruning.base import (
    PruneConfig,
    allocations,
    prune_types,
    recoveries,
    register_allocation,
    register_criterion,
    register_recovery,
)
from cofire.pruning.channels import ChannelGroup, Channels
from cofire.pruning.cp import CP
from cofire.pruning.dcp import DCP
from cofire.pruning.eagleeye import EagleEye
from cofire.pruning.fpgm import FPGM
from cofire.pruning.l1 import L1
from cofire.pruning.pfp import PFP
from cofire.pruning.random import Random
from cofire.pruning.recovery import recalibrate
from cofire.pruning.scop import SCOP, register_knockoff
from cofire.pruning.sfp import SFP, SoftPruning
from cofire.pruning.taylor import Taylor
from cofire.pruning.thinet import ThiNet

Uniform = Random  # its name in 0.1

__all__ = [
    "CP",
    "DCP",
    "FPGM",
    "L1",
    "PFP",
    "SCOP",
    "SFP",
    "ChannelGroup",
    "Channels",
    "EagleEye",
    "PruneConfig",
    "Random",
    "SoftPruning",
    "Taylor",
    "ThiNet",
    "Uniform",
    "allocations",
    "prune",
    "prune_types",
    "recalibrate",
    "recoveries",
    "register_allocation",
    "register_criterion",
    "register_knockoff",
    "register_recovery",
    "within_budget",
]
