"""A run that another host has coordinated: workers that come later are told the same, and signals are notices."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.codec.messages import decode, encode
from engine.codec.records import encoded
from engine.core.faults.injection import InheritedFaults
from engine.core.history.run_records import CommitRecord, PartitionRecord
from engine.core.hosts.host_messages import ControlHostMessage, DecisionHostMessage, PastControlHostMessage
from engine.core.job.job import Job
from engine.core.job.partition import fresh_ownership
from engine.core.messages import PartitionMessage, WelcomeMessage
from engine.files.run_folder import RunFolder
from engine.runtime.agent import session, start_up
from engine.runtime.agent.frames import read_frame
from engine.runtime.agent.host_workers import HostWorkers
from engine.runtime.agent.newcomers import Newcomers
from engine.runtime.agent.run_state import FailoverContext, InheritedProcess, InheritedRun, RunState
from engine.runtime.agent.start_up import LaunchSpec
from engine.runtime.agent.wire import StreamEnd
from engine.runtime.agent.worker_handles import WorkerHandle
from engine.runtime.process.interrupts import RunInterruptedError, breakable, holding
from engine.runtime.process.progress_board import ProgressBoard

JOB = Job(model="mlp", stages=3)
START = "3 workers began"
CUT = PartitionMessage((0, 1, 2))
NONE = cast(Any, None)


class Told:
    """The near end of a link; it keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: object) -> None:
        """Takes a message."""
        self.sent.append(message)

    def send_packet(self, packet: bytes) -> None:
        """Takes a message as it travels."""
        self.sent.append(decode(packet))

    def close(self) -> None:
        """There is nothing to close."""


def welcome(worker: int, rank: int) -> WelcomeMessage:
    ownership = fresh_ownership(JOB)
    owners, shadows = ownership.owners, ownership.shadows
    made = WelcomeMessage(worker, {}, owners, shadows, (0, 1, 2), 3, (), checkpoints="/kept", run="mlp-1", start=START)
    return replace(made, local_rank=rank)


def taken(**change: Any) -> InheritedRun:
    """Returns a run of three workers on host b; worker 2 is lost, and so was number 6."""
    child = cast(Any, SimpleNamespace(pid=70, close=lambda: None))
    processes = [InheritedProcess(worker, "b", lambda: (child, cast(Any, Told()))) for worker in range(2)]
    welcomes = {worker: welcome(worker, 1 - worker) for worker in range(2)}
    made = InheritedRun(
        Path("/a/mlp-1"), RunState(JOB), processes, lambda: None, InheritedFaults(), "a", welcomes, [CUT], 6, 1
    )
    return made._replace(**change)


@pytest.fixture(name="launch")
def _launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LaunchSpec]:
    def started(server: object, worker: int, *rest: object) -> WorkerHandle:
        child = SimpleNamespace(pid=99, close=lambda: None)
        return WorkerHandle(worker, (), cast(Any, child), cast(Any, Told()), Path("log"), host="b")

    monkeypatch.setattr(start_up, "start_worker", started)
    server = SimpleNamespace(host="b", network=None, at=lambda worker: SimpleNamespace(host="b", address="127.0.0.2"))
    recorder = SimpleNamespace(write=lambda record: None)
    with contextlib.ExitStack() as stack:
        rest = (cast(Any, recorder), (0, 0), tmp_path, str(tmp_path))
        yield LaunchSpec(stack, cast(Any, server), JOB, fresh_ownership(JOB), (0, 1, 2), *rest)


def test_a_worker_that_comes_after_a_take_over_is_told_what_the_others_were_told(launch: LaunchSpec) -> None:
    crew = launch.take_over(taken(), None)
    newcomer = crew.start_waiting()
    crew.welcome(newcomer, joins=True)
    (told,) = cast(Told, newcomer.link).sent
    assert told.worker == 7  # a number that a worker has had would be out for ever
    assert (told.start, told.run, told.checkpoints) == (START, "mlp-1", "/kept")
    assert (told.waits, told.joins, told.address, told.num_lines) == (True, True, "127.0.0.2", 8)
    assert [each.local_rank for each in crew.members.values()] == [1, 0, 2]  # each has a GPU of its own
    newcomers = Newcomers(crew.members, lambda: cast(Any, SimpleNamespace(members=(0, 1), out={})))
    newcomers.know(taken().place)
    newcomers.greet(newcomer)
    assert cast(Told, newcomer.link).sent[1:] == [CUT]


def test_a_newcomer_is_not_late_because_the_agent_stood_still() -> None:
    second = 1_000_000_000
    loading = SimpleNamespace(worker=7, state="starting")
    newcomers = Newcomers(cast(Any, {7: loading}), lambda: cast(Any, SimpleNamespace(members=(), out={})))
    assert not newcomers.late(0, 60 * second)
    assert not newcomers.late(3600 * second, 60 * second)
    looks = [newcomers.late(3600 * second + at * second // 4, 60 * second) for at in range(1, 300)]
    assert sum(map(len, looks)) == 1
    assert looks[240] and not any(looks[:240])


def test_a_host_tells_the_next_one_what_its_workers_were_told(tmp_path: Path) -> None:
    board = ProgressBoard.create(1)
    server = SimpleNamespace(host="b")
    workers = HostWorkers(cast(Any, server), NONE, (), board, tmp_path, JOB)
    heard: list[bytes] = []
    process = SimpleNamespace(
        number=1, tell=heard.append, replay=SimpleNamespace(packets=[]), to_plain=lambda: (1, 0, 70)
    )
    workers._processes[1] = cast(Any, process)
    packets = [encode(welcome(0, 0)), encode(CUT)]
    for packet in packets:
        workers.deliver(ControlHostMessage(1), packet)
    workers._obey()
    assert heard == packets
    workers.deliver(ControlHostMessage(1), packets[0])  # it is lost with that host
    workers.leave()
    workers.deliver(ControlHostMessage(1), packets[1])  # the next one is quick
    workers.follow("c", end := StreamEnd())
    frames = [read_frame(each) for each in end._unheard]
    assert [packet for header, packet in frames if isinstance(header, PastControlHostMessage)] == packets
    workers._obey()
    assert heard == [*packets, packets[1]]
    workers._processes.clear()
    workers.close()
    board.close()


def test_the_decisions_that_only_another_host_has_heard_are_recorded_here_too(tmp_path: Path) -> None:
    """The lost host sent its last commit to one of two hosts; the other one goes on, and its records have no gap."""
    written: list[Any] = []
    recorder = SimpleNamespace(write=written.append, hear=lambda record: None)
    board = ProgressBoard.create(1)
    workers = HostWorkers(cast(Any, SimpleNamespace(host="b")), cast(Any, recorder), (), board, tmp_path, JOB)
    lines = [encoded(PartitionRecord(starts=(0, 1), layers=("a", "b"), samples=8))]
    lines += [
        encoded(CommitRecord(step=step, loss=1.0, grad_norm=1.0, clip_factor=1.0, last=False)) for step in range(3)
    ]
    workers.deliver(DecisionHostMessage(0), lines[0].encode())
    workers._obey()
    workers.complete([dict(enumerate(lines)), {1: lines[1]}], "lost")
    assert [(each.of, each.line) for each in written[1:]] == [("lost", line) for line in lines[1:]]
    assert (workers.results.count, workers.results.results.committed) == (4, 2)
    workers.close()
    board.close()


class _ReachedError(Exception):
    """The start of a run has come to its store."""


@pytest.mark.parametrize("is_taken", [True, False])
def test_a_signal_before_the_agent_is_there_waits_for_it_in_a_run_that_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_taken: bool
) -> None:
    """A signal ends a run that has not begun; after a take-over SIGTERM is a notice, which the agent takes."""

    def reached(*given: object) -> None:
        with breakable():
            raise _ReachedError

    monkeypatch.setattr(session, "join_store", reached)
    adopting = contextlib.nullcontext()
    server = SimpleNamespace(
        host="b", later_ns=0, hear=NONE, records_in=lambda run: None, adopting=lambda *given: adopting
    )
    seat = FailoverContext(folder=RunFolder(tmp_path), inherited=taken() if is_taken else None)
    server.deal, server.at = lambda workers: None, lambda worker: server
    server.hear = lambda *given: None
    with holding() as interrupts:
        os.kill(os.getpid(), signal.SIGTERM)
        with contextlib.suppress(_ReachedError):
            ending = session.run_session(JOB, tmp_path / "events.jsonl", tmp_path, server=cast(Any, server), seat=seat)
            assert not is_taken
            assert ending.outcome == "interrupted"
            return
        assert is_taken
        assert interrupts.take() is signal.SIGTERM


def test_the_agent_goes_on_with_the_notices_and_with_what_newcomers_are_told(
    launch: LaunchSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host had its notice when it served: a second one kills its workers, and it leaves when they have left."""
    agent = SimpleNamespace(
        node=SimpleNamespace(enrol=lambda *given, host: None, coordination=SimpleNamespace(ownership=launch.ownership)),
        run_state=SimpleNamespace(notes=[]),
        injector=SimpleNamespace(take_over=lambda faults, lost: []),
        newcomers=Newcomers({}, NONE),
        num_notices=0,
        decide=lambda given: None,
        is_to_restart=False,
    )
    monkeypatch.setattr(session, "Agent", lambda *given, **more: agent)
    monkeypatch.setattr(session._Run, "_supervise", lambda run, agent, server: None)
    run = session._Run(cast(Any, agent.node), cast(Any, lambda group: NONE), NONE, NONE, NONE, 1.0, taken())
    assert run.train(launch, None) is cast(Any, agent)
    newcomer = WorkerHandle(7, (), NONE, cast(Any, Told()), Path("log"))
    agent.newcomers.greet(newcomer)
    assert (agent.num_notices, cast(Told, newcomer.link).sent) == (1, [CUT])


@pytest.mark.parametrize("waits", [True, False])
def test_a_second_signal_breaks_nothing_off_on_one_of_several_hosts(waits: bool) -> None:
    """It kills the workers there; the host still has to hand over, and took it for the end of its run."""
    with holding() as interrupts:
        if waits:
            interrupts.let_wait()
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        told = contextlib.nullcontext() if waits else pytest.raises(RunInterruptedError)
        with told, breakable():
            pass
        assert (interrupts.due_s - time.monotonic() > 5) is waits
