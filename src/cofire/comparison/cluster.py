"""The jobs of a comparison on a Ray cluster: one task each, on storage that all nodes share.

Ray places tasks and starts those of a lost worker elsewhere; there the job finds its folder and goes on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from cofire.comparison.jobs import Job, Outcome, carry_out
from cofire.errors import ConfigError
from cofire.extras import require

_RETRIES = -1  # a worker may be lost any number of times


def on_ray(jobs: Sequence[Job], threads: int) -> Iterator[tuple[Job, Outcome]]:
    """Each job with its outcome, as they end; the cluster is the one of $RAY_ADDRESS.

    Args:
        threads: cores of a task.
    """
    ray = require("ray", "Ray", "cluster")
    if not (address := os.environ.get("RAY_ADDRESS")):
        raise ConfigError("--on ray needs the address of a cluster in the environment: RAY_ADDRESS=HOST:PORT")
    joined = not ray.is_initialized()
    if joined:
        ray.init(address=address, logging_level="warning", log_to_driver=False)
    try:
        task = ray.remote(num_cpus=threads, max_retries=_RETRIES)(_waiting)
        running = {task.remote(job): job for job in jobs}
        while running:
            (ended,), _ = ray.wait(list(running), num_returns=1)
            yield running.pop(ended), ray.get(ended)
    finally:
        if joined:
            ray.shutdown()


def _waiting(job: Job) -> Outcome:
    """Another worker may still hold the folder: one that Ray has given up but that is not quite dead."""
    return carry_out(job, wait=True)
