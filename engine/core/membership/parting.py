"""Parting: a worker that has given notice and cannot wait for the step boundary hands over inside the open step.

    running --HandOver--> failing over    its slots go to holders of whole replicas; it stays a member that owns none
            <--plan----                   it sends its accumulators, and the values that others lack
    running --Departure-> failing over    it leaves; no value is lost with it

Rules: both are epochs like that of a verdict, but the worker still answers, so no backward is run again. Until it
leaves it is a shadow: if an heir dies first, no state is lost. It leaves at a boundary as ever, or before the end of
its grace. If it dies meanwhile, that is a failure as ever.
"""

from __future__ import annotations

from engine.core.exclusion import Cause, excluded
from engine.core.membership import events
from engine.core.membership.rule import rule
from engine.core.membership.state import Phase, State
from engine.core.membership.verdicts import new_epoch


@rule(Phase.FAILING_OVER)
def hands_over(state: State, event: events.HandOver) -> State:
    """Makes an epoch in the open step after which a leaving worker owns no slot that another holds."""
    worker = event.worker
    if worker not in state.members or worker not in state.leaving or worker in state.going:
        return state
    new = state._replace(going=(*state.going, worker))
    return new_epoch(new, event.now_ns, (), f"worker {worker} hands over inside step {state.committed + 1}")


@rule(Phase.FAILING_OVER)
def departs(state: State, event: events.Departure) -> State:
    """Lets a worker that owns no slot leave the open step."""
    worker = event.worker
    if worker not in state.members or worker not in state.leaving or worker in state.owners:
        return state
    left = excluded(worker, Cause.LEFT, f"has left inside step {state.committed + 1}")
    return new_epoch(state._replace(exited=(*state.exited, worker)), event.now_ns, [left])
