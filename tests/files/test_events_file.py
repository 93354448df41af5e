"""Events are read as they were written, also while the file grows."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from engine.codec.records import encoded
from engine.core.errors import StorageError
from engine.core.history.evidence import Chains, linked_lines
from engine.core.history.process_records import FailedRecord, TwinRecord
from engine.core.history.run_records import AGENT, VERSION, ActionRecord, UnreadLine
from engine.core.history.step_files import FOLDER
from engine.files.atomic_write import open_to_append
from engine.files.events_file import read_events
from engine.files.linked_lines import add_records, append
from engine.runtime.process.recorder import Recorder, StepWriter, open_events, open_steps
from tests.core.made_records import made

JOB, GO = made("job"), made("go")


def test_events_come_back_in_the_order_of_writing(tmp_path: Path) -> None:
    fd = open_events(tmp_path / "events.jsonl")
    steps_fd = open_steps(tmp_path / FOLDER)
    recorder = Recorder(fd, 3, StepWriter(steps_fd, 3, 10))
    recorder.write(JOB)
    # Characters that end a line for str.splitlines must not end one here.
    recorder.write(FailedRecord(error="line\nline\x0b\u2028\x85\r"))
    now = time.monotonic_ns()
    recorder.action(1, 2, "1F0", now, now + 20)
    os.close(fd)
    os.close(steps_fd)
    _, first, second = read_events(tmp_path / "events.jsonl")
    assert isinstance(first, FailedRecord) and isinstance(second, ActionRecord)
    assert (first.error, first.worker) == ("line\nline\x0b\u2028\x85\r", 3)
    assert (second.step, second.action, second.end_ns) == (2, "1F0", now + 20)


@pytest.mark.parametrize("half", ['{"event":"com', "", '{"event":"commit"}'])
def test_a_last_line_without_an_end_is_still_being_written(tmp_path: Path, half: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(f"{encoded(JOB)}\n{half}")
    assert list(read_events(path)) == [JOB]


@pytest.mark.parametrize("line", [b"garbage", b"\xff\xfe", b'{"event":', b"[1]", b"3", b"", b"{}"])
def test_a_line_that_is_no_event_costs_itself_and_a_first_line_the_file(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(encoded(JOB).encode() + b"\n" + line + b"\n" + encoded(GO).encode() + b"\n")
    assert list(read_events(path)) == [JOB, UnreadLine(number=2), GO]
    path.write_bytes(line + b"\n" + encoded(GO).encode() + b"\n")
    with pytest.raises(StorageError, match=r"events\.jsonl:1: expected one event as JSON, found "):
        list(read_events(path))


def test_an_event_without_a_field_is_named_with_its_line_also_by_a_reader_that_begins_behind(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(f"{encoded(JOB)}\n{encoded(GO)}\n" + '{"event":"prepared","worker":0,"pid":1,"at_ns":2}\n')
    for start in (0, len(encoded(JOB)) + 1):
        with pytest.raises(StorageError, match=r"events\.jsonl:3: event 'prepared' has no field 'epoch'"):
            list(read_events(path, start))


def test_a_file_of_another_version_says_so_and_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(f"{encoded(GO)}\n")
    older = r"events\.jsonl:1: recorded by an older bamboo: format without a version, .*; use the bamboo that recorded"
    with pytest.raises(StorageError, match=older):
        list(read_events(path))
    path.write_text(encoded(JOB).replace(f'"version":{VERSION}', f'"version":{VERSION + 1}') + "\n")
    with pytest.raises(StorageError, match=r"events\.jsonl:1: recorded by a newer bamboo: format version 10"):
        list(read_events(path))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"events\.jsonl: No such file"):
        list(read_events(tmp_path / "events.jsonl"))


def test_reading_can_begin_where_the_file_once_ended(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(f"{encoded(JOB)}\n")
    size = path.stat().st_size
    with path.open("a") as file:
        file.write(f"{encoded(GO)}\n")
    assert list(read_events(path, size)) == [GO]


def test_what_is_learned_afterwards_is_added(tmp_path: Path) -> None:
    twin = TwinRecord(losses=((0, 1.5),))
    (tmp_path / "events.jsonl").write_text(f"{encoded(JOB)}\n")
    before_ns = time.monotonic_ns()
    add_records(tmp_path / "events.jsonl", twin, twin)
    job, *added = read_events(tmp_path / "events.jsonl")
    assert job == JOB
    for each in added:
        assert isinstance(each, TwinRecord)
        assert (each.losses, each.worker, each.pid) == (twin.losses, AGENT, os.getpid())
        assert before_ns <= each.at_ns <= time.monotonic_ns()
    with pytest.raises(StorageError):
        add_records(tmp_path / "nowhere" / "events.jsonl", twin)


@pytest.mark.parametrize(
    ("taken", "content"), [(4, b"0123\n0123456789\n"), (10, b"0123456789\n"), (0, b"0123456789\n")]
)
def test_a_line_of_which_the_kernel_takes_a_part_is_ended_and_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: int, content: bytes
) -> None:
    sizes, write = iter([taken]), os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[: next(sizes, None)]))
    fd = open_to_append(tmp_path / "events.jsonl")
    append(fd, b"0123456789\n")
    os.close(fd)
    assert (tmp_path / "events.jsonl").read_bytes() == content


def test_a_chain_is_broken_where_its_first_record_is_gone() -> None:
    lines = linked_lines(encoded(replace(made("go"), worker=AGENT, pid=7, at_ns=each)) for each in (1, 2, 3))
    for gone, broken in ((0, 1), (1, 2), (2, None)):
        chains = Chains()
        for number, line in enumerate(lines.splitlines()):
            if number != gone:
                chains.take(line)
        chains.end()
        told = "this record was changed, or a line before it is gone"
        assert chains.broken == (None if broken is None else (broken, told))
