"""The recoveries of the live table: it reads the events once a worker is gone, and not before."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

from engine.core.errors import StorageError
from engine.core.job.job import Job
from engine.harness.live_recoveries import LiveRecoveries
from engine.runtime.agent.run_state import RunState, RunView, WorkerView
from engine.runtime.process.progress_board import Progress
from tests.core.made_records import lines_of


class AtOnce(Executor):
    """Runs each call while it is submitted."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Returns the result of a call, as one that is over."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except StorageError as error:
            future.set_exception(error)
        return future


class Counting(ThreadPoolExecutor):
    """Counts its calls."""

    num_calls = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Counts one more."""
        self.num_calls += 1
        return super().submit(fn, *args, **kwargs)


JOB = Job(stages=2, steps=99)
THREE = Job(stages=3, steps=99)


def view(num_steps: int, *states: str) -> RunView:
    workers = [
        WorkerView(worker, 100 + worker, ((0, worker),), state, Progress(0, 0, ""), 0, 0)
        for worker, state in enumerate(states)
    ]
    return RunView(RunState(JOB, losses=[0.5] * num_steps), tuple(workers))


def append(path: Path, *events: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(lines_of(events))


def commit(step: int, at_ms: int) -> dict[str, Any]:
    return {"event": "commit", "step": step, "at_ns": at_ms * 1_000_000}


def failure(worker: int, heir: int, at_ms: int, number: int = 1) -> list[dict[str, Any]]:
    at_ns = at_ms * 1_000_000
    verdict = [[worker, "was killed (SIGKILL)"]]
    return [
        {"event": "exit", "of": worker, "code": -9, "expected": False, "seen_ns": at_ns, "at_ns": at_ns},
        {"event": "epoch", "epoch": number, "owners": [heir, heir], "verdict": verdict, "reason": "", "at_ns": at_ns},
        {"event": "go", "epoch": number, "at_ns": at_ns + 250_000_000},
    ]


STARTED: list[dict[str, Any]] = [
    {"event": "job", "stages": 2, "steps": 99},
    *({"event": "started", "of": worker, "slots": [[0, worker]]} for worker in range(2)),
]


def test_a_recovery_is_told_once_when_its_step_is_committed(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    live = LiveRecoveries(JOB, path, AtOnce())
    assert live.look(view(0, "starting", "starting")) == []
    append(path, *STARTED, {"event": "go", "epoch": 0, "at_ns": 0})
    for step in range(4):
        append(path, commit(step, step))
        assert live.look(view(step + 1, "running", "running")) == []
    append(path, *failure(1, 0, 10))
    assert live.look(view(4, "running", "dead")) == []
    assert live.slots(1) == ((0, 1),)
    assert live.owners[0, 1] == 1
    append(path, commit(4, 300))
    assert live.look(view(5, "running", "dead")) == [
        "worker 1 was killed (SIGKILL); worker 0 took over stage 1; training stalled for 296 ms, 0 steps lost"
    ]
    assert live.look(view(6, "running", "dead")) == []
    assert live.slots(0) == ((0, 0), (0, 1))
    assert live.slots(1) == ((0, 1),)
    assert live.owners == {(0, 0): 0, (0, 1): 0}


def test_slots_that_were_handed_over_before_are_not_told_as_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    live = LiveRecoveries(THREE, path, AtOnce())
    append(path, {"event": "job", "stages": 3, "steps": 99}, {"event": "go", "epoch": 0, "at_ns": 0})

    def look(num_steps: int, *workers: tuple[str, tuple[int, ...]]) -> list[str]:
        views = [
            WorkerView(worker, 100, tuple((0, stage) for stage in stages), state, Progress(0, 0, ""), 0, 0)
            for worker, (state, stages) in enumerate(workers)
        ]
        return live.look(RunView(RunState(THREE, losses=[0.5] * num_steps), tuple(views)))

    for step in range(30):
        append(path, commit(step, step))
        if step == 10:
            moved = {"event": "epoch", "epoch": 1, "owners": [0, 0, 2], "verdict": [], "reason": "", "planned": True}
            append(path, moved | {"at_ns": step * 1_000_000})
        second = ("running", (1,) if step < 10 else ())
        assert look(step + 1, ("running", (0,) if step < 10 else (0, 1)), second, ("running", (2,))) == []
    assert live.owners == {(0, 0): 0, (0, 1): 0, (0, 2): 2}
    died = {"event": "epoch", "epoch": 2, "owners": [0, 0, 0], "verdict": [[2, "was killed (SIGKILL)"]], "reason": ""}
    append(path, died | {"at_ns": 40_000_000}, {"event": "go", "epoch": 2, "at_ns": 50_000_000})
    assert look(30, ("running", (0, 1, 2)), ("running", ()), ("dead", (2,))) == []
    append(path, commit(30, 60))
    (told,) = look(31, ("running", (0, 1, 2)), ("running", ()), ("dead", (2,)))
    assert "worker 0 took over stage 2;" in told


def test_the_first_epoch_is_no_recovery_and_none_is_told_twice(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append(path, *STARTED)
    live = LiveRecoveries(JOB, path, AtOnce())
    live.look(view(0, "starting", "starting"))
    joined = {"event": "epoch", "epoch": 1, "owners": [0, 1], "verdict": [], "reason": "all have joined"}
    append(path, joined | {"at_ns": 0}, {"event": "go", "epoch": 1, "at_ns": 1})
    append(path, *failure(1, 0, 10, 2))
    assert live.look(view(0, "running", "dead")) == []
    append(path, commit(0, 300))
    stalled = "training stalled for at least 250 ms, at most 300 ms"  # no step was usual before it
    told = [f"worker 1 was killed (SIGKILL); worker 0 took over stage 1; {stalled}, 0 steps lost"]
    assert live.look(view(1, "running", "dead")) == told
    append(path, *failure(0, 1, 400, 3), commit(1, 800))  # at once, before the picture has looked again
    assert live.look(view(1, "dead", "dead")) == []
    (second,) = live.look(view(2, "dead", "dead"))
    assert second.startswith("worker 0 was killed (SIGKILL); worker 1 took over")


def test_what_happened_long_before_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("no event\n")
    live = LiveRecoveries(JOB, path, AtOnce())
    for num_steps in range(14):
        live.look(view(num_steps, "running", "running"))
    append(path, commit(13, 3))
    live.look(view(14, "running", "running"))
    append(path, *failure(1, 0, 10), commit(14, 300))
    assert live.look(view(14, "running", "dead")) == []
    assert len(live.look(view(15, "running", "dead"))) == 1


def test_no_look_waits_for_a_read_and_the_last_one_does(tmp_path: Path) -> None:
    path, may_read = tmp_path / "events.jsonl", Event()
    with Counting(1) as readers:
        readers.submit(may_read.wait, 60.0)
        live = LiveRecoveries(JOB, path, readers)
        append(path, *STARTED, {"event": "go", "epoch": 0, "at_ns": 0}, commit(0, 1), commit(1, 2))
        live.look(view(2, "running", "running"))
        append(path, *failure(1, 0, 10), commit(2, 300))
        live.look(view(2, "running", "dead"))
        for num_steps in (3, 4, 5):
            assert live.look(view(num_steps, "running", "dead")) == []
        assert readers.num_calls == 2, "the wait, and one read: the next one begins when it is over"
        may_read.set()
        assert len(live.lines(is_last=True)) == 1
        assert live.lines(is_last=True) == []


def test_the_end_of_a_run_is_no_failure(tmp_path: Path) -> None:
    live = LiveRecoveries(JOB, tmp_path / "events.jsonl", AtOnce())
    live.look(view(0, "running", "running"))
    assert live.look(view(99, "left", "left")) == []
    assert live.look(view(99, "left", "left")) == []


def test_one_that_left_without_a_recovery_is_not_looked_for_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append(path, commit(0, 1))
    live = LiveRecoveries(Job(stages=2, steps=1000), path, AtOnce())
    live.look(view(1, "running", "running"))
    for num_steps in range(1, 20):
        assert live.look(view(num_steps, "running", "left")) == []
    path.unlink()
    assert live.look(view(21, "running", "left")) == []
