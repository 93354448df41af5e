"""Fault injection as a pure machine: it finds moment and victims of each fault, strikes them, and confirms the strike.

    cause strikes --> moment of the fault --> records --> signal, or InflictMessage --> sign of every victim: confirmed

Each public function handles one kind of input: it returns the injection after it, and the outputs in their order.

Rules: a fault is recorded before it strikes. It strikes once, and its victims are chosen at the strike. It is confirmed
by a sign of its kind from every victim. A fault without this confirmation is recorded at the end of the run as
unconfirmed, because its case proves nothing. Late work is done in the order of its times: a look for a stop comes
before the end of the stop. A worker that has ended gives no sign and gets no signal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

from engine.core.action import Op
from engine.core.checkpoints.keeping import writers
from engine.core.faults.fault import After, At, Fault, RecoveryPhase, slot_owner, to_plain
from engine.core.faults.fault_kind import Sign
from engine.core.faults.injection_state import (
    Injection,
    InjectionOutput,
    LateWork,
    LookAtVictim,
    RecordFault,
    SendSignal,
    StruckFault,
    TellOfFault,
    ToldMoment,
    Victims,
    find_victims,
)
from engine.core.history.run_records import UnconfirmedRecord
from engine.core.membership.state import State
from engine.core.messages import ArmMessage, FiredMessage, InflictMessage
from engine.core.ownership import Ownership, Slot

_LOOK_EVERY_NS = 5_000_000  # between two looks at the state of a process

Moved = tuple[Injection, tuple[InjectionOutput, ...]]


class Now(NamedTuple):
    """The time of the coordinator's clock, and the state of the membership protocol."""

    now_ns: int
    state: State


def add(old: Injection, now: Now, faults: tuple[Fault, ...]) -> Moved:
    """Adds faults that were requested while the job runs; their ids are new."""
    message = ArmMessage(tuple(to_plain(fault) for fault in faults))
    return old._replace(waiting=old.waiting + faults), (TellOfFault(message),)


def reach(old: Injection, now: Now, phase: RecoveryPhase, epoch: int) -> Moved:
    """Handles the begin of a phase of the recovery that leads to `epoch`."""
    due = [fault for fault, cause in _after(old, phase) if epoch > cause.epoch]
    new, outputs = _schedule(old, now, due)
    if phase != "agree":
        return new, outputs
    new, more = reach(new, now, "detect", epoch)  # for a worker that is out while its process lives
    return new, outputs + more


def _after(injection: Injection, phase: RecoveryPhase | None) -> list[tuple[Fault, StruckFault]]:
    """Returns (fault, cause) of the faults that wait for a phase of the recovery from a fault that has struck."""
    causes = {each.fault.id: each for each in injection.struck}
    return [
        (fault, causes[fault.moment.fault])
        for fault in injection.waiting
        if isinstance(fault.moment, After)
        and fault.moment.phase == phase
        and fault.moment.fault in causes
        and fault.id not in injection.scheduled
    ]


def _schedule(old: Injection, now: Now, faults: Iterable[Fault]) -> Moved:
    """Strikes with faults whose moment has come, each after its delay."""
    outputs: tuple[InjectionOutput, ...] = ()
    for fault in faults:
        delay_ns = fault.moment.delay_ns if isinstance(fault.moment, After) else 0
        old = old._replace(scheduled=old.scheduled | {fault.id})
        if delay_ns:
            old = old._replace(late=(*old.late, LateWork(now.now_ns + delay_ns, fault.id)))
        else:
            old, more = strike(old, now, fault.id)
            outputs += more
    return old, outputs


def arm_merged(old: Injection, now: Now, positions: Mapping[int, tuple[int, str]]) -> Moved:
    """Tells the heirs to report the moment at which they have redone the lost work of a fault's victim.

    The plan of an epoch is about to run; `positions` are the last step and action of each worker.
    """
    outputs: tuple[InjectionOutput, ...] = ()
    state = now.state
    for fault, cause in _after(old, "merged"):
        slot = cause.slot
        at = positions.get(cause.before.owner(*slot)) if slot is not None else None
        if state.epoch <= cause.epoch or slot is None or at is None:
            continue
        points = old.catch_up(old.job, cause.before, slot, at, state.committed + 1)
        if points:
            armed = tuple(to_plain(replace(fault, moment=point)) for point in points)
            outputs += (TellOfFault(ArmMessage(armed), state.owners[old.grid.place(slot)]),)
        else:
            old, more = _schedule(old, now, [fault])
            outputs += more
    return old, outputs


def strike(old: Injection, now: Now, fault_id: str, told: ToldMoment | None = None) -> Moved:
    """Records a fault and strikes all its victims; one that has struck before does not hold up the worker that told."""
    fault = next((each for each in old.waiting if each.id == fault_id), None)
    if fault is None:
        return old, () if told is None else (TellOfFault(FiredMessage(fault_id), told.worker),)
    state, kind = now.state, old.kinds[fault.do]
    victims = _victims(old, fault, state)
    before = Ownership(old.grid, state.owners, state.shadows)
    missing = frozenset(worker for worker, _ in victims)
    struck = StruckFault(fault, kind, kind.with_defaults(fault.parameters), state.epoch, victims, before, missing)
    waiting = tuple(each for each in old.waiting if each.id != fault_id)
    new = old._replace(waiting=waiting, struck=(*old.struck, struck))
    outputs: tuple[InjectionOutput, ...] = tuple(map(RecordFault, struck.records(state, told)))
    for worker, slot in victims:
        if worker not in old.ended:
            new, more = _hit(new, now.now_ns, struck, worker, slot)
            outputs += more
    outputs += (TellOfFault(FiredMessage(fault.id)),)
    new, more = _schedule(new, now, [each for each, cause in _after(new, None) if cause.fault.id == fault_id])
    return new, outputs + more


def _victims(injection: Injection, fault: Fault, state: State) -> Victims:
    if isinstance(fault.moment, At):
        action = fault.moment.action
        slot = (action.pipeline, action.stage)
        if action.op is Op.CHECKPOINT and fault.victims == (slot_owner(action),):
            ownership = Ownership(injection.grid, state.owners, state.shadows)
            return ((writers(ownership)[action.stage][0], slot),)
        return find_victims(fault.victims, injection.grid, state, slot, ())
    cause_id = fault.moment.fault
    cause = next(each for each in injection.struck if each.fault.id == cause_id)
    return find_victims(fault.victims, injection.grid, state, cause.slot, cause.workers)


def _hit(old: Injection, now_ns: int, struck: StruckFault, worker: int, slot: Slot | None) -> Moved:
    """Carries out a fault on one victim that lives."""
    if struck.kind.by == "worker":
        fault = struck.fault
        return old, (TellOfFault(InflictMessage(fault.id, fault.do, dict(struck.parameters), slot), worker),)
    signals = struck.kind.signals(struck.parameters)
    late = tuple(LateWork(now_ns + each.after_ns, SendSignal(worker, each.number)) for each in signals if each.after_ns)
    sent = tuple(SendSignal(worker, each.number) for each in signals if not each.after_ns)
    return old._replace(late=old.late + late), (*sent, LookAtVictim(worker))


def do_late_work(old: Injection, now: Now) -> Moved:
    """Does the late work that is due; a process is woken only when it was seen to stand still."""
    due = sorted((each for each in old.late if each.due_ns <= now.now_ns), key=attrgetter("due_ns"))
    if not due:
        return old, ()
    new = old._replace(late=tuple(each for each in old.late if each.due_ns > now.now_ns))
    outputs: tuple[InjectionOutput, ...] = ()
    for _, work in due:
        if isinstance(work, str):
            new, more = strike(new, now, work)
            outputs += more
        elif work.worker in new.ended:
            continue
        elif isinstance(work, SendSignal) and _is_awaited(new, work.worker, ends=False):
            new = new._replace(late=(*new.late, LateWork(now.now_ns + _LOOK_EVERY_NS, work)))
        else:
            outputs += (work,)
    return new, outputs


def see_end(old: Injection, now: Now, worker: int, code: int) -> Moved:
    """Handles the end of a worker's process; the membership protocol does not know it yet."""
    new, outputs = see_sign(old._replace(ended=old.ended | {worker}), now, worker, "exit", code)
    due = [fault for fault, cause in _after(new, "detect") if worker in cause.workers]
    new, more = _schedule(new, now, due)
    return new, outputs + more


def see_state(old: Injection, now: Now, worker: int, letter: str) -> Moved:
    """Handles the state of a process that lives, such as T for a stopped one: the answer to `LookAtVictim`.

    It is read again and again until it shows the fault or the process has ended.
    """
    new, outputs = see_sign(old, now, worker, "state", letter)
    look = LookAtVictim(worker)
    if _is_awaited(new, worker) and all(each.work != look for each in new.late):
        new = new._replace(late=(*new.late, LateWork(now.now_ns + _LOOK_EVERY_NS, look)))
    return new, outputs


def _is_awaited(injection: Injection, worker: int, *, ends: bool | None = None) -> bool:
    """Returns whether a sign of a signal is still to be seen: of any, or of one that ends the worker or does not."""
    kinds = (each.kind for each in injection.struck if worker in each.missing and each.kind.by == "agent")
    return any(ends in (None, kind.ends) for kind in kinds)


def see_sign(old: Injection, now: Now, worker: int, sign: Sign, value: Any, fault_id: str | None = None) -> Moved:
    """Handles a sign that a fault has struck a worker; `fault_id` if the worker has named the fault."""
    struck, outputs = list(old.struck), tuple[InjectionOutput, ...]()
    for index, each in enumerate(struck):
        if fault_id in (None, each.fault.id):
            struck[index] = new = each.after(worker, sign, value)
            if each.missing and not new.missing:
                outputs += (RecordFault(new.confirmed(sign, value)),)
    return old._replace(struck=tuple(struck)), outputs


def restart(old: Injection, now: Now) -> Moved:
    """Goes on with new processes: a fault that has struck strikes no more, and no late signal is theirs."""
    late = tuple(each for each in old.late if isinstance(each.work, str))
    return old._replace(ended=frozenset(), late=late), ()


def close(old: Injection, now: Now) -> Moved:
    """Records the unconfirmed faults at the end of the run."""
    missed = [UnconfirmedRecord(fault=each.id, how="it did not strike") for each in old.waiting]
    found = [each.unconfirmed for each in old.struck]
    return old, tuple(RecordFault(each) for each in (*missed, *found) if each is not None)
