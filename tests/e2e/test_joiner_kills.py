"""A joiner, a member or the launcher is killed in each phase of a join: the same bits, and nothing is left."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from engine.core.errors import ExitCode
from engine.core.hosts.ends import HostOutput
from engine.core.job.job import Job
from engine.core.message_kinds import Message
from engine.core.messages import EpochMessage, GoMessage, NextGroupFormedMessage, NextGroupMessage, WaitingMessage
from engine.core.program.ballot import VoteMessage
from engine.core.program.inventory import PreparedMessage, PreparePartMessage
from engine.core.protocol.inputs_outputs import CoordinatorOutput, Tell
from engine.core.protocol.state import Phase
from engine.files.atomic_write import write_atomically
from engine.runtime.agent.agent import Agent
from engine.runtime.agent.worker_handles import WorkerHandle
from engine.runtime.process.fork_client import ForkServer
from tests.e2e.kill_runs import Runs, differences, lives
from tests.e2e.launcher import Launcher
from tests.e2e.test_joining import MLP, joined, told

pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.timeout(600)]

Launch = Callable[..., Launcher]
JOINER, MEMBER = 3, 1
SLOW: dict[str, str | int | float | bool] = {"layers": 12, "forward_ms": 1, "backward_ms": 2, "width": 16}
JOB = Job(
    model="timed",
    model_args=SLOW,
    data_args={"features": 16},
    stages=3,
    blocks=4,
    microbatches=4,
    steps=80,
    validate_every=0,
    elastic=True,
)


class Moment(NamedTuple):
    """When the agent hears from a worker, or tells the workers, what fits, for the last of some `times`."""

    fits: Callable[[Agent, int, Message], bool]
    is_heard: bool = True  # just before the agent acts on it; else just after it was told
    times: int = 1


def heard(kind: type[Message], worker: int | None = None, count: int = 1) -> Moment:
    return Moment(lambda agent, by, each: isinstance(each, kind) and worker in (None, by), times=count)


def voted(worker: int, count: int) -> Moment:
    """A vote of a worker since the joiner is a member."""

    def fits(agent: Agent, by: int, each: Message) -> bool:
        return isinstance(each, VoteMessage) and by == worker and JOINER in agent.node.state.members

    return Moment(fits, times=count)


def said(fits: Callable[[Agent, Message], bool]) -> Moment:
    return Moment(lambda agent, by, each: fits(agent, each), is_heard=False)


def owns(agent: Agent) -> bool:
    return JOINER in agent.node.state.owners


MOMENTS = {
    "it has code and data": heard(WaitingMessage, JOINER),
    "a group is to form": said(lambda agent, each: isinstance(each, NextGroupMessage)),
    "a member has formed it": heard(NextGroupFormedMessage, 0),
    "the joiner has formed it": heard(NextGroupFormedMessage, JOINER),
    "the epoch is prepared": said(lambda agent, each: isinstance(each, PreparePartMessage)),
    "the joiner has prepared it": heard(PreparedMessage, JOINER),
    "a member has prepared it": heard(PreparedMessage, 0),
    "the epoch begins": said(lambda agent, each: isinstance(each, EpochMessage) and JOINER in each.members),
    "the first step with it": voted(0, 1),
    "it is healed": voted(0, 2),
    "the joiner votes": voted(JOINER, 1),
    "it is to own": said(lambda agent, each: isinstance(each, EpochMessage | GoMessage) and owns(agent)),
    "it owns": voted(JOINER, 2),
}


class Killer:
    """Asks for a worker after two commits, and kills a worker at a moment, once."""

    def __init__(self, folder: Path, moment: Moment | None, victim: int, patch: pytest.MonkeyPatch):
        self.has_struck = self._has_asked = False
        self.was_member = False  # the joiner, when the worker was killed
        self._folder, self._moment, self._victim = folder, moment, victim
        self._left = moment.times if moment else 0
        hear, carry_out, add = Agent.hear, Agent.carry_out, Agent.add

        def hears(agent: Agent, member: WorkerHandle, message: Message) -> None:
            self._sees(agent, member.worker, message, is_heard=True)
            hear(agent, member, message)

        def carries_out(agent: Agent, output: CoordinatorOutput | HostOutput) -> None:
            carry_out(agent, output)
            if isinstance(output, Tell):
                self._sees(agent, -1, output.message, is_heard=False)

        def adds(agent: Agent, member: WorkerHandle) -> None:
            add(agent, member)
            if self._moment is None:
                self._strike(agent)

        patch.setattr(Agent, "hear", hears)
        patch.setattr(Agent, "carry_out", carries_out)
        patch.setattr(Agent, "add", adds)

    def _sees(self, agent: Agent, by: int, message: Message, *, is_heard: bool) -> None:
        state, moment = agent.node.state, self._moment
        if state.phase is Phase.RUNNING and state.committed >= 2 and not self._has_asked:
            self._has_asked = True
            write_atomically(self._folder / "join-1.json", json.dumps({"ask": "join", "standby": False}))
        if moment is not None and self._left and moment.is_heard == is_heard and moment.fits(agent, by, message):
            self._left -= 1
            if not self._left:
                self._strike(agent)

    def _strike(self, agent: Agent) -> None:
        self.has_struck, self.was_member = True, JOINER in agent.node.state.members
        agent.members[self._victim].child.signal(signal.SIGKILL)


@pytest.fixture(name="runs", scope="module")
def _runs(tmp_path_factory: pytest.TempPathFactory, server: ForkServer) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"), server)


CASES = [(None, JOINER), *((name, JOINER) for name in MOMENTS), *((name, MEMBER) for name in MOMENTS)]


@pytest.mark.parametrize(("moment", "victim"), CASES)
def test_a_kill_in_each_phase_of_a_join(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, moment: str | None, victim: int
) -> None:
    awake = {**SLOW, "forward_ms": 0, "backward_ms": 0}
    twin = runs.twin(replace(JOB, blocks=1, elastic=False, model_args=awake))
    killer = Killer(runs.requests, None if moment is None else MOMENTS[moment], victim, monkeypatch)
    ending, events = runs.run(JOB)
    assert killer.has_struck
    assert [*differences(ending, twin), *lives(events, {victim})] == []
    epochs = [event for event in events if event["event"] == "epoch"][1:]
    last = epochs[-1]["members"] if epochs else ()
    if victim == JOINER:
        verdicts = [event for event in epochs if not event["planned"]]
        assert len(verdicts) == killer.was_member, "the end of a worker that is no member makes no epoch"
        assert JOINER not in last
    else:
        assert MEMBER not in last
        assert {*epochs[-1]["owners"]} == {0, 2, JOINER}, "the joiner takes the place of the member"


PHASES: dict[str, Callable[[Launcher, Launcher], object]] = {
    "loading": lambda run, command: told(command, "started"),
    "waiting": lambda run, command: told(command, "waits"),
    "a member": lambda run, command: told(command, "member"),
    "an owner": lambda run, command: told(command, "owns"),
}


@pytest.mark.parametrize("phase", PHASES)
def test_the_launcher_is_killed(launch: Launch, phase: str) -> None:
    """All that it has committed has the bits of a run without a join, and no process and no file stays."""
    same = (*MLP, "--set", "lr_schedule=constant", "--stages", "3")
    run = launch("run", *same, "--blocks", "4", "--elastic", "--steps", "100000")
    run.wait_until(lambda: run.events("commit"))
    command = joined(launch, run)
    run.wait_until(lambda: PHASES[phase](run, command))
    run.interrupt(signal.SIGKILL)
    assert run.wait(20).code == -signal.SIGKILL
    done = command.wait(20)
    assert done.code == ExitCode.NOT_RECOVERED, done
    assert "its launcher was killed" in done.stderr
    assert run.leftovers() == []
    assert command.leftovers() == []
    assert not list(run.run_folder.glob("join-*"))
    losses = {each["step"]: each["loss"] for each in run.events("commit")}
    plain = launch("run", *same, "--steps", str(len(losses)))
    assert plain.wait(300).code == 0
    assert {each["step"]: each["loss"] for each in plain.events("commit")} == losses
