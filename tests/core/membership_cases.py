"""Small jobs for the tests of the membership protocol: a pipeline of three workers, brought to where a test begins."""

from __future__ import annotations

from dataclasses import replace

from engine.core.message_kinds import Message
from engine.core.messages import FinishedMessage, HeartbeatMessage, ReadyMessage, SuspicionMessage, WaitingMessage
from engine.core.program.inventory import InventoryMessage, PlannedMessage
from engine.core.protocol.events import (
    Departure,
    EarlyStop,
    Event,
    ExitSeen,
    HandOver,
    JobRestart,
    LeaseExpired,
    Loading,
    MemoryShortage,
    Notice,
    Sight,
    StepCommitted,
    Takeover,
    Tick,
    WantedOwners,
    WantedSchedule,
    WorkerWord,
)
from engine.core.protocol.membership import step
from engine.core.protocol.state import Options, Phase, Report, State, begin

S = 1_000_000_000
RING = ((2,), (0,), (1,))  # the shadow of each stage is the owner of the stage before


def says_ready(now_ns: int, worker: int, node: str) -> Event:
    """Returns the word of a worker that it has joined."""
    return WorkerWord(now_ns, worker, ReadyMessage(), node)


def beats(
    now_ns: int, worker: int, epoch: int, at_step: int, index: int, inside: bool, report: Report | None = None
) -> Event:
    """Returns a heartbeat of a worker, with its report if it waits without news."""
    quiet_ns, counts = (0, ()) if report is None else (report.quiet_ns, report.counts)
    return WorkerWord(now_ns, worker, HeartbeatMessage(epoch, at_step, index, inside, quiet_ns, counts))


def suspects(now_ns: int, worker: int, epoch: int, peer: int | None = None) -> Event:
    """Returns the word of a worker that a transfer has failed."""
    return WorkerWord(now_ns, worker, SuspicionMessage(epoch, "it broke", peer))


def holds(now_ns: int, worker: int, epoch: int, text: str, whole: tuple[int, ...] = ()) -> Event:
    """Returns the inventory of a worker."""
    return WorkerWord(now_ns, worker, InventoryMessage(epoch, text, whole))


def plans(now_ns: int, worker: int, epoch: int, digest: str, lost_stages: tuple[int, ...] = ()) -> Event:
    """Returns the answer of a worker to a plan."""
    return WorkerWord(now_ns, worker, PlannedMessage(epoch, digest, lost_stages))


def is_done(now_ns: int, worker: int, epoch: int) -> Event:
    """Returns the word of a worker that has done all of the last step."""
    return WorkerWord(now_ns, worker, FinishedMessage(epoch, (), 0, ()))


JOINED = tuple(says_ready(worker, worker, f"node-{worker // 2}") for worker in range(3))


def forming(redundant: bool = True, last_step: int = 9, max_repeats: int = 2) -> State:
    """Returns a job of three stages on three workers, of which nobody has joined; time stands at 0."""
    options = Options(stages=3, redundant=redundant, max_repeats=max_repeats, workers=3)
    return begin(options, (0, 1, 2), RING if redundant else ((), (), ()), last_step, 0)


def told(state: State, *events: Event) -> State:
    """Returns the state after some events."""
    for event in events:
        state = step(state, event)
    return state


def running(redundant: bool = True, last_step: int = 9, max_repeats: int = 2) -> State:
    """Returns that job in epoch 1, before its first commit; time stands at 2 ns."""
    return told(forming(redundant, last_step, max_repeats), *JOINED)


def recovered(state: State, now_ns: int = 10) -> State:
    """Returns a job that gathers after everybody has answered."""
    answers = [holds(now_ns, worker, state.epoch, f"held by {worker}") for worker in state.members]
    agreed = [plans(now_ns, worker, state.epoch, "plan") for worker in state.members]
    return told(state, *answers, *agreed)


def committed(state: State, shadows: tuple[tuple[int, ...], ...] = (), now_ns: int = 20) -> State:
    """Returns a job after the commit of its next step."""
    return told(state, StepCommitted(now_ns, state.epoch, state.committed + 1, shadows))


def restarting() -> State:
    """Returns a job whose worker 2 has died before all had joined."""
    state = forming()
    return told(state._replace(options=replace(state.options, max_restarts=1)), ExitSeen(1, 2, -9))


def in_phase(phase: Phase) -> State:
    """Returns a job in some phase."""
    draining = committed(running(last_step=0))
    return {
        Phase.FORMING: forming(),
        Phase.RESTARTING: restarting(),
        Phase.RUNNING: running(),
        Phase.FAILING_OVER: told(running(), ExitSeen(5, 2, -9)),
        Phase.RECONFIGURING: committed(told(running(), Notice(5, 2, S))),
        Phase.DRAINING: draining,
        Phase.FINISHED: told(draining, *(is_done(30, worker, draining.epoch) for worker in draining.members)),
        Phase.HALTED: told(running(redundant=False), ExitSeen(5, 2, -9)),
    }[phase]


def kind_of(event: Event) -> type[Event] | type[Message]:
    """Returns the column of an event in the table."""
    return type(event.message) if isinstance(event, WorkerWord) else type(event)


def sample(kind: type[Event] | type[Message], state: State) -> Event:
    """Returns an event of a kind that fits the state: of its epoch, from a member where that is possible."""
    worker, epoch = (state.members or (0,))[0], state.epoch
    events: tuple[Event, ...] = (
        says_ready(40, worker, "node-0"),
        WorkerWord(40, 7, WaitingMessage(), "node-0"),
        beats(40, worker, epoch, 1, 1, True),
        suspects(40, worker, epoch, None),
        ExitSeen(40, worker, -9),
        LeaseExpired(40, "node-0"),
        holds(40, worker, epoch, "nothing"),
        plans(40, worker, epoch, "plan"),
        StepCommitted(40, epoch, state.committed + 1),
        Notice(40, worker, S),
        is_done(40, worker, epoch),
        Tick(40, {worker: Sight(epoch, 1, 1, True, 0, 0, Loading.NONE, "S", 5, 0)}),
        Takeover(40),
        JobRestart(40),
        EarlyStop(40, state.committed + 1),
        HandOver(40, worker),
        Departure(40, worker),
        WantedOwners(40, (1, *state.owners[1:]), "a test"),
        WantedSchedule(40, "zb1p", "a test"),
        MemoryShortage(40, {7: "waits on"}),
    )
    return next(event for event in events if kind_of(event) is kind)
