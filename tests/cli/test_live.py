"""The live table in terminals of several widths."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

import bamboo_cli.terminal.live
from bamboo_cli.terminal.live import LivePicture
from engine.core.config.job import Job
from engine.runtime.agent.run_state import RunState
from engine.runtime.agent.run_view import RunView, WorkerView
from engine.runtime.ipc.progress_board import Progress

BAR = "\u2501\u2578\u257a"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("width", [60, 80, 200])
def test_each_part_has_lines_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    screen, job = _Terminal(), Job(stages=1, steps=9)
    console = Console(file=screen, force_terminal=True, width=width, height=20, color_system=None, _environ={})
    monkeypatch.setattr(bamboo_cli.terminal.live, "console", lambda **_: console)
    monkeypatch.setattr("sys.stderr", screen)
    worker = WorkerView(0, 100, ((0, 0),), "running", Progress(1, 0, ""), 0, 0)
    with LivePicture(job, tmp_path / "events.jsonl") as picture:
        picture.show(RunView(RunState(job, losses=[0.5]), (worker,)))
        shown = screen.getvalue()
    lines = [line.rpartition("\r")[2].rpartition("\x1b[2K")[2] for line in shown.splitlines()]
    (line,) = [line for line in lines if "worker" in line]
    assert line.startswith("worker")
    (bar,) = [line for line in lines if BAR[0] in line]
    assert set(bar.strip()) <= {*BAR}


def test_what_users_are_told_at_once_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_state = RunState(Job(stages=1, steps=9), losses=[0.5])
    with LivePicture(run_state.job, tmp_path / "events.jsonl") as picture:
        for text in ("one", "one", "two"):
            run_state.note(text)
            picture.show(RunView(run_state, ()))
    assert [line for line in capsys.readouterr().err.splitlines() if line in ("one", "two")] == ["one", "two"]
