"""Waiting workers: one takes the place of a worker that dies, and its own death is no matter of the others."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.core.history.process_records import StartedRecord
from engine.core.job.job import Job
from engine.core.units import Args
from engine.runtime.agent import newcomers as asking
from engine.runtime.agent.newcomers import Newcomers
from engine.runtime.process.fork_client import ForkServer
from tests.e2e.conftest import Launch
from tests.e2e.kill_runs import Runs, differences
from tests.e2e.launcher import Launcher
from tests.e2e.test_real_kills import exits_of, fault
from tests.e2e.test_restarts import Killer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180), pytest.mark.usefixtures("shared_etcd")]

JOB = Job(
    model="mlp",
    model_args={"width": 16, "depth": 11, "dropout": 0.1},
    stages=3,
    blocks=4,
    microbatches=6,
    microbatch_size=2,
    steps=14,
    validate_every=0,
    elastic=True,
    standby=1,
    check_pure=False,
)
TIMED: Args = {"layers": 12, "forward_ms": 2, "backward_ms": 4, "width": 16}
LONG = (
    "run --model mlp --set model_args.depth=10 --stages 3 --microbatches 4 --steps 100000 --validate-every 0 --audit 0 "
    "--checkpoint-every 0 --no-twin"
).split()
SLOW = (
    "run --model timed --set model_args.layers=3 --set model_args.forward_ms=1000 --set model_args.backward_ms=1000 "
    "--stages 3 --blocks 1 --microbatches 2 --steps 100000 --validate-every 0 --no-twin"
).split()
LOADS_WITHIN_NS = 100_000_000
MOST_SHARE = 0.001  # of a core
MOST_BYTES = 40 * 2**20


@pytest.fixture(name="runs", scope="module")
def _runs(tmp_path_factory: pytest.TempPathFactory, server: ForkServer) -> Runs:
    """Returns a runner of jobs; it runs each twin once."""
    return Runs(tmp_path_factory.mktemp("waiting"), server)


@pytest.mark.parametrize("moment", ["5:5:F:2", pytest.param("5:0:B:1", marks=pytest.mark.soak), "5:11:STEP"])
def test_a_waiting_worker_takes_the_place_of_a_dead_one(runs: Runs, moment: str) -> None:
    ending, events = runs.run(JOB, [fault(moment, JOB, "kill")])
    assert list(differences(ending, runs.twin(replace(JOB, standby=0)))) == []
    first, verdict, moved = (event for event in events if event["event"] == "epoch")
    (victim,) = set(first["members"]) - set(verdict["members"])
    assert first["members"] == [0, 1, 2]
    assert moved["members"] == verdict["members"] == sorted({0, 1, 2, 3} - {victim})
    assert [each["planned"] for each in (first, verdict, moved)] == [False, False, True]
    assert {each: moved["owners"].count(each) for each in moved["members"]} == dict.fromkeys(moved["members"], 4)
    formed = {event["epoch"] for event in events if event["event"] == "mark" and event["phase"] == "regroup"}
    assert formed == {verdict["epoch"]}, "no second group is formed"
    assert exits_of(events) == {each: -9 if each == victim else 0 for each in range(4)}


def test_it_owns_a_full_share_two_steps_after_the_open_one(tmp_path: Path, server: ForkServer) -> None:
    """Steps are long enough to prepare the hand-over in one, also on a busy machine."""
    job = replace(JOB, model="timed", model_args=TIMED, data_args={"features": 16}, steps=6)
    ending, events = Runs(tmp_path, server).run(job, [fault("1:5:F:2", job, "kill")])
    assert ending.error is None
    _, verdict, moved = (event for event in events if event["event"] == "epoch")
    plans = {event["epoch"]: event for event in events if event["event"] == "plan"}
    open_step = plans[verdict["epoch"]]["committed"] + 1
    handed_over = plans[moved["epoch"]]
    assert (open_step, handed_over["prepared"], handed_over["committed"] + 1) == (1, True, open_step + 2)
    assert moved["owners"].count(3) == job.blocks


def test_the_death_of_a_waiting_worker_is_no_epoch(launch: Launch) -> None:
    run = launch(*LONG, "--standby", "2")
    waits_in(run, 2)
    os.kill(pid_of(run, 3), signal.SIGKILL)
    run.wait_until(lambda: any(event["lost"] for event in run.events("waiting")))
    committed = len(run.events("commit"))
    run.wait_until(lambda: len(run.events("commit")) > committed + 5)
    run.interrupt()
    assert run.wait().code == 130
    lost = [(event["of"], event["lost"]) for event in run.events("waiting") if event["lost"]]
    assert lost == [(3, "was killed (SIGKILL)"), (4, "was released, because the run ended")]
    assert len(run.events("epoch")) == 1
    ends = {event["of"]: (event["code"], event["expected"]) for event in run.events("exit")}
    assert ends == {0: (0, True), 1: (0, True), 2: (0, True), 3: (-9, True), 4: (0, True)}


def test_a_waiting_worker_without_memory_for_a_block_waits_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: ForkServer
) -> None:
    """The host of the run has no memory left but that of the blocks: no verdict takes the worker in, and it is told."""
    monkeypatch.setattr(asking, "_free_bytes", lambda: 0)
    timed: Args = {"features": 16}
    job = replace(JOB, device="cpu", model="timed", model_args=TIMED, data_args=timed, steps=12)
    ending, events = Runs(tmp_path, server).run(job, [fault("8:5:F:2", job, "kill")])
    assert (ending.outcome, ending.error) == ("finished", None)
    assert {worker for each in events_of(events, "epoch")[1:] for worker in each["members"]} == {0, 2}
    (told,) = events_of(events, "cramped")
    assert (told["of"], told["why"].startswith("keeps waiting: one block takes ")) == (3, True)
    assert f"worker 3 {told['why']}" in ending.view.run_state.notes
    assert exits_of(events) == {0: 0, 1: -9, 2: 0, 3: 0}


@pytest.mark.soak
def test_waiting_workers_are_started_again_with_the_others_from_a_checkpoint(launch: Launch) -> None:
    """No shadow holds the block of the worker that dies, so all begin again; the bits are those of one run."""
    job = "run --model mlp --set model_args.depth=11 --stages 3 --microbatches 4 --steps 8 --validate-every 0".split()
    run = launch(*job, "--standby", "1", "--redundancy", "none", "--checkpoint-every", "2", "--kill", "5:5", "--json")
    assert run.wait(120).code == 0
    assert [each["of"] for each in run.events("started")] == [0, 1, 2, 3] * 2
    assert [each["of"] for each in run.events("waiting") if not each["lost"]] == [3, 3]
    assert len(run.events("resumed")) == 1
    (comparison,) = run.events("comparison")
    assert (comparison["difference"], comparison["compared"]) == (None, 8)


@pytest.mark.soak
def test_a_waiting_worker_takes_over_from_all_members(launch: Launch) -> None:
    """All of them get their notice, and the grace suffices for many steps: it owns all blocks, and the bits stay."""
    job = [*LONG, "--steps", "300", "--blocks", "3"]
    run = launch(*job, "--standby", "1")
    waits_in(run, 1)
    for worker in range(3):
        os.kill(pid_of(run, worker), signal.SIGTERM)
    assert run.wait(120).code == 0
    assert (run.events("epoch")[-1]["members"], run.events("stays")) == ([3], [])
    assert {each["of"]: each["code"] for each in run.events("exit")} == {0: 86, 1: 86, 2: 86, 3: 0}
    plain = launch(*job)
    assert plain.wait(120).code == 0
    assert [each["loss"] for each in run.events("commit")] == [each["loss"] for each in plain.events("commit")]


def test_signals_to_the_launcher_and_to_a_waiting_worker_need_no_sigkill(launch: Launch) -> None:
    """A step of the members takes some seconds: less than the time that the sender of a SIGTERM gives."""
    run = launch(*SLOW, "--standby", "2")
    run.wait_until(lambda: len(run.events("waiting")) == 2 and run.events("go"))
    os.kill(pid_of(run, 3), signal.SIGTERM)
    run.wait_until(lambda: run.events("exit"))
    run.interrupt(signal.SIGTERM)
    assert run.wait().code == 143
    lost = {event["of"]: event["lost"] for event in run.events("waiting") if event["lost"]}
    assert lost == {3: "left while waiting", 4: "was released, because the run ended"}
    assert run.events("killed") == []
    codes = {event["of"]: event["code"] for event in run.events("exit")}
    assert (codes[3], codes[4], len(codes)) == (86, 0, 5)


def test_a_waiting_worker_that_hangs_while_it_loads_is_given_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: ForkServer
) -> None:
    """It is stopped by a signal at its start, as if its data never opened; the members train meanwhile."""
    late = Newcomers.late
    monkeypatch.setattr(Newcomers, "late", lambda own, now_ns, limit_ns: late(own, now_ns, LOADS_WITHIN_NS))
    Killer(monkeypatch, StartedRecord, 3, number=signal.SIGSTOP)
    job = replace(JOB, model="timed", model_args=TIMED, data_args={"features": 16}, steps=16)
    ending, events = Runs(tmp_path, server).run(job)
    assert (ending.outcome, ending.error) == ("finished", None)
    assert [(event["of"], event["why"]) for event in events if event["event"] == "killed"] == [
        (3, "has not loaded its code and data within 600 s")
    ]
    assert [(event["of"], event["lost"]) for event in events if event["event"] == "waiting"] == [
        (3, "was killed (SIGKILL)")
    ]
    given_up, lost = ending.view.run_state.notes
    assert given_up.startswith("worker 3 (pid ")
    assert ", not yet a member, has not loaded its code and data within 600 s, and is given up; see " in given_up
    assert lost == "worker 3, not yet a member, was killed (SIGKILL)"
    assert len([event for event in events if event["event"] == "epoch"]) == 1


def test_a_death_before_training_starts_all_workers_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: ForkServer
) -> None:
    Killer(monkeypatch, StartedRecord, 1)
    runs = Runs(tmp_path, server)
    ending, events = runs.run(JOB, steps=2)
    assert (ending.outcome, ending.error) == ("finished", None)
    assert [each["of"] for each in events if each["event"] == "started"] == [0, 1, 2, 3] * 2
    assert [each["event"] for each in events].count("restart") == 1
    assert len([each for each in events if each["event"] == "epoch"]) == 1


@pytest.mark.parametrize("seconds", [5, pytest.param(60, marks=pytest.mark.soak)])
def test_a_waiting_worker_costs_almost_nothing(launch: Launch, seconds: float) -> None:
    run = launch(*LONG, "--standby", "1")
    waits_in(run, 1)
    waiting = psutil.Process(pid_of(run, 3))
    before, committed = processor_ns(waiting), len(run.events("commit"))
    with pytest.raises(psutil.TimeoutExpired):
        waiting.wait(seconds)
    spent = processor_ns(waiting) - before
    used = waiting.memory_full_info().uss
    print(f"{spent / 1e6:.2f} ms of processor time in {seconds} s, {used / 2**20:.1f} MiB of its own")
    assert len(run.events("commit")) > committed, "the others train meanwhile"
    assert spent <= MOST_SHARE * seconds * 1e9
    assert used <= MOST_BYTES


def waits_in(run: Launcher, number: int) -> None:
    """Waits until so many workers wait, and the others train."""
    run.wait_until(lambda: len(run.events("waiting")) == number and len(run.events("commit")) > 3)


def events_of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == kind]


def pid_of(run: Launcher, worker: int) -> int:
    return next(int(event["child"]) for event in run.events("started") if event["of"] == worker)


def processor_ns(process: psutil.Process) -> int:
    """Returns the processor time of all threads of a process, finer than the ticks of its accounts."""
    threads = Path(f"/proc/{process.pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads)
