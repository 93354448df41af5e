"""`--tee`: the lines of workers with their numbers, bounded, without characters that steer the terminal."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from bamboo_cli.live import LivePicture, WorkerOutput
from engine.core.job.job import Job
from engine.core.texts import printable
from engine.runtime.agent.run_state import RunState, RunView


def add(logs: Path, worker: int, text: bytes) -> None:
    with (logs / f"worker-{worker}.log").open("ab") as file:
        file.write(text)


def lines(output: WorkerOutput, *, is_last: bool = False) -> list[str]:
    return [line for block in output.news(is_last=is_last) for line in block.split("\n")]


def test_each_line_comes_once_with_the_number_of_its_worker(tmp_path: Path) -> None:
    output = WorkerOutput(tmp_path)
    assert lines(output) == []
    add(tmp_path, 10, b"ten\n")
    add(tmp_path, 2, b"two\nhal")
    add(tmp_path, 0, b"")
    assert lines(output) == ["[2] two", "[10] ten"]
    add(tmp_path, 2, b"f\n\nrest")
    assert lines(output) == ["[2] half", "[2] "]
    assert lines(output) == []
    assert lines(output, is_last=True) == ["[2] rest"]
    assert lines(output, is_last=True) == []


def test_of_a_flood_the_first_lines_are_shown_and_the_size_of_the_rest(tmp_path: Path) -> None:
    output = WorkerOutput(tmp_path)
    flood = b"".join(b"line %d\n" % number for number in range(1_000_000))
    add(tmp_path, 0, flood)
    blocks = list(output.news())
    assert all(len(block.encode()) <= 4096 for block in blocks)  # a pipe takes them whole
    first, *_, last = [line for block in blocks for line in block.split("\n")]
    assert first == "[0] line 0"
    assert (
        last == f"[0] ... {len(flood) - 16_384} bytes are left out; the full output is in {tmp_path / 'worker-0.log'}"
    )
    add(tmp_path, 0, b"after\n")
    assert lines(output) == ["[0] after"]


def test_an_endless_line_is_shown_in_bounded_parts(tmp_path: Path) -> None:
    output = WorkerOutput(tmp_path)
    for _ in range(3):
        add(tmp_path, 0, b"x" * 5_000)
        (line,) = lines(output)
        assert line == "[0] " + "x" * 1_000 + "..."


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07x\x1b]8;;http://a\x1b\\link\x1b]8;;\x1b\\", "xlink"),
        ("\x1b[2Jcleared\x1bc", "cleared"),
        ("a\x08\x07\x9b31mb", "a???31mb"),
        ("right \u202e to left", "right ? to left"),
        ("caf\u00e9 \u4e2d\ttab\u00a0end", "caf\u00e9 \u4e2d\ttab\u00a0end"),
        ("\x1b", ""),
    ],
)
def test_no_character_steers_the_terminal(text: str, shown: str, tmp_path: Path) -> None:
    assert printable(text) == shown
    add(tmp_path, 0, text.encode() + b"\n")
    assert lines(WorkerOutput(tmp_path)) == [f"[0] {shown}"]


def test_bytes_that_are_no_text_and_bars_of_progress_are_one_line(tmp_path: Path) -> None:
    add(tmp_path, 0, b"\xff\xfe\n 10%|#   |\r 50%|##  |\r100%|####|\r\n")
    assert lines(WorkerOutput(tmp_path)) == ["[0] \ufffd\ufffd", "[0] 100%|####|"]


def test_a_pipe_that_is_not_read_holds_up_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher must go on: every worker waits for it at each commit."""
    (tmp_path / "logs").mkdir()
    read_end, write_end = os.pipe()
    with os.fdopen(write_end, "w", buffering=1) as pipe, os.fdopen(read_end, "rb") as reader:
        monkeypatch.setattr(sys, "stderr", pipe)
        run_state = RunState(Job(stages=1, steps=9), losses=[0.5])
        picture = LivePicture(run_state.job, tmp_path / "events.jsonl", tee=True)
        for _ in range(20):  # each look may show 16 KiB; a pipe takes 64
            add(tmp_path / "logs", 0, b"y" * 100 + b"\n" + b"x\n" * 10_000)
            picture.show(RunView(run_state, ()))
        os.set_blocking(read_end, False)
        assert len(reader.read()) > 60_000
        add(tmp_path / "logs", 0, b"last\n")
        picture.close()
        told = reader.read().decode()
    assert "characters of output are left out: stderr was not read\n" in told
    assert told.endswith("[0] last\n")
