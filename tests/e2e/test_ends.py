"""Every run ends, also if a process stops, dies or cannot be killed, above all after the last commit."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from engine.core.action import Action, Op
from engine.core.faults.fault import At, Fault, slot_owner
from engine.core.hosts import ends
from engine.core.job.job import Job
from engine.runtime.agent.run_state import Ending
from engine.runtime.agent.session import run_session
from engine.runtime.process.fork_client import Child, ForkServer
from engine.runtime.process.kernel import is_alive
from tests.e2e.kill_forecast import in_one_stage
from tests.e2e.launcher import Launcher
from tests.e2e.recorded import events_of
from tests.e2e.striker import SERVER, Moment, Strike, Striker, committed

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(90), pytest.mark.usefixtures("shared_etcd")]

STEPS = 6
LAST = committed(STEPS - 1)
SMALL: dict[str, Any] = {
    **{"model": "mlp", "stages": 3, "microbatches": 4, "steps": STEPS, "validate_every": 3},
    "check_pure": False,  # which takes longer than such a run
}
TWICE: dict[str, Any] = {"stages": 2, "pipelines": 2}
ALONE: dict[str, Any] = {"validate_every": 0}  # no worker waits for the others to finish
SILENCE = "2s"  # longer than a busy machine keeps a healthy worker from running
SOON_S = 40.0  # silence, a recovery, the grace to leave, and delays of a busy machine


class Ended:
    """A run that has ended, with its leftovers."""

    def __init__(self, ending: Ending, folder: Path, seconds: float):
        self.ending = ending
        self.seconds = seconds
        run_state = ending.view.run_state
        self.result = run_state.rows, run_state.losses, run_state.validations
        self.known = events_of(folder / "events.jsonl")

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.known if event["event"] == kind]


Run = Callable[..., Ended]


@pytest.fixture(name="run")
def _run(tmp_path_factory: pytest.TempPathFactory, server: ForkServer) -> Run:
    """Returns a function that runs a small job and strikes its processes."""

    def run(*strikes: Strike, options: dict[str, Any] | None = None, **fields: Any) -> Ended:
        folder = tmp_path_factory.mktemp("run")
        job = Job(**{"silent_after": SILENCE, **SMALL, **fields})
        started_s = monotonic()
        with Striker(folder / "events.jsonl", strikes) as striker:
            ending = run_session(job, folder / "events.jsonl", folder, server=server, **(options or {}))
        assert striker.left == []
        return Ended(ending, folder, monotonic() - started_s)

    return run


@pytest.fixture(name="twin", scope="module")
def _twin(tmp_path_factory: pytest.TempPathFactory, server: ForkServer) -> Callable[..., Any]:
    """Returns a function that gives the result of a job without strikes."""
    known: dict[str, Any] = {}

    def twin(**fields: Any) -> Any:
        job = in_one_stage(Job(**{**SMALL, **fields}))
        name = repr(job)
        if name not in known:
            folder = tmp_path_factory.mktemp("twin")
            run_state = run_session(job, folder / "events.jsonl", folder, server=server).view.run_state
            known[name] = run_state.rows, run_state.losses, run_state.validations
        return known[name]

    return twin


def finished(ended: Ended) -> None:
    """Checks that a run has finished well, and soon."""
    assert (ended.ending.outcome, ended.ending.exit_code) == ("finished", 0), ended.ending.error
    assert ended.seconds < SOON_S
    pids = [event["child"] for event in ended.events("started")]
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


def has_finished(worker: int) -> Moment:
    """Returns the moment at which a worker has reported its end, and waits for permission to leave."""
    return lambda event: event["event"] == "finished" and event["of"] == worker


def late_before(moment: Moment) -> list[Fault]:
    """Returns a stop of the last worker in its last step, unless the moment is the last commit.

    Without it all workers may have left before a strike at the first one that has finished comes.
    """
    step = Action(2, Op.STEP)
    late = Fault("late", At(STEPS - 1, step), (slot_owner(step),), "stop", {"for_ns": 500_000_000})
    return [] if moment is LAST else [late]


@pytest.mark.parametrize(
    ("moment", "fields"),
    [
        *((LAST, {}), (has_finished(1), ALONE)),
        pytest.param(has_finished(1), {**ALONE, "redundancy": "none"}, marks=pytest.mark.soak),
        pytest.param(LAST, TWICE, marks=pytest.mark.soak),
    ],
    ids=["last commit", "done", "done, nothing twice", "two pipelines"],
)
def test_a_worker_that_stops_after_the_last_commit_keeps_nobody(
    run: Run, twin: Callable[..., Any], moment: Moment, fields: dict[str, Any]
) -> None:
    also = [Strike(LAST, 2)] if fields == TWICE else []
    ended = run(*also, Strike(moment, 1, signal.SIGSTOP), options={"faults": late_before(moment)}, **fields)
    finished(ended)
    assert ended.ending.missing == ()
    assert ended.result == twin(**fields)
    (code,) = (event["code"] for event in ended.events("exit") if event["of"] == 1)
    assert code == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_without_redundancy_nobody_waits_for_who_cannot_come(run: Run, number: signal.Signals) -> None:
    """A worker dies before it reports on the last step: every step is committed, and the missing parts are named."""
    step = Action(1, Op.STEP)
    do = {signal.SIGSTOP: "stop", signal.SIGKILL: "kill"}[number]
    fault = Fault("first", At(STEPS - 1, step), (slot_owner(step),), do)
    ended = run(options={"faults": [fault]}, redundancy="none")
    finished(ended)
    assert len(ended.result[1]) == STEPS
    last = STEPS - 1
    assert ended.ending.missing == (
        f"the hashes of step {last}",
        f"the validation after step {last}",
        "the last checkpoint",
    )
    (cut,) = ended.events("cut_short")
    assert "the state of stage 1 is lost in epoch 2; last committed step 5" in cut["reason"]


@pytest.fixture(name="immortal")
def _immortal(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Child]]:
    """Keeps the signals of this process from worker 1, and yields it; the test stops it by hand."""
    found: list[Child] = []
    send, close = Child.signal, Child.close

    def signal_others(child: Child, number: signal.Signals) -> None:
        if child.name == "bamboo-1":
            found.append(child)
        else:
            send(child, number)

    monkeypatch.setattr(Child, "signal", signal_others)
    monkeypatch.setattr("engine.runtime.process.fork_client._GONE_S", 0.2)
    monkeypatch.setattr(ends, "GONE_NS", 200_000_000)
    monkeypatch.setattr(Child, "close", lambda child, *patience: None if child in found else close(child, *patience))
    yield found
    monkeypatch.undo()
    for child in dict.fromkeys(found):
        child.close()


@pytest.mark.parametrize(
    ("moment", "fields"),
    [pytest.param(LAST, {}, marks=pytest.mark.soak), (has_finished(1), ALONE)],
    ids=["last commit", "done"],
)
def test_a_process_that_not_even_sigkill_ends_is_left_behind(
    run: Run, immortal: list[Child], moment: Moment, fields: dict[str, Any]
) -> None:
    ended = run(Strike(moment, 1, signal.SIGSTOP), options={"faults": late_before(moment)}, **fields)
    assert (ended.ending.outcome, ended.ending.exit_code) == ("finished", 0), ended.ending.error
    assert ended.seconds < SOON_S
    (left,) = ended.events("left_behind")
    assert left["child"] == immortal[0].pid
    said = f"worker 1 (pid {left['child']}) survived SIGKILL and is left behind"
    assert said in ended.ending.view.run_state.notes


class Grip:
    """Keeps worker 1 from ending by SIGKILL after a commit: a thread traces it and holds it in its last stop."""

    SEIZE, STOP_AT_EXIT = 0x4206, 0x40  # ptrace(2): PTRACE_SEIZE, PTRACE_O_TRACEEXIT

    def __init__(self) -> None:
        self.pid = self.error = 0
        self.has_it, self.lets_go = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._hold)

    def moment(self, event: dict[str, Any]) -> bool:
        """Returns whether it is the moment of the strike; the worker is traced by then."""
        if event["event"] == "started" and event["of"] == 1:
            self.pid = event["child"]
        is_now = committed(1)(event)
        if is_now:
            self.thread.start()
            self.has_it.wait()
        return is_now

    def _hold(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        no_address, options = ctypes.c_void_p(None), ctypes.c_void_p(self.STOP_AT_EXIT)
        if libc.ptrace(ctypes.c_long(self.SEIZE), ctypes.c_long(self.pid), no_address, options):
            self.error = ctypes.get_errno()
        self.has_it.set()
        self.lets_go.wait()  # a thread that ends traces no more


def test_a_process_that_outlives_sigkill_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, run: Run, twin: Callable[..., Any]
) -> None:
    """No signal is kept from it here: the kernel holds it, as it holds one that waits for a lost disk."""
    monkeypatch.setattr("engine.runtime.process.fork_client._GONE_S", 0.2)
    monkeypatch.setattr(ends, "GONE_NS", 200_000_000)
    grip = Grip()
    try:
        ended = run(Strike(grip.moment, 1))
        if grip.error:
            pytest.skip(f"no process may be traced here: {os.strerror(grip.error)}")
        assert (ended.ending.outcome, ended.ending.exit_code) == ("finished", 0), ended.ending.error
        assert ended.seconds < SOON_S
        assert ended.result == twin()
        assert [each["child"] for each in ended.events("left_behind")] == [grip.pid]
        assert is_alive(grip.pid)
    finally:
        grip.lets_go.set()
        grip.thread.join()


def test_training_outlives_the_fork_server(run: Run, twin: Callable[..., Any], server: ForkServer) -> None:
    """A new fork server replaces it for the next run."""
    first = server.pid
    ended = run(Strike(committed(0), SERVER), Strike(committed(2), 1))
    finished(ended)
    assert [event["child"] for event in ended.events("fork_server_ended")] == [first]
    assert ended.result == twin() == run().result
    assert server.pid != first


def test_a_fork_server_that_stops_ends_no_run(run: Run, twin: Callable[..., Any], server: ForkServer) -> None:
    """It gets no request while the run lives; the next run gives it up."""
    ended = run(Strike(committed(0), SERVER, signal.SIGSTOP))
    finished(ended)
    ended = run()
    finished(ended)
    assert ended.result == twin()


@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.soak), "at once"])
def test_nothing_outlives_launcher_and_fork_server(launch: Callable[..., Launcher], when: str) -> None:
    """A stopped worker ends too."""
    arguments = ("--model", "timed", "--stages", "3", "--microbatches", "4", "--steps", "5000", "--validate-every", "0")
    launcher = launch("run", *arguments)
    launcher.wait_until(lambda: len(launcher.events("commit")) >= 2)
    processes = launcher.processes()
    if when == "before":
        os.kill(processes["bamboo-fork"], signal.SIGKILL)
        launcher.wait_until(lambda: launcher.events("fork_server_ended"))
    os.kill(processes["bamboo-1"], signal.SIGSTOP)
    if when == "at once":
        os.kill(processes["bamboo-fork"], signal.SIGKILL)
    launcher.process.kill()
    launcher.process.wait()
    assert launcher.leftovers() == []
