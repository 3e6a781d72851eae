"""What a network does when images get worse: accuracy, calibration, cost, and how far its masks move."""

from cofire.shift.calibration import brier, calibration_error
from cofire.shift.corruptions import Corruption, Pictures, corruption, list_corruptions, register_corruption
from cofire.shift.drift import Drift, drift
from cofire.shift.loading import ShiftedLoader
from cofire.shift.measure import shift
from cofire.shift.plot import plot
from cofire.shift.results import AtSeverity, Shift

Point = AtSeverity  # its name in 0.1

__all__ = [
    "AtSeverity",
    "Corruption",
    "Drift",
    "Pictures",
    "Point",
    "Shift",
    "ShiftedLoader",
    "brier",
    "calibration_error",
    "corruption",
    "drift",
    "list_corruptions",
    "plot",
    "register_corruption",
    "shift",
]
