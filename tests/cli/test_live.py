"""The live table in terminals of several widths."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bamboo_cli import live
from bamboo_cli.live import LivePicture, untold
from bamboo_cli.worker_rows import awaited, doing
from engine.core.job.job import Job
from engine.runtime.agent.run_state import RunState, RunView, WorkerView
from engine.runtime.process.progress_board import Progress

BAR = "\u2501\u2578\u257a"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("width", [60, 80, 200])
def test_each_part_has_lines_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    screen, job = _Terminal(), Job(stages=1, steps=9)
    console = Console(file=screen, force_terminal=True, width=width, height=20, color_system=None, _environ={})
    monkeypatch.setattr(live, "console", lambda **_: console)
    monkeypatch.setattr("sys.stderr", screen)
    worker = WorkerView(0, 100, ((0, 0),), "running", Progress(1, 0, ""), 0, 0)
    with LivePicture(job, tmp_path / "a-run" / "events.jsonl") as picture:
        picture.show(RunView(RunState(job, losses=[0.5]), (worker,)))
        shown = screen.getvalue()
    lines = [line.rpartition("\r")[2].rpartition("\x1b[2K")[2] for line in shown.splitlines()]
    (line,) = [line for line in lines if "worker" in line]
    assert line.startswith("worker")
    (bar,) = [line for line in lines if BAR[0] in line]
    assert set(bar.strip()) <= {*BAR}
    assert "\x1b]0;a-run: step 1/9\x07" in shown
    whole = screen.getvalue()
    assert whole.startswith("\x1b[22;0t") and whole.endswith("\x1b[23;0t"), "the old title is back"


def test_the_title_has_the_time_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, now = Job(stages=1, steps=7300), [0.0]
    monkeypatch.setattr("bamboo_cli.live.time.monotonic", lambda: now[0])
    titles: list[str] = []
    with LivePicture(job, tmp_path / "events.jsonl") as picture:
        monkeypatch.setattr(picture._console, "set_window_title", titles.append)
        for num_steps in (50, 100):
            picture._show(RunView(RunState(job, losses=[0.5] * num_steps), ()))
            picture._entitle(num_steps, is_interrupted=False)
            now[0] += 1.0
        view = RunView(RunState(job, losses=[0.5] * 150), (), is_interrupted=True)
        picture._show(view)
        picture._entitle(150, is_interrupted=True)
        assert picture._line(view) == "stopping: step 150/7300  loss 0.5000", "nobody knows when it stops"
    assert [title.partition(": ")[2] for title in titles] == [
        *("step 50/7300", "step 100/7300, 0:02:24 left", "step 150/7300"),
    ]


def test_what_users_are_told_at_once_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_state = RunState(Job(stages=1, steps=9), losses=[0.5])
    with LivePicture(run_state.job, tmp_path / "events.jsonl") as picture:
        for text in ("one", "one", "two"):
            run_state.note(text)
            picture.show(RunView(run_state, ()))
    assert [line for line in capsys.readouterr().err.splitlines() if line in ("one", "two")] == ["one", "two"]


@pytest.mark.parametrize(
    ("epochs", "samples", "line"),
    [
        (5, 384, "epoch 2/5  step 15/60  loss 0.5000"),
        (5, 480, "epoch 2/5  step 15/60  loss 0.5000"),  # one whole pass is over
        (0, 480, "step 15/60  epoch 1.00  loss 0.5000"),
        (0, 0, "step 15/60  loss 0.5000"),
    ],
)
def test_the_epoch_stands_beside_the_step(tmp_path: Path, epochs: int, samples: int, line: str) -> None:
    job = Job(stages=1, steps=60, epochs=epochs)
    with LivePicture(job, tmp_path / "events.jsonl") as picture:
        state = RunState(job, losses=[0.5] * 15, samples=samples)
        assert drawn(picture, RunView(state, views(job, {})), 100, 30)[0].startswith(line)


@pytest.mark.parametrize(
    ("states", "line"),
    [({1: "starting"}, "starting: 2 of 3 workers ready; waiting for worker 1"), ({}, "step 0/60")],
)
def test_before_the_first_commit_a_line_says_who_is_late_or_how_many_steps_there_are(
    tmp_path: Path, states: dict[int, str], line: str
) -> None:
    job = Job(stages=3, steps=60)
    with LivePicture(job, tmp_path / "events.jsonl") as picture:
        assert drawn(picture, RunView(RunState(job), views(job, states)), 100, 30)[0].startswith(line)


def views(job: Job, states: dict[int, str], **of_one: Any) -> tuple[WorkerView, ...]:
    """Returns one worker per stage; `states` are those of workers that do not run, `of_one` holds for worker 1."""
    return tuple(
        WorkerView(
            worker,
            100 + worker,
            ((0, worker),),
            states.get(worker, "running"),
            Progress(3, 0, f"{worker}F0"),
            0,
            0,
            **(of_one if worker == 1 else {}),
        )
        for worker in range(job.stages)
    )


def drawn(picture: LivePicture, view: RunView, width: int, height: int) -> list[str]:
    """Returns the last lines that a picture drew on a terminal of this size."""
    picture.show(view)
    console = Console(file=io.StringIO(), width=width, height=height)
    with console.capture() as capture:
        console.print(picture._picture(view))
    return capture.get().splitlines()


@pytest.mark.parametrize("width", [60, 80])
def test_a_screen_that_is_too_small_shows_the_dead_and_counts_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """Before, the last rows were cut off, and with them a worker that had died."""
    job = Job(stages=24, steps=9)
    console = Console(file=_Terminal(), force_terminal=True, width=width, height=24, _environ={})
    monkeypatch.setattr(live, "console", lambda **_: console)
    monkeypatch.setattr("sys.stderr", console.file)
    view = RunView(RunState(job, losses=[0.5]), views(job, {22: "dead"}))
    with LivePicture(job, tmp_path / "events.jsonl") as picture:
        picture.show(RunView(view.run_state, views(job, {})))
        lines = drawn(picture, view, width, 24)
    assert len(lines) <= 24
    assert [line.split()[:4] for line in lines if "dead" in line] == [["22", "122", "22", "dead"]]
    workers = [line for line in lines if "waits" in line or "F0" in line]
    assert lines[-1].startswith(f"\u2026 {24 - len(workers)} more workers, all running")


def test_a_line_says_on_whom_training_waits_and_comes_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before, the same "step 1/9  loss 0.5000" came every two seconds."""
    job, now = Job(stages=3, steps=9), [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with LivePicture(job, tmp_path / "events.jsonl") as picture:
        for tick in range(120):
            now[0] = tick / 4
            stopped_s = max(0.0, now[0] - 3)
            picture.show(RunView(RunState(job, losses=[0.5]), views(job, {}, silent_s=stopped_s)))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) < 7
    assert lines[-1].startswith("step 1/9  loss 0.5000  no step for 16 s: waiting for worker 1, silent for 13 s")
    assert len({*lines}) == len(lines)


def test_the_start_is_told_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before, the same line came every two seconds."""
    job, now = Job(stages=3, steps=9), [0.0]
    monkeypatch.setattr("time.monotonic", lambda: 100.0 + now[0])
    with LivePicture(job, tmp_path / "events.jsonl") as picture:
        for now[0] in range(60):
            doing = f"builds the model for {now[0]:.0f} s (mine.py:{now[0]:.0f}, in forward)" if now[0] >= 5 else ""
            states = {1: "starting", 2: "starting"} if now[0] < 12 else {1: "starting"}
            picture.show(RunView(RunState(job), views(job, states, doing=doing)))
    assert [line.partition(" (")[0] for line in capsys.readouterr().err.splitlines()] == [
        "starting: 1 of 3 workers ready; waiting for worker 1, worker 2",
        "starting: 1 of 3 workers ready; waiting for worker 1, which builds the model for 5 s",
        "starting: 2 of 3 workers ready; waiting for worker 1, which builds the model for 12 s",
        "starting: 2 of 3 workers ready; waiting for worker 1, which builds the model for 42 s",
    ]


def test_those_waited_for_are_named_the_longest_first() -> None:
    job = Job(stages=3, steps=9)
    assert awaited(views(job, {}, silent_s=1.0)) == ""
    assert awaited(views(job, {}, inside_s=12.2)) == "worker 1, in 1F0 for 12 s"
    assert awaited(views(job, dict.fromkeys(range(3), "starting"))) == "worker 0, worker 1, worker 2"
    slow = views(job, dict.fromkeys(range(3), "starting"), doing="opens the data for 60 s (mine.py:12, in __getitem__)")
    assert awaited(slow) == ("worker 1, which opens the data for 60 s (mine.py:12, in __getitem__); worker 0; worker 2")
    assert awaited(views(Job(stages=6, steps=9), dict.fromkeys(range(6), "starting"))).endswith(", 3 more")
    assert awaited(views(job, {1: "dead"}, silent_s=60.0)) == ""


@pytest.mark.parametrize(
    ("action", "is_recovering", "text"),
    [
        ("1F0", False, "1F0"),
        ("1B0@1", True, "replay 1B0@1"),
        ("1LOG", False, "waits in 1LOG"),
        ("1COMMIT", True, "waits in 1COMMIT"),
        ("1HEAL", False, "heals stage 1"),
        ("1STEP", False, "1STEP"),
        ("", False, ""),
        ("1SEN", False, "1SEN"),
    ],
)
def test_an_action_is_told_in_words(action: str, is_recovering: bool, text: str) -> None:
    """Before, LOG or COMMIT stood there after a failure, and nothing told that the worker waited."""
    assert doing(action, is_recovering, "stage") == text
    assert doing(action, is_recovering, "block") == text.replace("stage", "block")


def test_a_recovery_stands_on_a_terminal_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the line of each recovery came again at the end of `bamboo run --kill`."""
    monkeypatch.setattr(live, "_TOLD", {"worker 1 died"})
    lines = ["worker 1 died, weights identical", "worker 2 died, weights identical"]
    assert untold(lines, err=False) == lines  # a pipe gets whole lines
    monkeypatch.setattr("sys.stdout", _Terminal())
    assert untold(lines, err=False) == ["weights identical", "worker 2 died, weights identical"]
    assert untold(["worker 1 died"], err=False) == []
