"""The state of fault injection: faults that wait, and those that have struck, with missing signs; and its outputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple

from engine.core.config.job import Job
from engine.core.faults.fault import At, Fault, Owner, Victim, Worker
from engine.core.faults.fault_kind import FaultKind, Parameters, Sign
from engine.core.history.run_records import ConfirmedRecord, FaultRecord, UnconfirmedRecord
from engine.core.membership.state import State
from engine.core.membership.verdicts import heirs
from engine.core.message_codec import ToWorker
from engine.core.ownership import Grid, Ownership, Slot

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


class TellOfFault(NamedTuple):
    """A message to a worker, or to every worker that lives."""

    message: ToWorker
    worker: int | None = None


InjectionOutput = RecordFault | SendSignal | LookAtVictim | TellOfFault


class ToldMoment(NamedTuple):
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

    def records(self, state: State, told: ToldMoment | None = None) -> tuple[FaultRecord, ...]:
        """Returns the records of the strike, one for each victim."""
        fault, moment = self.fault, self.fault.moment
        records = [
            FaultRecord(fault=fault.id, do=fault.do, step=state.committed + 1, of=worker, slot=slot)
            for worker, slot in self.victims
        ]
        if told is not None:
            records = [
                replace(each, done_step=told.step, done=told.done) if each.of == told.worker else each
                for each in records
            ]
        if isinstance(moment, At):
            action = str(moment.action)
            return tuple(replace(each, step=moment.step, action=action, when=moment.when) for each in records)
        return tuple(replace(each, after=moment.fault, phase=moment.phase) for each in records)


class LateWork(NamedTuple):
    """Work that is due at a time: the strike of a fault, by its id, or an output for a worker that lives."""

    due_ns: int
    work: str | SendSignal | LookAtVictim


CatchUpPoints = Callable[[Job, Ownership, Slot, tuple[int, str], int], tuple[At, ...]]


class Injection(NamedTuple):
    """The faults of a run, and all that has happened to them; `catch_up` finds catch-up points, see `catch_up.py`."""

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
        found = [each.parameters.get("grace_ns") for each in self.struck if worker in each.workers]
        return next((int(each) for each in reversed(found) if each is not None), None)

    def has_struck(self, worker: int) -> bool:
        """Returns whether a fault has struck a worker."""
        return any(worker in each.workers for each in self.struck)


def find_victims(
    wanted: Iterable[Victim], grid: Grid, state: State, slot: Slot | None, struck: Collection[int]
) -> Victims:
    """Returns the victims, each worker once.

    Args:
        slot: the slot for which a role is meant, if there is one.
        struck: the workers that the cause of the fault has struck, which may be dead without a verdict.
    """
    found = (_resolved(victim, grid, state, slot, struck) for victim in wanted)
    return tuple(dict(each for each in found if each is not None).items())


def _resolved(
    victim: Victim, grid: Grid, state: State, slot: Slot | None, struck: Collection[int]
) -> tuple[int, Slot | None] | None:
    if isinstance(victim, Worker):
        owned = Ownership(grid, state.owners).slots_of(victim.worker)
        return victim.worker, next(iter(owned), None)
    if isinstance(victim, Owner):
        slot = (victim.pipeline, victim.stage)
        return state.owners[grid.place(slot)], slot
    if slot is None:
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
