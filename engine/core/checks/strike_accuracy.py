"""Checks in the victim's records that a fault struck at the action that its scenario names.

Rules: with `after`, the named action is the victim's last record before the strike. With `before` and `during`, it is
the action before the named one in the victim's program. A victim that ends at once records no later action, except the
action during which it was struck. A recovery changes the program, so from then on only the named action is checked. The
records of a victim on another host are there, and the time of a strike by another host is not that of this one: then
counts what the victim has told of its last action.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from engine.core.action import Op
from engine.core.checks.expectations import Check
from engine.core.config.initial_program import initial_program
from engine.core.config.job import Job
from engine.core.faults.fault import At, Fault, slot_owner
from engine.core.faults.fault_kind import AT_ONCE
from engine.core.history.process_records import HostRecord, RestartRecord, ResumedRecord
from engine.core.history.run_history import RunHistory
from engine.core.history.run_records import ActionRecord, FaultRecord


def strike_accuracy(job: Job, faults: Sequence[Fault], history: RunHistory) -> Iterator[Check]:
    """Yields the check that every fault with a named action struck the owner of the slot at that action.

    There is none if no such fault struck.
    """
    by_id = {fault.id: fault for fault in faults}
    wrong: list[str] = []
    number = 0
    for strike in history.of(FaultRecord):
        fault = by_id.get(strike.fault)
        if fault is None or not isinstance(fault.moment, At):
            continue
        victim = slot_owner(fault.moment.action)
        if victim not in fault.victims or strike.slot != (victim.pipeline, victim.stage):
            continue  # a further victim: only the owner is at the named action
        number += 1
        wrong += _misses(job, fault, fault.moment, strike, history)
    text = wrong[0] if wrong else f"{number} struck where the scenario says"
    if number:
        yield Check("precision", "failed" if wrong else "passed", text)


def _misses(job: Job, fault: Fault, moment: At, strike: FaultRecord, history: RunHistory) -> Iterator[str]:
    mine = [each for each in history.of(ActionRecord) if each.worker == strike.of]
    mine.sort(key=lambda each: each.end_ns)
    before = [(each.step, each.action) for each in mine if each.end_ns <= strike.at_ns]
    if strike.node and (strike.node, strike.pid) not in [(each.node, each.pid) for each in history.of(HostRecord)]:
        mine, before = [], [(strike.done_step, strike.done)] if strike.done else []
    restarts = (*history.of(RestartRecord), *history.of(ResumedRecord))
    until_ns = min(
        (each.at_ns for each in restarts if each.at_ns >= strike.at_ns), default=inf
    )  # then another process goes on as this worker
    later = [(each.step, each.action) for each in mine if strike.at_ns < each.end_ns <= until_ns]
    named = (moment.step, str(moment.action))
    victim = f"{fault.id}: worker {strike.of}"
    last = before[-1] if before else None
    if moment.when == "after" and moment.action.op is not Op.CHECKPOINT:
        if last != named:
            yield f"{victim} was to be struck after {_text(named)}, and had done {_text(last)} last"
    else:
        is_first = not any(each.epoch > 1 and each.at_ns <= strike.at_ns for each in history.epochs)
        expected = _previous(job, moment, strike.of) if is_first else None
        if named in before or (is_first and last != expected):
            yield (
                f"{victim} was to be struck {moment.when} {_text(named)}, and had done {_text(last)} last"
                + (f" instead of {_text(expected)}" if is_first else "")
            )
    allowed = [named] if moment.when == "during" else []
    if fault.do in AT_ONCE and later not in ([], allowed):
        yield f"{victim} was struck {moment.when} {_text(named)}, and went on to {_text(later[-1])}"


def _previous(job: Job, moment: At, worker: int) -> tuple[int, str] | None:
    """Returns (step, action) before the named one in a worker's program; it may be in the step before."""
    program, _ = initial_program(job)
    own = [str(action) for action in program[worker]]
    if moment.action.op is Op.CHECKPOINT:  # behind the last action of its step, and itself no record
        return moment.step, own[-1]
    place = own.index(str(moment.action))
    if place:
        return moment.step, own[place - 1]
    return (moment.step - 1, own[-1]) if moment.step else None


def _text(at: tuple[int, str] | None) -> str:
    return f"{at[1]} of step {at[0]}" if at else "nothing"
