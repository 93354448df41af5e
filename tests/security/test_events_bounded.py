"""The events of a run survive torn lines and short writes, and take a bounded space."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bamboo_cli.app import app
from engine.core.errors import StorageError
from engine.core.history.process_records import KnownRecord
from engine.core.history.record import UnreadLine
from engine.core.history.record_lines import encoded
from engine.files.events_file import read_events
from engine.runtime.ipc.recorder import Recorder, open_events
from tests.core.made_records import lines_of, made

NAME = "20261121-100000-made-0a1b"
JOB, GO = made("job"), made("go")
HALF = encoded(made("commit"))[:40]
BEGIN: list[dict[str, Any]] = [
    {"event": "job", "steps": 3, "stages": 1},
    {"event": "started", "of": 0, "child": 5, "slots": [[0, 0]]},
    {"event": "epoch", "owners": [0], "shadows": [[]]},
    {"event": "go"},
]
END: list[dict[str, Any]] = [{"event": "commit", "step": 0}, {"event": "training_ended"}, {"event": "ended"}]


def cut_once(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Lets the kernel take only `at` bytes of the next write, as it does at the last bytes of a disk."""
    real, calls = os.write, iter([at])

    def write(fd: int, data: bytes) -> int:
        return real(fd, data[: next(calls, len(data))])

    monkeypatch.setattr(os, "write", write)


@pytest.mark.parametrize("at", [0, 1, 30, -1])
def test_a_record_of_which_the_kernel_took_a_part_is_written_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Before, the rest was lost, and the half line refused the whole file."""
    fd = open_events(tmp_path / "events.jsonl")
    recorder = Recorder(fd, -1)
    recorder.write(JOB)
    record = KnownRecord(of=1, at_ns=5, worker=-1, pid=os.getpid())
    cut_once(monkeypatch, at if at >= 0 else len(encoded(record)))
    recorder.write(record)
    monkeypatch.undo()
    recorder.write(GO)
    os.close(fd)
    found = list(read_events(tmp_path / "events.jsonl"))
    assert [each for each in found if not isinstance(each, UnreadLine)][1] == record
    assert len(found) == 3 + (0 < at)


@pytest.mark.parametrize(
    ("torn", "salvaged"),
    [(HALF, 0), (HALF + encoded(GO), 1), (HALF + HALF, 0), ("\0" * 300, 0), ('{"event":', 0), ("", 0)],
)
def test_a_torn_line_costs_itself_only(tmp_path: Path, torn: str, salvaged: int) -> None:
    """Before, one half line in the middle made all events of the run unreadable."""
    path = tmp_path / "events.jsonl"
    path.write_text(f"{encoded(JOB)}\n{torn}\n{encoded(GO)}\n")
    assert list(read_events(path)) == [JOB, UnreadLine(number=2), *[GO] * salvaged, GO]


def test_a_file_of_other_contents_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for text in ("step,loss\n0,1.5\n", "\n", f"{HALF}\n{encoded(JOB)}\n", f"{encoded(GO)}\n"):
        path.write_text(text)
        with pytest.raises(StorageError, match=r"events\.jsonl:1: "):
            list(read_events(path))


def test_report_page_and_status_say_which_line_was_torn(tmp_path: Path) -> None:
    """Before, `report` and `status` of such a run ended with 74."""
    folder = tmp_path / NAME
    folder.mkdir()
    (folder / "events.jsonl").write_text(f"{lines_of(BEGIN)}{HALF}\n{lines_of(END)}")
    said = "1 line of events.jsonl could not be read (line 5)"
    reported = CliRunner().invoke(app, ["report", NAME, "--results", str(tmp_path)])
    assert reported.exit_code == 0, reported.output
    assert said in reported.stderr
    assert said in (folder / "report.html").read_text()
    status = CliRunner().invoke(app, ["status", NAME, "--results", str(tmp_path), "--json"])
    assert json.loads(status.stdout)["gaps"] == [said]
    assert json.loads(status.stdout)["committed"] == 0
