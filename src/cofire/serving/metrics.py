"""What a server counts, as Prometheus reads it: plain text, one line per number."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from cofire.runtime.observed import Observed

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
MEMORY = 1000.0  # images after which the share of an old one in the drift has fallen to 1 / e


class Metrics:
    """The counts of one model; calls may come from several threads."""

    def __init__(self, observed: Observed | None) -> None:
        self._lock = threading.Lock()
        self._statuses: Counter[int] = Counter()
        self._buckets = [0] * (len(BUCKETS) + 1)
        self._seconds = 0.0
        self._images = self._macs = 0
        self._rates = {name: np.array(rates) for name, rates in (observed.rates if observed else {}).items()}
        self._seen = {name: rate_O.copy() for name, rate_O in self._rates.items()}

    def request(self, status: int, seconds: float) -> None:
        """A request was answered."""
        with self._lock:
            self._statuses[status] += 1
            self._buckets[bisect_left(BUCKETS, seconds)] += 1
            self._seconds += seconds

    def images(self, macs_B: NDArray[np.int64], masks: dict[str, NDArray[np.bool_]]) -> None:
        """Images were answered, by so many MACs and these masks, group -> (B, O)."""
        old = float(np.exp(-len(macs_B) / MEMORY))
        with self._lock:
            self._images += len(macs_B)
            self._macs += int(macs_B.sum())
            for name, seen_O in self._seen.items():
                seen_O += (1 - old) * (masks[name].mean(0) - seen_O)

    def drift(self) -> float | None:
        """Mean distance of the filters' rates from the observed ones, in [0, 1]; None where none were observed."""
        if not self._rates:
            return None
        with self._lock:
            return float(np.mean(np.concatenate([abs(self._seen[name] - self._rates[name]) for name in self._rates])))

    def lines(self, model: str) -> dict[str, list[str]]:
        """Metric -> its lines."""
        label, drift = f'model="{_escaped(model)}"', self.drift()
        with self._lock:
            counts = np.cumsum(self._buckets).tolist()
            limits = [*map(str, BUCKETS), "+Inf"]
            return {
                "cofire_requests_total": [
                    f'cofire_requests_total{{{label},status="{status}"}} {count}'
                    for status, count in sorted(self._statuses.items())
                ],
                "cofire_request_seconds": [
                    *(
                        f'cofire_request_seconds_bucket{{{label},le="{limit}"}} {count}'
                        for limit, count in zip(limits, counts, strict=True)
                    ),
                    f"cofire_request_seconds_sum{{{label}}} {self._seconds:.6f}",
                    f"cofire_request_seconds_count{{{label}}} {counts[-1]}",
                ],
                "cofire_images_total": [f"cofire_images_total{{{label}}} {self._images}"],
                "cofire_macs_total": [f"cofire_macs_total{{{label}}} {self._macs}"],
                "cofire_mask_drift": [] if drift is None else [f"cofire_mask_drift{{{label}}} {drift:.6f}"],
            }


KINDS = {
    "cofire_requests_total": ("counter", "Requests answered, by status."),
    "cofire_request_seconds": ("histogram", "From a request's arrival to its answer."),
    "cofire_images_total": ("counter", "Images answered."),
    "cofire_macs_total": ("counter", "MACs executed for them; divided by the images: MACs per answer."),
    "cofire_mask_drift": ("gauge", "Mean distance of each filter's rate from the one observed on known images."),
}


def exposition(models: dict[str, Metrics]) -> str:
    """The page that Prometheus reads."""
    lines: list[str] = []
    told = [metrics.lines(model) for model, metrics in models.items()]
    for name, (kind, text) in KINDS.items():
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *(line for each in told for line in each[name])]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
