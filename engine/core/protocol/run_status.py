"""The status of a run: the owners of its slots, how far it is, and the verdicts; read off the keys in its store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import get_args

from engine.core.deadlines import BACK, LATER_NS, SILENT
from engine.core.history.process_records import (
    CheckRecord,
    ComparingRecord,
    ComparisonRecord,
    DeadlyRecord,
    FailedRecord,
    HostRecord,
    NetworkRecord,
    NotComparedRecord,
    StartedRecord,
    WaitingRecord,
    WayOutRecord,
)
from engine.core.history.run_history import RunHistory, WorkerEnd, gaps, last_starts, since_start, worker_ends
from engine.core.history.run_records import (
    CrampedRecord,
    EpochRecord,
    NoticeRecord,
    PaceRecord,
    PartitionRecord,
    PolicyRecord,
    StaysRecord,
    TensorsRecord,
    UnconfirmedRecord,
)
from engine.core.job.samples import epoch_at
from engine.core.ownership import Slot, by_slot
from engine.core.protocol.state import State
from engine.core.protocol.verdicts import unable_to_leave
from engine.core.texts import counted
from engine.core.units import parse_duration

Slots = tuple[Slot, ...]
SLOW = "slow"  # a worker that takes 1.5 times its usual time or more
WAITS = "waiting"  # a worker that is no member, and has code and data
LOADS = "starting"  # one that does not wait yet
CANNOT_LEAVE = "cannot leave"  # a worker that has given notice, but whose stages no worker can take over


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker: its present and previous slots as (pipeline, stage), and the seconds since its last message.

    `step` and `last_action` are those it finished last; -1 and empty before. `tensor_bytes` are at the peak of a step;
    0 if unknown.
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


# The status of a run, made from its history: for a run that has ended or has lost its store.


_TOLD = (
    EpochRecord,
    StaysRecord,
    WayOutRecord,
    FailedRecord,
    CheckRecord,
    ComparisonRecord,
    NotComparedRecord,
    UnconfirmedRecord,
)
_ENDS = get_args(WorkerEnd)  # states of a worker whose process has ended
_LIVES = ("in", WAITS, LOADS, SLOW, CANNOT_LEAVE)
STARTING, RUNNING, COMPARING, CHECKING = "starting", "running", "comparing with the twin", "checking the results"
UNDER_WAY = (STARTING, RUNNING, COMPARING, CHECKING)  # phases of a run that has not ended, by its records


def status_of_history(run_id: str, history: RunHistory) -> RunStatus:
    """Returns the status of a run after its last record."""
    epoch = history.epochs[-1].epoch if history.epochs else 0
    ends, cut, deadly = worker_ends(history), history.first(PartitionRecord), history.of(DeadlyRecord)
    workers = tuple(_worker(each, history, ends.get(each.of)) for _, each in sorted(last_starts(history).items()))
    return RunStatus(
        run_id,
        _phase(history),
        epoch,
        history.committed,
        history.num_steps,
        workers,
        tuple(_verdicts(history)),
        history.commits.losses[-1] if history.commits else None,
        gaps=gaps(history),
        injectable=history.is_injectable,
        noun=history.job.slot_noun,
        data_epoch=epoch_at(history.job, history.committed + 1, cut.samples if cut else 0),
        data_epochs=history.job.epochs,
        policy=tuple(_policy(history)),
        deadly=deadly[-1].text if deadly and deadly[-1].hosts and history.training_ended is None else "",
    )


def slow_workers(history: RunHistory) -> dict[int, PaceRecord]:
    """Returns the last change of the pace of each worker that is slow, since it was started the last time."""
    begun_ns = {each.of: each.at_ns for each in last_starts(history).values()}
    last = {each.of: each for each in history.of(PaceRecord) if each.at_ns >= begun_ns.get(each.of, 0)}
    ends = worker_ends(history)
    return {worker: last[worker] for worker in sorted(last) if last[worker].slowness > 1 and worker not in ends}


def _policy(history: RunHistory) -> Iterator[str]:
    """Yields the last answer of the policy, whether its move is still to come, and the slow and cramped workers."""
    if answers := history.of(PolicyRecord):
        last = answers[-1]
        has_come = last.owners == tuple(history.epochs[-1].owners) if history.epochs else False
        how = "" if not last.owners else " (the move is done)" if has_come else " (the move is to come)"
        yield f"policy, {last.asked}: {last.why}{how}"
    yield from (f"since step {each.step}: {each.why}" for each in slow_workers(history).values())
    cramped = {each.of: each for each in since_start(history, CrampedRecord)}
    ends = worker_ends(history)
    waiting = {worker: last.why for worker, last in sorted(cramped.items()) if last.why and worker not in ends}
    yield from (f"worker {worker} {why}" for worker, why in (waiting | idle_members(history)).items())
    leases = {each.node: each.lease_s for each in history.of(HostRecord) if each.lease_s}
    yield from (f"host {node} is lost after {leases[node]} s without a renewal of its lease" for node in leases)
    hosts = {each.of: each for each in history.of(NetworkRecord)}.values()
    yield from map(str, hosts)
    if hosts and history.job is not None and (after_ns := parse_duration(history.job.silent_after)):
        worst_ns = max(each.worst_ns for each in hosts)
        silent_s, later_s = (after_ns + SILENT.more(worst_ns)) / 1e9, (LATER_NS + BACK.more(worst_ns)) / 1e9
        yield f"a worker is lost after {silent_s:.3g} s of silence; a broken transfer waits {later_s:.3g} s"


def idle_members(history: RunHistory) -> dict[int, str]:
    """Returns why a member owns nothing, in words, by its number; without those that the policy was not asked about."""
    if not history.epochs:
        return {}
    job, epoch, answers = history.job, history.epochs[-1], history.of(PolicyRecord)
    slots, num_members = len(epoch.owners), len(epoch.members)
    came_ns = {each.of: each.at_ns for each in history.of(WaitingRecord)}
    leaving = {each.of for each in history.of(NoticeRecord)}
    why = answers[-1].why if answers else ""
    if num_members > slots:
        enough = f"start with --max-workers {num_members}, or resume with it"
        why = f"{counted(slots, job.slot_noun)} for {num_members} workers; {enough}"
    return {
        worker: f"owns no {job.slot_noun}: {why if job.elastic else 'the run moves none (--no-elastic)'}"
        for worker in epoch.members
        if worker not in {*epoch.owners, *leaving, *(answers[-1].owners if answers else ())}
        and (not job.elastic or (answers and answers[-1].at_ns >= came_ns.get(worker, 0)))
    }


def _phase(history: RunHistory) -> str:
    if history.ended:
        return history.ended.outcome
    if history.training_ended:
        is_comparing = history.first(ComparingRecord) and not history.of(ComparisonRecord)
        return COMPARING if is_comparing else CHECKING
    return RUNNING if history.epochs else STARTING


def _worker(started: StartedRecord, history: RunHistory, end: WorkerEnd | None) -> WorkerStatus:
    owned = [started.slots]
    for epoch in [each for each in history.epochs if each.at_ns >= started.at_ns]:
        owners = by_slot(epoch.owners, history.job.slots)
        now = tuple(slot for slot, owner in owners.items() if owner == started.of)
        owned += [now] if now != owned[-1] else []
    before: tuple[Slot, ...] = owned[-2] if len(owned) > 1 else ()
    status = WorkerStatus(started.of, started.child, "", owned[-1], before)
    if (last := history.last_action.get(started.of)) is not None:
        status = replace(status, step=last.step, last_action=last.action)
    peaks = [each.peak for each in history.of(TensorsRecord) if each.worker == started.of]
    status = replace(status, tensor_bytes=sum(sum(sizes) for rows in peaks[-1:] for _, _, *sizes in rows))
    stays = any(each.of == started.of for each in since_start(history, StaysRecord))
    is_slow = started.of in slow_workers(history)
    state = CANNOT_LEAVE if stays else SLOW if is_slow else _recorded_state(started, history)
    return replace(status, state=end or state)


def _recorded_state(started: StartedRecord, history: RunHistory) -> str:
    """Returns the word for a worker whose end was not seen; before the first epoch an owner is in."""
    members = history.epochs[-1].members if history.epochs and history.epochs[-1].at_ns >= started.at_ns else ()
    if started.of in members or (not members and started.slots):
        return "in"
    return WAITS if any(each.of == started.of for each in since_start(history, WaitingRecord)) else LOADS


def _verdicts(history: RunHistory) -> Iterator[tuple[int, str]]:
    for epoch, record in history.in_epochs(*_TOLD):
        match record:
            case EpochRecord():
                yield epoch, record.reason
            case CheckRecord() if record in history.findings:
                yield epoch, f"check {record.name} {record.result}: {record.text}"
            case ComparisonRecord() if record.difference is None:  # a difference is a check that failed
                yield epoch, record.unproven_text
            case NotComparedRecord():
                yield epoch, str(record)
            case UnconfirmedRecord():
                yield epoch, str(record)
            case StaysRecord() | WayOutRecord():
                yield epoch, f"worker {record.of} {record.text}"
            case FailedRecord():
                yield epoch, record.error


def live_status(stored: RunStatus, recorded: RunStatus) -> RunStatus:
    """Returns the status in the store, completed by what only the records of the run have."""
    workers = {each.worker: each for each in (*recorded.workers, *stored.workers)}
    for row in recorded.workers:
        status = workers[row.worker]
        is_slow = row.state == SLOW and status.state == "in"
        state = row.state if row.state in _ENDS or is_slow else status.state
        seen = replace(status, step=row.step, last_action=row.last_action, tensor_bytes=row.tensor_bytes)
        workers[row.worker] = replace(seen, state=state)
    in_order = tuple(workers[each] for each in sorted(workers))
    names = ("loss", "gaps", "injectable", "data_epoch", "data_epochs", "policy", "deadly")
    return replace(stored, workers=in_order, **{name: getattr(recorded, name) for name in names})


def without_word(status: RunStatus) -> RunStatus:
    """Returns the status of a run after its launcher is gone without a last record: its workers are gone too."""
    workers = tuple(replace(each, state="gone") if each.state in _LIVES else each for each in status.workers)
    return replace(status, phase="launcher gone", workers=workers)
