"""The events file: what is appended, and that processes that write at once tear no line."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.core.history.process_records import FailedRecord, KnownRecord, StoreEndedRecord
from engine.core.history.record_lines import encoded
from engine.core.history.run_records import ActionRecord, AuditRecord, PreparedRecord
from engine.runtime.ipc.recorder import Recorder, now_ns, open_events
from tests.runtime.peers import PeerServer

NUM_WRITERS = 6
NUM_LINES = 400


@pytest.fixture
def events(tmp_path: Path) -> Iterator[int]:
    fd = open_events(tmp_path / "events.jsonl")
    yield fd
    os.close(fd)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_an_action_is_one_line(events: int, tmp_path: Path) -> None:
    Recorder(events, 3).action(4, 7, "2SEND_F0@1", 100, 250)
    assert lines_of(tmp_path) == [
        {
            "event": "action",
            "worker": 3,
            "pid": os.getpid(),
            "epoch": 4,
            "step": 7,
            "action": "2SEND_F0@1",
            "start_ns": 100,
            "end_ns": 250,
        }
    ]


def test_the_line_of_an_action_is_that_of_its_record(events: int, tmp_path: Path) -> None:
    Recorder(events, 3).action(4, 7, "2SEND_F0@1", 100, 250)
    action = ActionRecord(worker=3, pid=os.getpid(), epoch=4, step=7, action="2SEND_F0@1", start_ns=100, end_ns=250)
    assert (tmp_path / "events.jsonl").read_text() == f"{encoded(action)}\n"


def test_a_record_keeps_the_time_that_it_has(events: int, tmp_path: Path) -> None:
    Recorder(events, 3).write(KnownRecord(of=1, at_ns=5))
    assert lines_of(tmp_path)[0]["at_ns"] == 5


def test_an_event_is_one_line_stamped_with_the_monotonic_clock(events: int, tmp_path: Path) -> None:
    before = time.monotonic_ns()
    Recorder(events, -1).write(FailedRecord(error='a "quoted"\nline \u00e9'))
    (line,) = lines_of(tmp_path)
    assert before <= line.pop("at_ns") <= now_ns()
    assert line == {
        "event": "failed",
        "worker": -1,
        "pid": os.getpid(),
        "error": 'a "quoted"\nline \u00e9',
    }


def test_a_record_is_in_the_file_before_the_call_returns(events: int, tmp_path: Path) -> None:
    for number in range(3):
        Recorder(events, 0).write(PreparedRecord(epoch=number))
        assert len(lines_of(tmp_path)) == number + 1


def test_opening_again_appends(events: int, tmp_path: Path) -> None:
    Recorder(events, 0).write(KnownRecord(of=1))
    again = open_events(tmp_path / "events.jsonl")
    Recorder(again, 1).write(PreparedRecord(epoch=1))
    os.close(again)
    Recorder(events, 0).write(StoreEndedRecord())
    assert [line["event"] for line in lines_of(tmp_path)] == ["known", "prepared", "store_ended"]


def test_the_file_is_its_owners_alone_and_not_inherited(events: int, tmp_path: Path) -> None:
    assert (tmp_path / "events.jsonl").stat().st_mode & 0o777 == 0o600
    assert not os.get_inheritable(events)


def writes(fd: int, gate: int, worker: int, path: str) -> int:
    os.read(gate, 1)  # until all are there
    # Some share a descriptor, some have their own.
    recorder = Recorder(fd if worker % 2 else open_events(path), worker)
    for number in range(NUM_LINES):
        if number % 8:
            recorder.action(1, number, f"{worker}F{number}", number, number + 1)
        else:
            recorder.write(
                AuditRecord(of=0, step=number, pipeline=0, rows=((0, "f" * 64, "f" * 64),) * 70)
            )  # beyond a page
    return os.getpid()


def test_processes_that_append_at_once_tear_no_line(peers: PeerServer, events: int, tmp_path: Path) -> None:
    path = str(tmp_path / "events.jsonl")
    gate, opener = os.pipe()
    started = [peers.start(writes, worker, path, fds=[events, gate]) for worker in range(NUM_WRITERS)]
    os.write(opener, bytes(NUM_WRITERS))
    pids = [peer.result() for peer in started]
    os.close(gate)
    os.close(opener)
    lines = lines_of(tmp_path)
    assert Counter(line["worker"] for line in lines) == dict.fromkeys(range(NUM_WRITERS), NUM_LINES)
    for worker, pid in enumerate(pids):
        own = [line for line in lines if line["worker"] == worker]
        assert [line["step"] for line in own] == list(range(NUM_LINES))
        assert {line["pid"] for line in own} == {pid}
