"""What actions and transfers cost, read off the events of a benchmark, and how long a schedule then takes in a dry run.

Rules: what computes or sends costs what it took on average in the iteration that is judged, per op and stage; a receive
costs what those took that found their value there. An action lasts until the next of its worker begins: to record it is
part of it. How long a value is under way is read off another iteration, next to that one, in which a single microbatch
goes through all stages, so that whoever receives has long been waiting. Nothing is read off how long workers waited in
the iteration that is judged, nor off its length.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from engine.core.action import RECEIVE_OPS, SEND_OPS, Action, Op
from engine.core.ownership import Ownership
from engine.core.program.build import Program
from engine.core.program.dependencies import carried
from engine.core.program.dry_run import Cost, dry_run

_SURELY_THERE_NS = 1_000_000  # a value, this long after the end of its SEND


class Done(NamedTuple):
    """An action that a worker has run."""

    action: Action
    start_ns: int
    end_ns: int


Iteration = Mapping[int, Sequence[Done]]  # worker -> what it has run, in order of their ends


def lasting(done: Sequence[Done], end_ns: int) -> list[Done]:
    """Returns what a worker has run, each until the next begins or the iteration ends; a pair may run at once."""
    nexts_ns = [*(each.start_ns for each in done[1:]), end_ns]
    return [each._replace(end_ns=max(each.end_ns, next_ns)) for each, next_ns in zip(done, nexts_ns, strict=True)]


def predicted_seconds(
    program: Program, ownership: Ownership, judged: Iteration, lone: Iteration, overlapping: bool = False
) -> float:
    """Returns how long the dry run of `program` takes with what an iteration of it cost.

    `lone` is an iteration with one microbatch; of its transfers those count that somebody waited for.
    """
    ready_ns = [
        receive.end_ns - receive.start_ns
        for receive, sent_ns in _receives(judged)
        if receive.start_ns > sent_ns + _SURELY_THERE_NS
    ]
    hops_ns = [receive.end_ns - sent_ns for receive, sent_ns in _receives(lone) if receive.start_ns < sent_ns]
    receive_s = fmean(ready_ns) / 1e9 if ready_ns else 0.0
    latency_s = max(0.0, fmean(hops_ns) / 1e9 - receive_s)
    costs = _costs(judged, receive_s)
    return dry_run(program, ownership, costs, overlapping=overlapping, latency=latency_s).makespan


def _receives(iteration: Iteration) -> list[tuple[Done, int]]:
    """Returns each receive, with the end of its SEND."""
    done = [each for line in iteration.values() for each in line]
    sent_ns = {carried(each.action): each.end_ns for each in done if each.action.op in SEND_OPS}
    return [(each, sent_ns[carried(each.action)]) for each in done if each.action.op in RECEIVE_OPS]


def _costs(iteration: Iteration, receive_s: float) -> Cost:
    """Returns what an action costs, in seconds: the mean over those of its op and stage."""
    taken_ns: defaultdict[tuple[Op, int], list[int]] = defaultdict(list)
    for line in iteration.values():
        for action, start_ns, end_ns in line:
            taken_ns[action.op, action.stage].append(end_ns - start_ns)
    seconds = {key: receive_s if key[0] in RECEIVE_OPS else fmean(each) / 1e9 for key, each in taken_ns.items()}
    return lambda action: seconds[action.op, action.stage]
