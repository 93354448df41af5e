"""Events come back as they were written, while they are being written too."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.core.errors import StorageError
from engine.core.history.process_records import FailedRecord
from engine.files.events_file import add_event, read_events
from engine.runtime.ipc.recorder import Recorder, open_events


def test_events_come_back_in_the_order_of_writing(tmp_path: Path) -> None:
    fd = open_events(tmp_path / "events.jsonl")
    recorder = Recorder(fd, 3)
    # Whatever Python takes for the end of a line must not end one here.
    recorder.write(FailedRecord(error="line\nline\x0b\u2028\x85\r"))
    recorder.action(1, 2, "1F0", 10, 20)
    os.close(fd)
    first, second = read_events(tmp_path / "events.jsonl")
    assert (first["event"], first["error"], first["worker"]) == ("failed", "line\nline\x0b\u2028\x85\r", 3)
    assert (second["event"], second["step"], second["action"], second["end_ns"]) == ("action", 2, "1F0", 20)


@pytest.mark.parametrize("half", ['{"event":"com', "", '{"event":"commit"}'])
def test_a_last_line_without_an_end_is_still_being_written(tmp_path: Path, half: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event":"job"}\n' + half)
    assert [event["event"] for event in read_events(path)] == ["job"]


@pytest.mark.parametrize("line", [b"garbage", b"\xff\xfe", b'{"event":', b"[1]", b"3", b"", b"{}"])
def test_a_line_that_is_no_event_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event":"job"}\n' + line + b'\n{"event":"go"}\n')
    with pytest.raises(StorageError, match=r"events\.jsonl:2: expected one event as JSON, found "):
        list(read_events(path))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"events\.jsonl: No such file"):
        list(read_events(tmp_path / "events.jsonl"))


def test_reading_can_begin_where_the_file_once_ended(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event":"job"}\n')
    size = path.stat().st_size
    with path.open("a") as file:
        file.write('{"event":"go"}\n')
    assert [event["event"] for event in read_events(path, size)] == ["go"]


def test_what_is_learned_afterwards_is_added(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"event":"ended"}\n')
    add_event(tmp_path / "events.jsonl", "twin", losses=[[0, 1.5]])
    assert list(read_events(tmp_path / "events.jsonl")) == [{"event": "ended"}, {"event": "twin", "losses": [[0, 1.5]]}]
    with pytest.raises(StorageError):
        add_event(tmp_path / "nowhere" / "events.jsonl", "twin")
