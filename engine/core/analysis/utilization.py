"""Utilization of the workers in a dry run: the share of idle time, and the number of residuals over time."""

from __future__ import annotations

from engine.core.action import COMPUTE_OPS
from engine.core.program.dry_run import DryRun, stash_after

Curve = list[tuple[float, int]]  # (time, number of residuals from then on)


def bubbles(run: DryRun) -> dict[int, float]:
    """Returns for each worker the share of the dry run in which it does not compute."""
    busy = dict.fromkeys(run.peak_stash, 0.0)
    for start, end, worker, action in run.spans:
        if action.op in COMPUTE_OPS:
            busy[worker] += end - start
    return {worker: 1.0 - taken / run.makespan if run.makespan else 0.0 for worker, taken in busy.items()}


def stash_curves(run: DryRun) -> dict[int, Curve]:
    """Returns the number of residuals of each worker over time: a forward's end adds one, its backward's end takes one.

    A curve goes from 0 to the end of the run and has a point at each change.
    """
    curves: dict[int, Curve] = {worker: [(0.0, 0)] for worker in run.peak_stash}
    for worker, curve in curves.items():
        spans = [span for span in run.spans if span.worker == worker]
        for span, stashed in zip(spans, stash_after([span.action for span in spans]), strict=True):
            if stashed != curve[-1][1]:
                curve.append((span.end, stashed))
        curve.append((run.makespan, curve[-1][1]))
    return curves
