"""The injector: it carries out on real processes the outputs of the machine of fault injection."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.core.action import Action, Op
from engine.core.faults.fault import After, At, Fault, Role, Victim, Worker, slot_owner
from engine.core.job.job import Job
from engine.core.message_kinds import Message
from engine.core.messages import ArmMessage, FiredMessage
from engine.core.protocol.state import Options, Phase, State, begin
from engine.runtime.agent.injector import Injector
from engine.runtime.agent.worker_handles import WorkerHandle
from engine.runtime.process.fork_client import Child
from engine.runtime.process.link import Link
from engine.runtime.process.progress_board import ProgressBoard
from engine.runtime.process.recorder import Recorder, open_events

JOB = Job(stages=3, microbatches=4, steps=8)
ACTION = Action(1, Op.B, 2)
# Signals that a worker takes in a thread of its own, and that end nobody.
DEAF = ("sh", "-c", "trap '' TERM; while :; do sleep 0.01; done")


def kill(name: str = "first", **fields: Any) -> Fault:
    return Fault(name, At(3, ACTION), (slot_owner(ACTION),), **fields)


def after(cause: str, phase: Any, *victims: Victim, delay_ns: int = 0, **fields: Any) -> Fault:
    return Fault("second", After(cause, phase, delay_ns), victims or (Role("recoverer"),), **fields)


class Crew:
    """Three processes that do nothing, as members of a run; the test is their mouth, and decides their ownership."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.members: dict[int, WorkerHandle] = {}
        self.links: dict[int, Link] = {}
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        for worker in range(3):
            self.start(worker, "sleep", "60")
        fd = open_events(folder / "events.jsonl")
        self.recorder = Recorder(fd, -1)
        self.board = ProgressBoard.create(3)
        first = begin(Options(stages=3, redundant=True), (0, 1, 2), ((2,), (0,), (1,)), 7, 0)
        self.state: State = first._replace(phase=Phase.RUNNING, epoch=1, committed=2)

    def start(self, worker: int, *command: str) -> None:
        """Lets a worker be another process."""
        if worker in self.processes:
            self.end(worker)
        process = subprocess.Popen(command)
        near, self.links[worker] = Link.pair(blocking=False)
        child = Child(f"crew-{worker}", process.pid, os.pidfd_open(process.pid))
        self.processes[worker] = process
        self.members[worker] = WorkerHandle(worker, ((0, worker),), child, near, self.folder / "log")

    def injector(self, *faults: Fault) -> Injector:
        return Injector(JOB, faults, self.members, self.recorder, self.board, lambda: self.state)

    def ended(self, injector: Injector, worker: int) -> int:
        """Waits for the end of a worker and tells the injector, as the agent does; returns its code."""
        code = self.processes[worker].wait(10)
        self.members[worker].exit_code = code
        injector.exit_seen(worker, code)
        return code

    def moves_on(self, *out: int) -> None:
        """Makes the next epoch, in which the shadows of those who are out own their slots."""
        owners = tuple(
            self.state.shadows[slot][0] if each in out else each for slot, each in enumerate(self.state.owners)
        )
        members = tuple(each for each in self.state.members if each not in out)
        self.state = self.state._replace(epoch=self.state.epoch + 1, owners=owners, members=members)

    def told(self, worker: int) -> list[Message]:
        """Returns what a worker has been told so far."""
        found = []
        while select.select([self.links[worker]], [], [], 0)[0]:
            message = self.links[worker].receive()
            assert message is not None
            found.append(message)
        return found

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.folder / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def until(self, injector: Injector, condition: Callable[[], object]) -> None:
        """Lets the injector look at the clock until a condition holds."""
        until_s = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < until_s
            injector.look_at_clock()
            time.sleep(0.001)

    def end(self, worker: int) -> None:
        self.processes[worker].kill()
        self.processes[worker].wait(10)
        self.links[worker].close()
        self.members[worker].release()

    def close(self) -> None:
        for worker in self.processes:
            self.end(worker)
        os.close(self.recorder.fd)
        self.board.close()


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Crew]:
    """Three idle processes, which are killed at the end."""
    made = Crew(tmp_path)
    yield made
    made.close()


def test_a_fault_is_recorded_strikes_once_and_is_confirmed_by_the_exit(crew: Crew) -> None:
    injector = crew.injector(kill())
    injector.strike("first")
    (event,) = crew.events("fault")
    wanted = {"fault": "first", "do": "kill", "of": 1, "step": 3, "action": "1B2", "when": "before", "slot": [0, 1]}
    assert wanted.items() <= event.items()
    assert crew.events("confirmed") == []
    assert crew.ended(injector, 1) == -signal.SIGKILL
    assert [each["fault"] for each in crew.events("confirmed")] == ["first"]
    assert crew.told(0) == [FiredMessage("first")]
    injector.strike("first")  # the heir comes by
    assert len(crew.events("fault")) == 1
    assert crew.told(0) == []
    injector.close()
    assert crew.events("unconfirmed") == []


def test_a_process_that_is_stopped_shows_it_and_is_woken(crew: Crew) -> None:
    injector = crew.injector(kill(do="stop", parameters={"for_ns": 50_000_000}))
    injector.strike("first")
    crew.until(injector, lambda: crew.events("confirmed"))
    (event,) = crew.events("confirmed")
    assert event["how"] == "state: T"
    crew.until(injector, lambda: crew.members[1].child.state() == "S")


def test_who_does_not_leave_in_time_is_killed(crew: Crew) -> None:
    crew.start(1, *DEAF)
    injector = crew.injector(kill(do="terminate", parameters={"grace_ns": 200_000_000}))
    crew.until(injector, lambda: _ignores_sigterm(crew.processes[1].pid))
    injector.strike("first")
    assert injector.injection.grace_ns(1) == 200_000_000
    assert injector.injection.grace_ns(0) is None
    injector.sees(1, "notice", "0.2 s")
    assert len(crew.events("confirmed")) == 1
    crew.until(injector, lambda: crew.processes[1].poll() is not None)
    assert crew.processes[1].returncode == -signal.SIGKILL


def _ignores_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("SigIgn:"))
    return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


def test_nobody_is_signalled_who_has_ended(crew: Crew) -> None:
    injector = crew.injector(
        kill(do="terminate", parameters={"grace_ns": 1_000_000}),
        Fault("late", At(4, ACTION), (Worker(1),)),
    )
    injector.strike("first")
    assert crew.ended(injector, 1) == -signal.SIGTERM
    crew.members[1].release()  # its descriptor may be anybody's now
    time.sleep(0.005)
    injector.look_at_clock()
    injector.strike("late")
    injector.close()
    assert [each["fault"] for each in crew.events("unconfirmed")] == ["late"]


def test_merged_is_where_the_heir_has_done_again_what_was_done(crew: Crew) -> None:
    injector = crew.injector(kill(), after("first", "merged"))
    crew.board.begin(1, 99, "1B2", (0, 3, 0, False, 0, 0))
    injector.strike("first")
    crew.ended(injector, 1)
    crew.moves_on(1)
    crew.told(0)
    injector.arm()
    (order,) = crew.told(0)
    assert isinstance(order, ArmMessage)
    moments = [(each["id"], each["moment"]) for each in order.faults]
    assert moments == [
        ("second", {"step": 3, "action": "1B2", "when": "after"}),
        ("second", {"step": 3, "action": "1COMMIT", "when": "before"}),
    ]
    injector.strike("second")
    assert [each["of"] for each in crew.events("fault")] == [1, 0]


def test_faults_that_come_later_are_told_to_everybody(crew: Crew) -> None:
    injector = crew.injector()
    injector.add([kill()])
    assert injector.injection.known == {"first"}
    for worker in range(3):
        (order,) = crew.told(worker)
        assert isinstance(order, ArmMessage) and [each["id"] for each in order.faults] == ["first"]
    injector.strike("first")
    crew.ended(injector, 1)
    assert len(crew.events("confirmed")) == 1


def test_the_state_of_a_process_that_has_ended_is_unknown(crew: Crew) -> None:
    child = crew.members[0].child
    assert isinstance(child, Child)
    assert child.state() in ("R", "S")
    crew.processes[0].kill()
    assert select.select([child.pidfd], [], [], 10)[0]
    assert child.state() is None
