"""Small jobs for the tests of the membership protocol: a pipeline of three workers, brought to where a test begins."""

from __future__ import annotations

from dataclasses import replace

from engine.core.membership.effects import Effect
from engine.core.membership.events import (
    Done,
    Event,
    ExitSeen,
    Heartbeat,
    InventoryReceived,
    Joined,
    LeaseExpired,
    Notice,
    PlanAcknowledged,
    Restarted,
    StepCommitted,
    Suspicion,
    TakenOver,
    Tick,
)
from engine.core.membership.evidence import Loading, Sight
from engine.core.membership.protocol import step
from engine.core.membership.state import Options, Phase, State, begin

S = 1_000_000_000
RING = ((2,), (0,), (1,))  # the shadow of each stage is the owner of the stage before
JOINED = tuple(Joined(worker, worker, f"node-{worker // 2}") for worker in range(3))


def forming(redundant: bool = True, last_step: int = 9, max_repeats: int = 2) -> State:
    """Returns a job of three stages on three workers, of which nobody has joined; time stands at 0."""
    options = Options(stages=3, redundant=redundant, max_repeats=max_repeats)
    return begin(options, (0, 1, 2), RING if redundant else ((), (), ()), last_step, 0)


def told(state: State, *events: Event) -> State:
    """Returns the state after some events."""
    for event in events:
        state, _ = step(state, event)
    return state


def heard(state: State, *events: Event) -> tuple[Effect, ...]:
    """Returns what the last of some events brings about."""
    return step(told(state, *events[:-1]), events[-1])[1]


def running(redundant: bool = True, last_step: int = 9, max_repeats: int = 2) -> State:
    """Returns that job in epoch 1, before its first commit; time stands at 2 ns."""
    return told(forming(redundant, last_step, max_repeats), *JOINED)


def recovered(state: State, now_ns: int = 10) -> State:
    """Returns a job that gathers after everybody has answered."""
    words = [InventoryReceived(now_ns, worker, state.epoch, f"held by {worker}") for worker in state.members]
    plans = [PlanAcknowledged(now_ns, worker, state.epoch, "plan") for worker in state.members]
    return told(state, *words, *plans)


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
        Phase.FINISHED: told(draining, *(Done(30, worker, draining.epoch) for worker in draining.members)),
        Phase.HALTED: told(running(redundant=False), ExitSeen(5, 2, -9)),
    }[phase]


def sample(kind: type[Event], state: State) -> Event:
    """Returns an event of a kind that fits the state: of its epoch, from a member where that is possible."""
    worker, epoch = (state.members or (0,))[0], state.epoch
    events: tuple[Event, ...] = (
        Joined(40, worker, "node-0"),
        Heartbeat(40, worker, epoch, 1, 1, True),
        Suspicion(40, worker, epoch, None),
        ExitSeen(40, worker, -9),
        LeaseExpired(40, "node-0"),
        InventoryReceived(40, worker, epoch, "nothing"),
        PlanAcknowledged(40, worker, epoch, "plan"),
        StepCommitted(40, epoch, state.committed + 1),
        Notice(40, worker, S),
        Done(40, worker, epoch),
        Tick(40, {worker: Sight(epoch, 1, 1, True, 0, 0, Loading.NONE, "S", 5, 0)}),
        TakenOver(40),
        Restarted(40),
    )
    return next(event for event in events if type(event) is kind)
