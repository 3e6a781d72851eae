"""A model as a graph of calls: which channels each passes on, what can be switched off, what it costs."""

from cofire.graph.cost import Cost, cost
from cofire.graph.graph import Graph, trace
from cofire.graph.units import Placement, Unit, Units

__all__ = ["Cost", "Graph", "Placement", "Unit", "Units", "cost", "trace"]
