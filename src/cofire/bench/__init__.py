"""How fast is it, against whom? Interleaved timings of our engine and of every other that is installed.

``rounds.py`` times; ``masks.py`` makes random masks of a wanted cost; ``peers.py`` builds the other engines,
``sliced.py`` the paper's way; ``run.py`` puts them together; ``report.py`` shows what came out.
"""

from cofire.bench.peers import COMPILED, PEERS, Peer
from cofire.bench.plan import Plan, own_plan, random_plan
from cofire.bench.program import ProgramResult, bench_program
from cofire.bench.results import MeasuredCost, Result, Timed
from cofire.bench.run import bench, bench_runs

Point = MeasuredCost  # its name in 0.1

__all__ = [
    "COMPILED",
    "PEERS",
    "MeasuredCost",
    "Peer",
    "Plan",
    "Point",
    "ProgramResult",
    "Result",
    "Timed",
    "bench",
    "bench_program",
    "bench_runs",
    "own_plan",
    "random_plan",
]
