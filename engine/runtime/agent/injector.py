"""The injector: the agent's part in fault injection. It finds moment and victims of each fault, and strikes them.

    cause strikes --> moment of the fault --> records --> signal, or InflictMessage --> sign of every victim: confirmed

Rules: a fault is recorded before it strikes. It strikes once, and its victims are chosen at the strike. It is confirmed
by a sign of its kind from every victim. A fault without this confirmation is recorded at the end of the run as
unconfirmed, because its case proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

from engine.core.config.job import Job
from engine.core.faults.catch_up import catch_up_points
from engine.core.faults.fault import After, At, Fault, Owner, RecoveryPhase, Victim, Worker, to_plain
from engine.core.history.run_records import ConfirmedRecord, FaultRecord, UnconfirmedRecord
from engine.core.membership.effects import AnnounceCommit, Effect, PublishEpoch, PublishPlanInput, StartTraining
from engine.core.membership.state import State
from engine.core.membership.verdicts import heirs
from engine.core.messages import ArmMessage, FiredMessage, InflictMessage
from engine.core.ownership import Grid, Ownership, Slot
from engine.core.scalar import Scalar
from engine.runtime.agent.worker_handles import WorkerHandle, tell_all
from engine.runtime.faults.registry import AgentFaultContext, Registered, Sign, registered
from engine.runtime.ipc.progress_board import ProgressBoard
from engine.runtime.ipc.recorder import Recorder, now_ns
from engine.runtime.process.process_state import process_state

_BEGIN_WITH: dict[type[Effect], RecoveryPhase] = {
    PublishEpoch: "agree",
    PublishPlanInput: "plan",
    StartTraining: "replay",
    AnnounceCommit: "heal",
}
_LOOK_EVERY_NS = 5_000_000  # between two looks at the state of a stopped process


@dataclass(slots=True)
class _Struck:
    """A fault that has struck: its epoch, its victims and their slots, the ownership before, victims without a sign."""

    fault: Fault
    kind: Registered
    parameters: Mapping[str, Scalar]
    epoch: int
    victims: dict[int, Slot | None]
    before: Ownership
    missing: set[int]


class Injector:
    """Strikes the workers of one run; `state` returns the state of the coordinator."""

    def __init__(
        self,
        job: Job,
        faults: Sequence[Fault],
        members: Mapping[int, WorkerHandle],
        recorder: Recorder,
        board: ProgressBoard | None,
        state: Callable[[], State],
    ):
        self._job = job
        self._grid = Grid(job.stages, job.microbatches, job.pipelines)
        self._waiting = {fault.id: fault for fault in faults}
        self._members = members
        self._recorder = recorder
        self._board = board
        self._state = state
        self._due: list[tuple[int, Callable[[], None]]] = []
        self._committed = -1  # the last step that was announced to the workers
        self._scheduled: set[str] = set()  # waiting faults whose moment has come, but not the end of their delay
        self._struck: dict[str, _Struck] = {}

    @property
    def due_ns(self) -> float:
        """The time of the next delayed work, for `look_at_clock`."""
        return min((due_ns for due_ns, _ in self._due), default=float("inf"))

    @property
    def known(self) -> frozenset[str]:
        """The ids of all faults so far."""
        return frozenset((*self._waiting, *self._struck))

    def grace_ns(self, worker: int) -> int | None:
        """Returns the grace that the latest fault with one gives to a worker; None without such a fault."""
        found = [each.parameters.get("grace_ns") for each in self._struck.values() if worker in each.victims]
        return next((int(each) for each in reversed(found) if each is not None), None)

    def has_struck(self, worker: int) -> bool:
        """Returns whether a fault has struck a worker."""
        return any(worker in each.victims for each in self._struck.values())

    def look_at_clock(self) -> None:
        """Runs the delayed work that is due, in the order of its times: a look for a stop comes before its end."""
        time_ns = now_ns()
        due = sorted((each for each in self._due if each[0] <= time_ns), key=itemgetter(0))
        self._due = [each for each in self._due if each[0] > time_ns]
        for _, do in due:
            do()

    def _later(self, delay_ns: int, do: Callable[[], None]) -> None:
        self._due.append((now_ns() + delay_ns, do))

    def add(self, faults: Sequence[Fault]) -> None:
        """Adds faults while the job runs; their ids must be new."""
        self._waiting.update((fault.id, fault) for fault in faults)
        tell_all(self._members.values(), ArmMessage(tuple(to_plain(fault) for fault in faults)))

    def reached(self, phase: RecoveryPhase, epoch: int) -> None:
        """Handles the begin of a phase of the recovery that leads to `epoch`."""
        for fault, cause in self._after(phase):
            if epoch > cause.epoch:
                self._schedule(fault)
        if phase == "agree":
            self.reached("detect", epoch)  # for a worker that is out while its process lives

    def exit_seen(self, worker: int, code: int) -> None:
        """Handles the end of a worker, before the coordinator does."""
        self.sees(worker, "exit", code)
        for fault, cause in self._after("detect"):
            if worker in cause.victims:
                self._schedule(fault)

    def _after(self, phase: RecoveryPhase | None) -> list[tuple[Fault, _Struck]]:
        """Returns (fault, cause) of the faults that wait for a phase of the recovery from a fault that has struck."""
        return [
            (fault, self._struck[fault.moment.fault])
            for fault in self._waiting.values()
            if isinstance(fault.moment, After)
            and fault.moment.phase == phase
            and fault.moment.fault in self._struck
            and fault.id not in self._scheduled
        ]

    def _schedule(self, fault: Fault) -> None:
        delay_ns = fault.moment.delay_ns if isinstance(fault.moment, After) else 0
        self._scheduled.add(fault.id)
        if delay_ns:
            self._later(delay_ns, lambda: self.strike(fault.id))
        else:
            self.strike(fault.id)

    def begins(self, effect: Effect) -> None:
        """Handles an effect that the agent is about to carry out."""
        if isinstance(effect, StartTraining):
            self._arm_merged()

    def has_begun(self, effect: Effect) -> None:
        """Handles an effect that was carried out; a phase of a recovery may begin with it."""
        phase = _BEGIN_WITH.get(type(effect))
        if isinstance(effect, PublishPlanInput):
            self.reached("inventory", effect.epoch)  # in a prepared epoch, no worker sends an inventory
        if isinstance(effect, AnnounceCommit):
            # Every epoch announces the last commit again; no step begins with this announcement.
            is_new, self._committed = effect.step > self._committed, max(effect.step, self._committed)
            phase = phase if is_new and effect.then == "step" else None
        if phase is not None:
            self.reached(phase, effect.epoch)

    def _arm_merged(self) -> None:
        """Tells the heirs to report the moment at which they have redone the lost work of a fault's victim."""
        state = self._state()
        for fault, cause in self._after("merged"):
            slot = next(iter(cause.victims.values()))
            if state.epoch <= cause.epoch or slot is None or self._board is None:
                continue
            at = self._board.read(cause.before.owner(*slot))
            points = catch_up_points(self._job, cause.before, slot, (at.step, at.action), state.committed + 1)
            armed = tuple(to_plain(replace(fault, moment=point)) for point in points)
            if armed:
                self._members[state.owners[self._grid.place(slot)]].link.send(ArmMessage(armed))
            else:
                self._schedule(fault)

    def strike(self, fault_id: str) -> None:
        """Records a fault and strikes all its victims; does nothing if it has struck before."""
        fault = self._waiting.pop(fault_id, None)
        if fault is None:
            return
        state, kind = self._state(), registered()[fault.do]
        victims = self._victims(fault, state)
        before = Ownership(self._grid, state.owners, state.shadows)
        parameters = kind.kind.with_defaults(fault.parameters)
        struck = _Struck(fault, kind, parameters, state.epoch, victims, before, set(victims))
        self._struck[fault.id] = struck
        for worker, slot in victims.items():
            self._recorder.write(_record(fault, state, worker, slot))
        for worker, slot in victims.items():
            self._strike(struck, worker, slot)
        tell_all(self._members.values(), FiredMessage(fault.id))
        for next_one, cause in self._after(None):
            if cause is struck:
                self._schedule(next_one)

    def _strike(self, struck: _Struck, worker: int, slot: Slot | None) -> None:
        member = self._members[worker]
        if member.exit_code is not None:
            return  # a worker that has ended gives no sign

        def later(delay_ns: int, do: Callable[[], None]) -> None:
            self._later(delay_ns, lambda: do() if member.exit_code is None else None)

        if struck.kind.kind.by == "agent":
            struck.kind.strike(AgentFaultContext(member.child, struck.parameters, later))
            self._look(struck, worker)
        else:
            fault = struck.fault
            member.link.send(InflictMessage(fault.id, fault.do, dict(struck.parameters), slot))

    def _look(self, struck: _Struck, worker: int) -> None:
        """Reads the state of a process again and again until it shows the fault or the process has ended."""
        state = process_state(self._members[worker].child) if self._members[worker].exit_code is None else None
        if state is not None and worker in struck.missing:
            self.sees(worker, "state", state)
            self._later(_LOOK_EVERY_NS, lambda: self._look(struck, worker))

    def _victims(self, fault: Fault, state: State) -> dict[int, Slot | None]:
        """Returns the victims of a fault that strikes now, each with its slot."""
        if isinstance(fault.moment, At):
            slot: Slot | None = (fault.moment.action.pipeline, fault.moment.action.stage)
            dead: tuple[int, ...] = ()
        else:
            cause = self._struck[fault.moment.fault]
            slot = next(iter(cause.victims.values()), None)
            dead = tuple(cause.victims)
        found = [self._resolved(victim, slot, dead, state) for victim in fault.victims]
        return dict(each for each in found if each is not None)

    def _resolved(
        self, victim: Victim, slot: Slot | None, dead: tuple[int, ...], state: State
    ) -> tuple[int, Slot | None] | None:
        if isinstance(victim, Worker):
            owned = Ownership(self._grid, state.owners).slots_of(victim.worker)
            return victim.worker, next(iter(owned), None)
        if isinstance(victim, Owner):
            slot = (victim.pipeline, victim.stage)
            return state.owners[self._grid.place(slot)], slot
        if slot is None:
            return None
        place = self._grid.place(slot)
        match victim.role:
            case "recoverer":  # before the verdict: the worker that it would name
                owner = state.owners[place]
                return (heirs(state, dead).owners[place] if owner in dead else owner), slot
            case "shadow":
                return next(((worker, slot) for worker in state.shadows[place] if worker in state.members), None)
            case "neighbour":
                following = (slot[0], (slot[1] + 1) % self._grid.stages)
                return state.owners[self._grid.place(following)], following

    def sees(self, worker: int, sign: Sign, value: Any, fault_id: str | None = None) -> None:
        """Handles a sign that a fault has struck a worker; `fault_id` if the worker has named the fault."""
        for struck in self._struck.values():
            if worker not in struck.missing or fault_id not in (None, struck.fault.id):
                continue
            if struck.kind.shows(sign, value, struck.parameters):
                struck.missing.discard(worker)
                if not struck.missing:
                    self._recorder.write(ConfirmedRecord(fault=struck.fault.id, how=f"{sign}: {value}"))

    def close(self) -> None:
        """Records the unconfirmed faults, each with the missing sign."""
        for fault in self._waiting.values():
            self._recorder.write(UnconfirmedRecord(fault=fault.id, how="it did not strike"))
        for struck in self._struck.values():
            if struck.missing or not struck.victims:
                who = ", ".join(f"worker {worker}" for worker in sorted(struck.missing))
                how = f"no sign of it was seen at {who}" if who else "there was no victim"
                self._recorder.write(UnconfirmedRecord(fault=struck.fault.id, how=how))


def _record(fault: Fault, state: State, worker: int, slot: Slot | None) -> FaultRecord:
    """Returns the record of a strike."""
    moment = fault.moment
    struck = FaultRecord(fault=fault.id, do=fault.do, step=state.committed + 1, of=worker, slot=slot)
    if isinstance(moment, At):
        return replace(struck, step=moment.step, action=str(moment.action), when=moment.when)
    return replace(struck, after=moment.fault, phase=moment.phase)
