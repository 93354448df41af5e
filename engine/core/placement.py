"""Placement: which stages of a pipeline stand on which of its workers, when each worker has several.

Rules: stages are dealt out in rounds of one per worker. `loop` deals every round in the order of the workers; `v` deals
every second round backwards, so that the stages on both sides of a turn are on one worker, and with two rounds so are
the first stage and the last.
"""

from __future__ import annotations

from typing import Literal

Placement = Literal["loop", "v"]
PlacementChoice = Literal["auto", "loop", "v"]  # auto: the one that the schedule wants


def worker_of(stage: int, num_workers: int, placement: Placement) -> int:
    """Returns the number, within its pipeline, of the worker that has `stage`."""
    turn, place = divmod(stage, num_workers)
    return num_workers - 1 - place if placement == "v" and turn % 2 else place


def stages_of(worker: int, num_workers: int, stages_per_worker: int, placement: Placement) -> tuple[int, ...]:
    """Returns the stages of a worker, in order."""
    every = range(num_workers * stages_per_worker)
    return tuple(stage for stage in every if worker_of(stage, num_workers, placement) == worker)
