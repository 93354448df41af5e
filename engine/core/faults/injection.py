"""Fault injection as a pure machine: it finds moment and victims of each fault, strikes them, and confirms the strike.

    cause strikes --> moment of the fault --> records --> signal, or InflictMessage --> sign of every victim: confirmed

Each public function handles one kind of input: it returns the injection after it, and the outputs in their order.

Rules: a fault is recorded before it strikes. It strikes once, and its victims are chosen at the strike. It is confirmed
by a sign of its kind from every victim. A fault without this confirmation is recorded at the end of the run as
unconfirmed, because its case proves nothing. Late work is done in the order of its times: a look for a stop comes
before the end of the stop. A worker that has ended gives no sign and gets no signal.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from operator import attrgetter
from typing import Any, NamedTuple

from engine.core.action import Op
from engine.core.checkpoint_rules import writers
from engine.core.faults.fault import (
    AT_ONCE,
    After,
    At,
    Fault,
    FaultKind,
    Host,
    Owner,
    Parameters,
    Sign,
    Victim,
    Worker,
    slot_owner,
    to_plain,
)
from engine.core.history.process_records import RequestRecord
from engine.core.history.run_records import ConfirmedRecord, EpochRecord, FaultRecord, HeirsRecord, UnconfirmedRecord
from engine.core.job.job import Job
from engine.core.message_kinds import ToWorker
from engine.core.messages import ArmMessage, FiredMessage, InflictMessage
from engine.core.ownership import Grid, Ownership, Slot
from engine.core.protocol.events import RecoveryPhase
from engine.core.protocol.state import State
from engine.core.protocol.verdicts import heirs

# The state of fault injection: faults that wait, and those that have struck, with missing signs; and its outputs.


Victims = tuple[tuple[int, Slot | None], ...]  # each worker with its slot


class RecordFault(NamedTuple):
    """The record is to be on disk before the next output is carried out."""

    record: FaultRecord | ConfirmedRecord | UnconfirmedRecord


class SendSignal(NamedTuple):
    """A signal to a worker that lives, by its number."""

    worker: int
    number: int


class LookAtVictim(NamedTuple):
    """The state of a worker's process is to be read; `see_state` takes the answer."""

    worker: int


class AnnounceFault(NamedTuple):
    """A message to a worker, or to every worker that lives."""

    message: ToWorker
    worker: int | None = None


InjectionOutput = RecordFault | SendSignal | LookAtVictim | AnnounceFault


class MomentReport(NamedTuple):
    """A worker says that the moment of a fault has come; `done` is its last action, of `step`, empty for none."""

    worker: int
    step: int
    done: str


class StruckFault(NamedTuple):
    """A fault that has struck: its epoch, its victims, the ownership before, and the victims without a sign."""

    fault: Fault
    kind: FaultKind
    parameters: Parameters
    epoch: int
    victims: Victims
    before: Ownership
    missing: frozenset[int]

    @property
    def workers(self) -> tuple[int, ...]:
        """The victims without their slots."""
        return tuple(worker for worker, _ in self.victims)

    @property
    def slot(self) -> Slot | None:
        """The slot of the first victim."""
        return next((slot for _, slot in self.victims), None)

    def after(self, worker: int, sign: Sign, value: Any) -> StruckFault:
        """Returns the fault after a sign at a worker, which may confirm it."""
        if worker not in self.missing or not self.kind.shows(sign, value, self.parameters):
            return self
        return self._replace(missing=self.missing - {worker})

    @property
    def unconfirmed(self) -> UnconfirmedRecord | None:
        """The record of the missing signs at the end of the run."""
        if self.victims and not self.missing:
            return None
        who = ", ".join(f"worker {worker}" for worker in sorted(self.missing))
        how = f"no sign of it was seen at {who}" if who else "there was no victim"
        return UnconfirmedRecord(fault=self.fault.id, how=how)

    def confirmed(self, sign: Sign, value: Any) -> ConfirmedRecord:
        """Returns the record of the last missing sign."""
        return ConfirmedRecord(fault=self.fault.id, how=f"{sign}: {value}")

    def records(self, state: State, report: MomentReport | None = None) -> tuple[FaultRecord, ...]:
        """Returns the records of the strike, one for each victim."""
        fault, moment = self.fault, self.fault.moment
        records = [
            FaultRecord(fault=fault.id, do=fault.do, step=state.committed + 1, of=worker, slot=slot)
            for worker, slot in self.victims
        ]
        if report is not None:
            records = [
                replace(record, done_step=report.step, done=report.done) if record.of == report.worker else record
                for record in records
            ]
        if isinstance(moment, At):
            action = str(moment.action)
            return tuple(replace(each, step=moment.step, action=action, when=moment.when) for each in records)
        if isinstance(moment, After):
            return tuple(replace(each, after=moment.fault, phase=moment.phase) for each in records)
        return tuple(records)


class LateWork(NamedTuple):
    """Work that is due at a time: the strike of a fault, by its id, or an output for a worker that lives."""

    due_ns: int
    work: str | SendSignal | LookAtVictim


CatchUpPoints = Callable[[Job, Ownership, Slot, tuple[int, str], int], tuple[At, ...]]


class Injection(NamedTuple):
    """The faults of a run, and all that has happened to them; `catch_up` finds catch-up points, see `expansion.py`."""

    job: Job
    kinds: Mapping[str, FaultKind]
    catch_up: CatchUpPoints
    waiting: tuple[Fault, ...]
    scheduled: frozenset[str] = frozenset()  # waiting faults whose moment has come, but not the end of their delay
    struck: tuple[StruckFault, ...] = ()
    late: tuple[LateWork, ...] = ()
    ended: frozenset[int] = frozenset()  # workers

    @property
    def grid(self) -> Grid:
        """The slots of the job."""
        return self.job.grid

    @property
    def due_ns(self) -> float:
        """The time of the next late work."""
        return min([each.due_ns for each in self.late], default=inf)

    @property
    def known(self) -> frozenset[str]:
        """The ids of all faults so far."""
        return frozenset((*(each.id for each in self.waiting), *(each.fault.id for each in self.struck)))

    def grace_ns(self, worker: int) -> int | None:
        """Returns the grace that the latest fault with one gives to a worker; None without such a fault."""
        graces = [each.parameters.get("grace_ns") for each in self.struck if worker in each.workers]
        return next((int(grace_ns) for grace_ns in reversed(graces) if grace_ns is not None), None)

    def has_struck(self, worker: int) -> bool:
        """Returns whether a fault has struck a worker."""
        return any(worker in each.workers for each in self.struck)


def find_victims(
    targets: Iterable[Victim], grid: Grid, state: State, slot: Slot | None, struck: Collection[int]
) -> Victims:
    """Returns the victims, each worker once.

    Args:
        slot: the slot for which a role is meant, if there is one.
        struck: the workers that the cause of the fault has struck, which may be dead without a verdict.
    """
    victims = (_resolved(victim, grid, state, slot, struck) for victim in targets)
    return tuple(dict(victim for victim in victims if victim is not None).items())


def _resolved(
    victim: Victim, grid: Grid, state: State, slot: Slot | None, struck: Collection[int]
) -> tuple[int, Slot | None] | None:
    if isinstance(victim, Worker):
        owned = Ownership(grid, state.owners).slots_of(victim.worker)
        return victim.worker, next(iter(owned), None)
    if isinstance(victim, Owner):
        slot = (victim.pipeline, victim.stage)
        return state.owners[grid.place(slot)], slot
    if slot is None or isinstance(victim, Host):
        return None
    place = grid.place(slot)
    match victim.role:
        case "recoverer":  # before the verdict: the worker that it would name
            owner = state.owners[place]
            return (heirs(state, struck).owners[place] if owner in struck else owner), slot
        case "shadow":
            return next(((worker, slot) for worker in state.shadows[place] if worker in state.members), None)
        case "neighbour":
            following = (slot[0], (slot[1] + 1) % grid.stages)
            return state.owners[grid.place(following)], following


_LOOK_EVERY_NS = 5_000_000  # between two looks at the state of a process

Moved = tuple[Injection, tuple[InjectionOutput, ...]]


class Now(NamedTuple):
    """The time of the coordinator's clock, and the state of the membership protocol."""

    now_ns: int
    state: State


def add(old: Injection, now: Now, faults: tuple[Fault, ...]) -> Moved:
    """Adds faults that were requested while the job runs; their ids are new."""
    message = ArmMessage(tuple(to_plain(fault) for fault in faults))
    return old._replace(waiting=old.waiting + faults), (AnnounceFault(message),)


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
    """Tells the heirs to report when they have redone a victim's lost work; `positions` are the last actions."""
    outputs: tuple[InjectionOutput, ...] = ()
    state = now.state
    for fault, cause in _after(old, "merged"):
        slot = cause.slot
        at = positions.get(cause.before.owner(*slot)) if slot is not None else None
        if state.epoch <= cause.epoch or slot is None or at is None:
            continue
        job = replace(old.job, schedule=state.schedule or old.job.schedule)
        points = old.catch_up(job, cause.before, slot, at, state.committed + 1)
        if points:
            armed = tuple(to_plain(replace(fault, moment=point)) for point in points)
            outputs += (AnnounceFault(ArmMessage(armed), state.owners[old.grid.place(slot)]),)
        else:
            old, more = _schedule(old, now, [fault])
            outputs += more
    return old, outputs


def strike(old: Injection, now: Now, fault_id: str, report: MomentReport | None = None) -> Moved:
    """Records a fault and strikes all its victims; one that has struck before does not hold up the worker that told."""
    fault = next((each for each in old.waiting if each.id == fault_id), None)
    if fault is None:
        return old, () if report is None else (AnnounceFault(FiredMessage(fault_id), report.worker),)
    state, kind = now.state, old.kinds[fault.do]
    victims = _victims(old, fault, state)
    before = Ownership(old.grid, state.owners, state.shadows)
    missing = frozenset(worker for worker, _ in victims)
    struck = StruckFault(fault, kind, kind.with_defaults(fault.parameters), state.epoch, victims, before, missing)
    waiting = tuple(each for each in old.waiting if each.id != fault_id)
    new = old._replace(waiting=waiting, struck=(*old.struck, struck))
    outputs: tuple[InjectionOutput, ...] = tuple(map(RecordFault, struck.records(state, report)))
    for worker, slot in victims:
        if worker not in old.ended:
            new, more = _hit(new, now.now_ns, struck, worker, slot)
            outputs += more
    outputs += (AnnounceFault(FiredMessage(fault.id)),)
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
    cause_id = fault.moment.fault if isinstance(fault.moment, After) else ""
    cause = next(each for each in injection.struck if each.fault.id == cause_id)
    return find_victims(fault.victims, injection.grid, state, cause.slot, cause.workers)


def _hit(old: Injection, now_ns: int, struck: StruckFault, worker: int, slot: Slot | None) -> Moved:
    """Carries out a fault on one victim that lives."""
    if struck.kind.by == "worker":
        fault = struck.fault
        return old, (AnnounceFault(InflictMessage(fault.id, fault.do, dict(struck.parameters), slot), worker),)
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
    """Handles the state of a living process, such as T; it is read again until it shows the fault or the end."""
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
    faults, outputs = list(old.struck), tuple[InjectionOutput, ...]()
    for index, struck in enumerate(faults):
        if fault_id in (None, struck.fault.id):
            faults[index] = new = struck.after(worker, sign, value)
            if struck.missing and not new.missing:
                outputs += (RecordFault(new.confirmed(sign, value)),)
    return old._replace(struck=tuple(faults)), outputs


def restart(old: Injection, now: Now) -> Moved:
    """Goes on with new processes: a fault that has struck strikes no more, and no late signal is theirs."""
    late = tuple(each for each in old.late if isinstance(each.work, str))
    return old._replace(ended=frozenset(), late=late), ()


def close(old: Injection, now: Now) -> Moved:
    """Records the unconfirmed faults at the end of the run."""
    missed = [UnconfirmedRecord(fault=each.id, how="it did not strike") for each in old.waiting]
    unconfirmed = [each.unconfirmed for each in old.struck]
    return old, tuple(RecordFault(record) for record in (*missed, *unconfirmed) if record is not None)


# The faults of a run that another host has coordinated, as the next one goes on with them.
#
#     struck, confirmed      nothing is left to do; a fault after it can strike
#     struck, no sign yet    its sign may still come: a killed worker has ended by now; a pending signal strikes again
#     waits for its moment   strikes as ever, as all hosts have the same faults
#     waited with that host  requested there, or a delay had begun there: it never strikes, and counts as unconfirmed
#
# Rule: a host hears of each strike before a victim on it is struck. So a strike of which no host has heard has struck
# no worker that is left.

_Owners = tuple[int, tuple[int, ...], tuple[tuple[int, ...], ...]]  # the epoch, owners and shadows


@dataclass(slots=True)
class InheritedFaults:
    """What a host hears of the faults of a run: the strikes, in which epochs, and the signs."""

    strikes: list[tuple[FaultRecord, _Owners]] = field(default_factory=list)
    confirmed: set[str] = field(default_factory=set)
    unconfirmed: set[str] = field(default_factory=set)
    requested: list[str] = field(default_factory=list)
    _owners: _Owners = (0, (), ())

    @property
    def struck(self) -> set[str]:
        """The ids of the faults that have struck."""
        return {each.fault for each, _ in self.strikes}

    def hear(self, record: object) -> None:
        """Takes the next decision; those about other things change nothing."""
        match record:
            case EpochRecord() | HeirsRecord():
                self._owners = record.epoch, record.owners, record.shadows
            case FaultRecord():
                self.strikes.append((record, self._owners))
            case ConfirmedRecord(fault=fault):
                self.confirmed.add(fault)
            case UnconfirmedRecord(fault=fault):
                self.unconfirmed.add(fault)
            case RequestRecord(faults=faults):
                self.requested += faults


def taken_over(old: Injection, now: Now, inherited: InheritedFaults, lost: str, present: Collection[int]) -> Moved:
    """Returns the injection of the host that takes over from `lost`, and what it does first.

    Only the workers that are `present` have a process that may live.
    """
    struck = tuple(_struck(old, inherited, name) for name in dict.fromkeys(each.fault for each, _ in inherited.strikes))
    faults = [each for each in struck if each is not None]
    names = inherited.struck
    waiting = tuple(each for each in old.waiting if each.id not in names)
    epochs = {each.fault.id: each.epoch for each in faults}
    begun = {each.id for each in waiting if isinstance(each.moment, After) and _has_begun(each.moment, epochs, now)}
    ended = {worker for each in faults for worker in each.workers if worker not in present}
    new = old._replace(
        waiting=tuple(each for each in waiting if each.id not in begun), struck=tuple(faults), ended=old.ended | ended
    )
    outputs = [*_unconfirmed(inherited, names, begun, lost)]
    for fault in faults:
        new, more = _again(new, now, fault)
        outputs += more
    return new, tuple(outputs)


def _has_begun(moment: After, epochs: Mapping[str, int], now: Now) -> bool:
    """Returns whether the delay of a fault may have begun; `epochs` are those of the strikes."""
    if moment.fault not in epochs:
        return False
    return moment.phase is None or (moment.delay_ns > 0 and now.state.epoch > epochs[moment.fault])


def _struck(old: Injection, inherited: InheritedFaults, name: str) -> StruckFault | None:
    """Returns a fault that has struck as the host before had it; None for one that was requested there."""
    fault = next((each for each in old.waiting if each.id == name), None)
    if fault is None:
        return None
    records = [(each, owners) for each, owners in inherited.strikes if each.fault == name]
    epoch, owners, shadows = records[0][1]
    victims = tuple((each.of, each.slot) for each, _ in records)
    missing = frozenset(each.of for each, _ in records) if name not in inherited.confirmed else frozenset[int]()
    kind = old.kinds[fault.do]
    before = Ownership(old.grid, owners, shadows)
    return StruckFault(fault, kind, kind.with_defaults(fault.parameters), epoch, victims, before, missing)


def _unconfirmed(
    inherited: InheritedFaults, struck: Collection[str], begun: Collection[str], lost: str
) -> list[InjectionOutput]:
    """Returns the records of the faults that the lost host alone could have struck, or confirmed."""
    open_ = [each for each in inherited.requested if each not in (inherited.confirmed | inherited.unconfirmed)]
    waited = [*(each for each in open_ if each not in struck), *sorted(begun)]
    how = dict.fromkeys(waited, f"it waited with host {lost}, which was lost")
    how |= {each: f"host {lost}, which had struck it, was lost before its sign" for each in open_ if each in struck}
    return [RecordFault(UnconfirmedRecord(fault=each, how=text)) for each, text in how.items()]


def _again(old: Injection, now: Now, struck: StruckFault) -> Moved:
    """Sends the signals that may not have been sent to victims that live: late ones, and those that end at once."""
    signals = struck.kind.signals(struck.parameters)
    outputs: list[InjectionOutput] = []
    late: list[LateWork] = []
    for worker in struck.workers:
        if worker in old.ended:
            continue
        late += [
            LateWork(now.now_ns + signal.after_ns, SendSignal(worker, signal.number))
            for signal in signals
            if signal.after_ns
        ]
        if worker in struck.missing and struck.kind.by == "agent":
            if struck.fault.do in AT_ONCE:
                outputs += [SendSignal(worker, each.number) for each in signals if not each.after_ns]
            outputs.append(LookAtVictim(worker))
    return old._replace(late=(*old.late, *late)), tuple(outputs)
