"""Placement: the worker of each stage of a pipeline when each worker has several stages.

Stages are dealt out in rounds of one per worker. `loop` deals every round in the order of the workers, `v` deals every
second round backwards. Six stages on three workers:

              loop       v
    worker 0  0 3        0 5
    worker 1  1 4        1 4
    worker 2  2 5        2 3
"""

from __future__ import annotations

from typing import Literal

Placement = Literal["loop", "v"]
PlacementChoice = Literal["auto", "loop", "v"]  # auto: the placement of the schedule


def worker_of(stage: int, num_workers: int, placement: Placement) -> int:
    """Returns the number, within its pipeline, of the worker that has `stage`."""
    turn, place = divmod(stage, num_workers)
    return num_workers - 1 - place if placement == "v" and turn % 2 else place
