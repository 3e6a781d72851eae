"""From a trained network and some pictures without labels to a faster program; nothing is trained unless asked for."""

from cofire.speedup.measure import Speedup
from cofire.speedup.whole import speedup

__all__ = ["Speedup", "speedup"]
