"""See what the network does: decisions of a whole set, what can be read off them, figures, one report page.

``decisions.py`` collects; ``routes.py``, ``spending.py``, ``responses.py``, ``tradeoff.py`` and ``compressibility.py``
give arrays; ``figures.py`` draws them; ``study.py`` does all of it for a run and ``page.py`` makes a page of that.
"""

from cofire.analysis.compressibility import Compressibility, compressibility, spearman
from cofire.analysis.decisions import Decisions, collect
from cofire.analysis.responses import Heatmaps, Responses, heatmaps, model_units, responses
from cofire.analysis.routes import (
    Agreement,
    GroupRoutes,
    agreement,
    core_filters,
    redundancy,
    routes,
    silent_filters,
)
from cofire.analysis.spending import ClassSpending, extremes, shares, spending_per_class
from cofire.analysis.tradeoff import Foretold, Point, foretold, paper_points, points

__all__ = [
    "Agreement",
    "ClassSpending",
    "Compressibility",
    "Decisions",
    "Foretold",
    "GroupRoutes",
    "Heatmaps",
    "Point",
    "Responses",
    "agreement",
    "collect",
    "compressibility",
    "core_filters",
    "extremes",
    "foretold",
    "heatmaps",
    "model_units",
    "paper_points",
    "points",
    "redundancy",
    "responses",
    "routes",
    "shares",
    "silent_filters",
    "spearman",
    "spending_per_class",
]
