"""``python -m tests.e2e.coordinator_kills``: SIGKILL of the coordinator at each of many moments, with a standby.

The coordinator is killed before it has read an input, or when its decision is in the store and no output was carried
out. Some are stopped by a signal instead, and one leaves its role to its lease. Training must end with the outcome of a
run without deaths, and no worker that lives may have another process.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engine.core import messages
from engine.core.job.job import Job
from engine.core.kv import Txn
from engine.core.message_codec import Message
from engine.core.program.ballot import VoteMessage
from engine.core.program.inventory import InventoryMessage, PlanMessage, PlannedMessage, PreparedMessage
from engine.core.protocol import inputs_outputs
from engine.core.protocol.inputs_outputs import CoordinatorOutput
from engine.core.protocol.state import Phase
from engine.core.protocol.wire import StepMessage
from engine.runtime.agent.session import run_session
from engine.runtime.agent.standby import CoordinatorGoneError, StandbyCoordinator
from engine.runtime.process.fork_client import ForkServer
from tests.e2e.kill_runs import lives, outcome_of
from tests.e2e.recorded import events_of
from tests.e2e.striker import Strike, Striker, committed

JOB = {"model": "timed", "model_args": {"forward_ms": 2, "backward_ms": 3}, "microbatches": 4, "validate_every": 3}
DEATH = (Strike(committed(1), 2, signal.SIGKILL),)
NOTICE = (Strike(committed(1), 2, signal.SIGTERM),)
EARLY = (Strike(lambda event: event["event"] == "started" and event["of"] == 1, 1),)  # all are started again
LATER = {"model_args": {"forward_ms": 20, "backward_ms": 20}, "validate_every": 0, "steps": 8}

Asked = tuple[StandbyCoordinator, Sequence[Message], Sequence[CoordinatorOutput]]


@dataclass(frozen=True)
class Moment:
    """A moment of the coordinator: the input before which it dies, or the outputs that it cannot tell."""

    fits: Callable[[Asked], bool]
    count: int = 1  # the time that it fits
    is_told: bool = True  # it dies before the input comes; else when the state is written
    strikes: tuple[Strike, ...] = ()
    fields: dict[str, Any] = field(default_factory=dict)
    number: signal.Signals = signal.SIGKILL
    is_freed: bool = True  # the agent deletes the key of the role; else the lease of the key has to expire


def hears(kind: type[Message], phase: Phase | None = None) -> Callable[[Asked], bool]:
    return lambda asked: isinstance(asked[1][-1], kind) and phase in (None, asked[0].state.membership.phase)


def is_input(name: str, phase: Phase) -> Callable[[Asked], bool]:
    def fits(asked: Asked) -> bool:
        first = asked[1][0]
        return isinstance(first, StepMessage) and first.name == name and asked[0].state.membership.phase is phase

    return fits


def tells(kind: type[Message], epoch: int = 0) -> Callable[[Asked], bool]:
    def fits(asked: Asked) -> bool:
        found = [each.message for each in asked[2] if isinstance(each, inputs_outputs.Tell)]
        return any(isinstance(each, kind) and getattr(each, "epoch", 0) >= epoch for each in found)

    return fits


def releases(asked: Asked) -> bool:
    return any(isinstance(each, inputs_outputs.Release) for each in asked[2])


def untold(fits: Callable[[Asked], bool], count: int = 1, *strikes: Strike, **fields: Any) -> Moment:
    return Moment(fits, count, False, strikes, fields)


MOMENTS: dict[str, Moment] = {
    "a death before training is not told": untold(is_input("ProcessExit", Phase.RESTARTING), 1, *EARLY),
    "all workers are to begin again": Moment(is_input("JobRestart", Phase.RESTARTING), strikes=EARLY),
    "the new beginning is not told": untold(is_input("JobRestart", Phase.FORMING), 1, *EARLY),
    "a commit after a new beginning": untold(tells(messages.CommitMessage), 2, *EARLY),
    "the model is cut": Moment(hears(messages.CutMessage)),
    "a border is not told": untold(tells(messages.BorderMessage), 2),
    "a worker has joined": Moment(hears(messages.ReadyMessage), 2),
    "the first epoch is not told": untold(tells(messages.EpochMessage, 1)),
    "the first vote": Moment(hears(VoteMessage)),
    "a vote in a step": Moment(hears(VoteMessage), 7),
    "a vote was counted": untold(hears(VoteMessage), 5),
    "the first commit is not told": untold(tells(messages.CommitMessage)),
    "a later commit is not told": untold(tells(messages.CommitMessage), 5),
    "a heartbeat": Moment(hears(messages.HeartbeatMessage, Phase.RUNNING), 2),
    "a validation": Moment(hears(messages.ValidationMessage)),
    "a death is seen": Moment(is_input("ProcessExit", Phase.RUNNING), strikes=DEATH),
    "the verdict is not told": untold(tells(messages.EpochMessage, 2), 1, *DEATH),
    "an inventory": Moment(hears(InventoryMessage), 2, strikes=DEATH),
    "the plan is not told": untold(tells(PlanMessage), 1, *DEATH),
    "a plan was made": Moment(hears(PlannedMessage), 2, strikes=DEATH),
    "the start is not told": untold(tells(messages.GoMessage), 1, *DEATH),
    "the commit of the heal is not told": untold(tells(messages.CommitMessage), 4, *DEATH),
    "a notice": Moment(is_input("Notice", Phase.RUNNING), strikes=NOTICE, fields=LATER),
    "a hand-over is prepared": Moment(hears(PreparedMessage), 2, strikes=NOTICE, fields=LATER),
    "the hand-over is not told": untold(tells(messages.EpochMessage, 2), 1, *NOTICE, **LATER),
    "the last worker is done": Moment(hears(messages.FinishedMessage), 4),
    "the end is not told": untold(releases),
    "it stands still": Moment(hears(VoteMessage), 7, number=signal.SIGSTOP),
    "it stands still in a recovery": Moment(hears(InventoryMessage), 2, strikes=DEATH, number=signal.SIGSTOP),
    "its lease has to expire": Moment(hears(VoteMessage), 7, is_freed=False),
}


class KeptRole:
    """A store that does not delete the key of the role."""

    def transact(self, txn: Txn) -> None:
        """Does nothing."""


class Killer:
    """Kills the coordinator of a run at one moment, once."""

    def __init__(self, moment: Moment, patch: pytest.MonkeyPatch):
        self.moment = moment
        self.left = moment.count
        self._ask = StandbyCoordinator._ask
        kill = self.ask

        def ask(standby: StandbyCoordinator, *parts: Message) -> tuple[CoordinatorOutput, ...]:
            return kill(standby, *parts)

        patch.setattr(StandbyCoordinator, "_ask", ask)

    def ask(self, standby: StandbyCoordinator, *parts: Message) -> tuple[CoordinatorOutput, ...]:
        """Asks as the standby does, or lets the coordinator die."""
        if self.moment.is_told:
            if self._is_now((standby, parts, ())):
                standby.active.child.signal(self.moment.number)
                if self.moment.number is signal.SIGKILL:
                    standby.active.child.wait(10.0)
                if not self.moment.is_freed:
                    standby._kv = KeptRole()  # type: ignore[assignment]
            return self._ask(standby, *parts)
        before = standby.state
        found = self._ask(standby, *parts)
        if self._is_now((standby, parts, found)):
            standby.active.child.signal(signal.SIGKILL)
            standby.state = before
            raise CoordinatorGoneError
        return found

    def _is_now(self, asked: Asked) -> bool:
        if self.left and self.moment.fits(asked):
            self.left -= 1
            return not self.left
        return False


def kill_at(name: str, folder: Path, server: ForkServer) -> Iterator[str]:
    """Yields the deviations of a run whose coordinator is killed at a moment."""
    moment = MOMENTS[name]
    job, events = Job(**{"steps": 6, **JOB, **moment.fields}), folder / "events.jsonl"
    with pytest.MonkeyPatch.context() as patch, Striker(events, moment.strikes) as striker:
        killer = Killer(moment, patch)
        ending = run_session(job, events, folder, server=server, standby_coordinator=True)
    if killer.left or striker.left:
        yield f"not struck: {killer.left}, {striker.left}"
    yield from deviations(ending, events_of(events), moment, job, outcome(job, folder / "twin", server))


def deviations(ending: Any, events: list[dict[str, Any]], moment: Moment, job: Job, expected: object) -> Iterator[str]:
    """Yields the deviations of an ended run of a job."""
    if ending.error is not None or ending.outcome != "finished":
        yield f"{ending.outcome}: {ending.error}"
    if outcome_of(ending.view.run_state) != expected:
        yield "another outcome than without deaths"
    ended = [event["code"] for event in events if event["event"] == "coordinator_ended"]
    if ended != [-signal.SIGKILL]:
        yield f"coordinators ended with {ended}"
    started = [event["of"] for event in events if event["event"] == "started"]
    if moment.strikes == EARLY and started != [*range(job.stages)] * 2:
        yield f"started were {started}"
    if moment.strikes not in (NOTICE, EARLY):
        yield from lives(events, {2} if moment.strikes else ())


_outcomes: dict[str, object] = {}


def outcome(job: Job, folder: Path, server: ForkServer) -> object:
    """Returns the outcome of a job without deaths."""
    if repr(job) not in _outcomes:
        folder.mkdir()
        ending = run_session(job, folder / "events.jsonl", folder, server=server)
        _outcomes[repr(job)] = outcome_of(ending.view.run_state)
    return _outcomes[repr(job)]


def main() -> int:
    """Returns 0 if every run survived the death of its coordinator, else 1."""
    failed = 0
    with ForkServer() as server, tempfile.TemporaryDirectory(prefix="coordinator-kills-") as name:
        for number, moment in enumerate(sys.argv[1:] or MOMENTS):
            folder = Path(name) / str(number)
            folder.mkdir()
            problems = list(kill_at(moment, folder, server))
            failed += bool(problems)
            print(f"{moment}: {'; '.join(problems) or 'as without deaths'}", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
