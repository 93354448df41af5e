"""The status of a run: the owners of its slots, how far it is, and the verdicts; read off the keys in its store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.core.ownership import Slot, by_slot
from engine.core.protocol.state import State
from engine.core.protocol.verdicts import unable_to_leave

Slots = tuple[Slot, ...]
SLOW = "slow"  # a worker that takes 1.5 times its usual time or more
WAITS = "waiting"  # a worker that is no member, and has code and data
LOADS = "starting"  # one that does not wait yet
CANNOT_LEAVE = "cannot leave"  # a worker that has given notice, but whose stages no worker can take over


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker: its present and previous slots as (pipeline, stage), and the seconds since its last message.

    `step` and `last_action` are of the last action that it finished, from the events; -1 and empty before the first.
    `tensor_bytes` are those of its tensors at the peak of a step; 0 if none was counted yet.
    """

    worker: int
    pid: int
    node: str
    now: Slots
    before: Slots = ()
    state: str = "in"
    heard_s_ago: float | None = None
    step: int = -1
    last_action: str = ""
    tensor_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run; `phase` is that of the protocol, or the outcome of an ended run; `verdicts` are (epoch, reason).

    `loss` is that of the last committed step, from the events; None before the first. `unwritten_s`: the time since
    the launcher last wrote to its store, which it does each second. `gaps` are the missing parts of the events.
    `policy` has the last answer of the policy, and the slow and cramped workers, in words, from the events.
    `deadly` names the hosts that may not be lost, and why, if the run has several.
    `injectable`: it takes the faults of `bamboo inject --run`. `data_epoch` is the pass over the data, from 1 on, of
    `data_epochs`; both are 0 for a job without epochs.
    """

    run_id: str
    phase: str
    epoch: int = 0
    committed: int = -1
    num_steps: int = 0
    workers: tuple[WorkerStatus, ...] = ()
    verdicts: tuple[tuple[int, str], ...] = field(default=())
    loss: float | None = None
    unwritten_s: float | None = None
    gaps: tuple[str, ...] = ()
    injectable: bool = True
    noun: str = "stage"  # for a slot of a pipeline
    data_epoch: int = 0
    data_epochs: int = 0
    policy: tuple[str, ...] = ()
    deadly: str = ""

    def __repr__(self) -> str:
        """Returns the status in a line; a program reads the fields."""
        loss = "" if self.loss is None else f", loss {self.loss:.4f}"
        at_work = sum(each.state == "in" for each in self.workers)
        workers = f"{at_work} of {len(self.workers)} workers at work"
        return (
            f"<RunStatus {self.run_id}: {self.phase}, step {self.committed + 1} of {self.num_steps}{loss}, {workers}>"
        )


Verdicts = tuple[tuple[int, str], ...]  # epoch and reason of the latest ones


@dataclass(frozen=True, slots=True)
class Member:
    """A worker as its host has written it into the store: its slots now and before."""

    pid: int
    node: str
    now: Slots
    before: Slots = ()


@dataclass(frozen=True, slots=True)
class Heartbeats:
    """The age of the last message of each worker in seconds, at a time of the launcher's clock."""

    at_ns: int
    ages: Mapping[int, float] = field(default_factory=dict)


def status_of(
    run_id: str, state: State, verdicts: Verdicts, beats: Heartbeats, members: Mapping[int, Member], now_ns: int
) -> RunStatus:
    """Returns the status of a live run from what its keys hold, at a time of the launcher's clock."""
    unwritten_s = max(0, now_ns - beats.at_ns) / 1e9
    heard_s = {worker: age_s + unwritten_s for worker, age_s in beats.ages.items()}
    held = unable_to_leave(state)
    workers = [
        WorkerStatus(
            worker,
            member.pid,
            member.node,
            *_now_and_before(worker, member, state),
            CANNOT_LEAVE if worker in held else _state_word(worker, state),
            heard_s.get(worker),
        )
        for worker, member in sorted(members.items())
    ]
    return RunStatus(
        run_id,
        str(state.phase),
        state.epoch,
        state.committed,
        state.last_step + 1,
        tuple(workers),
        verdicts,
        unwritten_s=unwritten_s,
        noun=state.options.noun,
    )


def _state_word(worker: int, state: State) -> str:
    if worker in state.out or worker in state.lost:
        return "out"
    return "in" if worker in state.members else WAITS if worker in state.waiting else LOADS


def _now_and_before(worker: int, member: Member, state: State) -> tuple[Slots, Slots]:
    """Returns the slots of a worker by the state, which knows the heirs at once; its own key follows each second."""
    now = tuple(slot for slot, owner in by_slot(state.owners, state.options.stages).items() if owner == worker)
    return now, member.before if now == member.now else member.now
