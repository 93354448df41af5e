"""The agent: deaths of real workers at the worst moments, and the times of the records that it writes."""

from __future__ import annotations

import json
import select
import signal
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.codec.messages import decode
from engine.core.errors import ExitCode, WorkerFailedError
from engine.core.job.job import Job
from engine.core.messages import CommitMessage, CutMessage
from engine.core.protocol.coordinator import step
from engine.core.protocol.inputs_outputs import CoordinatorInput, CoordinatorOutput
from engine.runtime.agent.agent import Agent, AgentTasks
from engine.runtime.agent.session import run_session
from engine.runtime.process.clock import now_ns
from engine.runtime.process.fork_client import Child, ForkServer
from engine.runtime.process.recorder import Recorder, open_events
from tests.core.coordinator_cases import training, votes


def test_a_worker_that_dies_while_others_are_forked_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its pidfd and its link are ready before anyone watches them."""
    fork = ForkServer.fork

    def fork_and_kill_the_second(self: ForkServer, role: str, name: str, log_fd: int, fds: Sequence[int] = ()) -> Child:
        child = fork(self, role, name, log_fd, fds)
        if name == "bamboo-1":
            child.signal(signal.SIGKILL)
            assert select.select([child.pidfd], [], [], 5)[0]
        return child

    monkeypatch.setattr(ForkServer, "fork", fork_and_kill_the_second)
    ending = run_session(Job(model="mlp", stages=3), tmp_path / "events.jsonl", tmp_path)
    assert isinstance(ending.error, WorkerFailedError)
    pid = ending.view.workers[1].pid
    who = f"worker 1 (pid {pid}) wrote nothing"
    assert str(ending.error) == f"training did not recover: worker 1 was killed (SIGKILL); {who}"
    assert (ending.outcome, ending.exit_code) == ("failed", ExitCode.NOT_RECOVERED)
    assert [each.state for each in ending.view.workers] == ["starting", "dead", "starting"]


class NodeDouble:
    """A coordinator without a store, before the first commit."""

    def __init__(self) -> None:
        self.coordination = training()

    @property
    def state(self) -> Any:
        """The state of the membership protocol."""
        return self.coordination.membership

    def handle(self, given: CoordinatorInput) -> tuple[CoordinatorOutput, ...]:
        """Returns the outputs of the machine."""
        self.coordination, found = step(self.coordination, given)
        return found


def test_no_worker_hears_of_a_commit_before_the_time_in_its_record(tmp_path: Path) -> None:
    """An action after the commit, such as a heal, would else lie before it."""
    heard_ns: list[int] = []

    def hear(data: bytes) -> None:
        assert isinstance(decode(data), CommitMessage)
        heard_ns.append(now_ns())

    link = SimpleNamespace(send_packet=hear)
    members: dict[int, Any] = {
        worker: SimpleNamespace(worker=worker, slots=(), exit_code=None, link=link) for worker in range(3)
    }
    node: Any = NodeDouble()
    recorder = Recorder(open_events(tmp_path / "events.jsonl"), -1)
    agent = Agent(node.coordination.job, members, recorder, node, AgentTasks())
    agent.run_state.cut(CutMessage((0, 1, 2), ("fc1", "fc2", "fc3")))
    for vote in votes(node.coordination):
        agent.decide(vote)
    (commit,) = (json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines())
    assert (commit["event"], len(heard_ns)) == ("commit", 3)
    assert commit["at_ns"] <= min(heard_ns)
    assert agent.run_state.losses == [0.5]


def test_a_lost_host_is_one_verdict_before_any_end_of_its_workers_counts(tmp_path: Path) -> None:
    node: Any = NodeDouble()
    membership = node.coordination.membership._replace(nodes={0: "a", 1: "b", 2: "b"})
    node.coordination = node.coordination._replace(membership=membership)
    sent: list[bytes] = []
    members: dict[int, Any] = {
        worker: SimpleNamespace(
            worker=worker,
            slots=(),
            exit_code=None,
            state="running",
            host=host,
            link=SimpleNamespace(send_packet=sent.append),
            child=SimpleNamespace(pid=worker, lost="it was silent" if host == "b" else ""),
            name=f"worker {worker}",
            account="",
        )
        for worker, host in enumerate("abb")
    }
    agent = Agent(node.coordination.job, members, Recorder(open_events(tmp_path / "e"), -1), node, AgentTasks())
    epoch = node.state.epoch
    for worker in (1, 2):
        agent.exited(members[worker], -9)
    assert node.state.epoch == epoch + 1
    assert {*node.state.out} == {1, 2}
    assert [each["of"] for each in records_of(tmp_path / "e", "exit") if not each["expected"]] == [1]
    assert agent.run_state.notes == ["host b is lost: it was silent"]


def records_of(events: Path, kind: str) -> list[dict[str, Any]]:
    """Returns the records of one kind."""
    return [each for line in events.read_text().splitlines() if (each := json.loads(line))["event"] == kind]
