"""Every name of `cofire` that needs PyTorch; imported when the first of them is asked for."""

from cofire import analysis, data, signatures, zoo
from cofire.backbones import (
    Backbone,
    create_backbone,
    list_backbones,
    load_weights,
    register_backbone,
)
from cofire.calibrate import calibrate
from cofire.comparison import Comparison, compare
from cofire.estimate import Estimate, Solution, estimate, solve_ratio
from cofire.evaluation import Report, evaluate
from cofire.files.card import Card
from cofire.gates.base import AbstractMethod, Decision, GateConfig, Step, register_method
from cofire.gates.blockdrop import BlockDrop
from cofire.gates.cgnet import CGNet
from cofire.gates.fbs import FBS
from cofire.gates.fixed import Fixed
from cofire.gates.ftwt import FTWT
from cofire.gates.ftwt_offline import fit_heads, static_twin
from cofire.gates.gating import GatedModel, gate, mask_loss
from cofire.gates.lccl import LCCL
from cofire.gates.lcs import LCS
from cofire.gates.per_group import AbstractGate, register_gate
from cofire.gates.persistence import load, save
from cofire.gates.rnp import RNP
from cofire.graph.cost import Cost, cost, expected_macs
from cofire.graph.graph import Graph, trace
from cofire.graph.masks import AbstractMask, BlockMask, FilterMask, PixelMask
from cofire.graph.units import Placement, Site, Unit, Units
from cofire.pruning import L1, PruneConfig, Random, Taylor, Uniform, prune, register_criterion
from cofire.runtime.quantized import Quantized, quantize
from cofire.second_look import SecondLook
from cofire.shift import Shift, shift
from cofire.speedup import Speedup, speedup
from cofire.training.callbacks import AbstractCallback
from cofire.training.loop import FitResult, fit
from cofire.training.recipe import Recipe
from cofire.trim import trim
