"""See what the network does: decisions of a whole set, and what can be read off them.

``decisions.py`` collects.
"""

from cofire.analysis.decisions import Decisions, collect

__all__ = ["Decisions", "collect"]
