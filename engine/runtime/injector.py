"""The injector: the agent's part in faults. It knows when each is due and to whom, records it, and strikes.

Rules: a fault is recorded, in the kernel's hands, before anybody feels it. It strikes once; who its victims are is
decided at the strike. It is confirmed when a sign of its kind has been seen of every victim; of what is not confirmed by
the end of the run it is said so, because a case with such a fault proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.core.catch_up import catch_up_points
from engine.core.fault import After, At, Fault, Owner, Phase, Role, Victim, Worker, to_plain
from engine.core.job import Job
from engine.core.membership_state import State
from engine.core.membership_verdicts import heirs
from engine.core.ownership import Grid, Ownership, Slot
from engine.runtime.faults.registry import Blow, Sign, registered
from engine.runtime.process_state import process_state
from engine.runtime.progress_board import ProgressBoard
from engine.runtime.recorder import Recorder, now_ns
from engine.runtime.roster import Member

_LOOK_EVERY_NS = 5_000_000  # at a process whose state shall show what was done to it


@dataclass(slots=True)
class _Struck:
    """A fault that has struck: in which epoch, whom and what they owned, and of whom no sign has been seen yet."""

    fault: Fault
    epoch: int
    victims: dict[int, Slot | None]  # each with the slot that it is struck for
    before: Ownership
    missing: set[int]


class Injector:
    """Strikes the workers of one run; `state` returns what the coordinator knows."""

    def __init__(
        self,
        job: Job,
        faults: Sequence[Fault],
        members: Mapping[int, Member],
        recorder: Recorder,
        board: ProgressBoard,
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
        self._scheduled: set[str] = set()  # of those that wait: their moment has come, and only a delay is left
        self._struck: dict[str, _Struck] = {}

    @property
    def due_ns(self) -> float:
        """When `look_at_clock` is to be called at the latest."""
        return min((due_ns for due_ns, _ in self._due), default=float("inf"))

    @property
    def known(self) -> frozenset[str]:
        """The ids of all faults so far."""
        return frozenset((*self._waiting, *self._struck))

    def look_at_clock(self) -> None:
        """Does what is due."""
        if self.due_ns > now_ns():
            return
        due = [do for due_ns, do in self._due if due_ns <= now_ns()]
        self._due = self._due[len(self._due) :] + [each for each in self._due if each[1] not in due]
        for do in due:
            do()

    def _later(self, delay_ns: int, do: Callable[[], None]) -> None:
        self._due.append((now_ns() + delay_ns, do))

    def add(self, faults: Sequence[Fault]) -> None:
        """Takes in more faults while the job runs; their ids must be new."""
        self._waiting.update((fault.id, fault) for fault in faults)
        self._tell_all("arm", faults=[to_plain(fault) for fault in faults])
        for struck in list(self._struck.values()):
            self._strikes_follow(struck)

    def _tell_all(self, kind: str, **fields: Any) -> None:
        for member in self._members.values():
            if member.exit_code is None:
                member.link.send(kind, **fields)

    def reached(self, phase: Phase, epoch: int) -> None:
        """Takes in that a phase has begun of the recovery to an epoch."""
        for fault, struck in self._after(phase):
            if epoch > struck.epoch:
                self._schedule(fault)
        if phase == "agree":
            self.reached("detect", epoch)  # of somebody who is given up while his process lives

    def _after(self, phase: Phase | None) -> list[tuple[Fault, _Struck]]:
        """Returns the faults that wait for a phase of the recovery from one that has struck."""
        return [
            (fault, self._struck[fault.moment.fault])
            for fault in self._waiting.values()
            if isinstance(fault.moment, After)
            and fault.moment.phase == phase
            and fault.moment.fault in self._struck
            and fault.id not in self._scheduled
        ]

    def _strikes_follow(self, struck: _Struck) -> None:
        for fault, cause in self._after(None):
            if cause is struck:
                self._schedule(fault)

    def _schedule(self, fault: Fault) -> None:
        assert isinstance(fault.moment, After)
        self._scheduled.add(fault.id)
        if fault.moment.delay_ns:
            self._later(fault.moment.delay_ns, lambda: self.strike(fault.id))
        else:
            self.strike(fault.id)

    def before_go(self) -> None:
        """Has the heirs say when they have made again what was lost with those who are out, before they begin."""
        state = self._state()
        for fault, struck in self._after("merged"):
            slot = self._slot_of(struck)
            if state.epoch <= struck.epoch or slot is None:
                continue
            victim = struck.before.owner(*slot)
            points = catch_up_points(
                self._job, struck.before, slot, self._board.read(victim), state.committed + 1
            )
            heir = self._members[state.owners[self._place(slot)]]
            heir.link.send("arm", faults=[{**to_plain(fault), "moment": moment} for moment in points])
