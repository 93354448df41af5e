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

from engine.codec.records import decoded
from engine.core.action import Action, Op
from engine.core.history.evidence import unlinked
from engine.core.history.process_records import FailedRecord, StoreEndedRecord
from engine.core.history.run_records import ActionRecord, AuditRecord, MovedRecord, PreparedRecord
from engine.core.history.step_files import ENTRY_BYTES, FOLDER, Chore, done_in
from engine.files.events_file import StepReader
from engine.runtime.process.clock import now_ns
from engine.runtime.process.recorder import Recorder, StepWriter, open_events, open_steps
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


@pytest.fixture(name="steps_fd")
def _steps_fd(tmp_path: Path) -> Iterator[int]:
    fd = open_steps(tmp_path / FOLDER)
    yield fd
    os.close(fd)


def test_a_chore_is_written_with_the_next_action_or_at_the_end(events: int, steps_fd: int, tmp_path: Path) -> None:
    recorder = Recorder(events, 3, StepWriter(steps_fd, 3, 10))
    recorder.chore(1, 6, Chore.DATA, 100, "0F1")
    assert StepReader(tmp_path).ranges() == {}
    recorder.action(1, 6, "0F1", 90, 250)
    assert StepReader(tmp_path).ranges() == {0: 2 * ENTRY_BYTES}
    recorder.chore(1, 6, Chore.AUDIT, 300)
    recorder.close()
    found = StepReader(tmp_path)
    assert found.ranges() == {0: 3 * ENTRY_BYTES} and found.last_actions({})[3].action == "0F1"
    ((worker, data),) = found.read(0)
    assert worker == 3 and [action for *_, action in done_in(data)] == [Action(0, Op.F, 1)]


def test_an_action_is_an_entry_in_the_file_of_its_steps(events: int, steps_fd: int, tmp_path: Path) -> None:
    recorder = Recorder(events, 3, StepWriter(steps_fd, 3, 10))
    done = [(7, "2SEND_F0@1"), (9, "4095COMMIT@4095"), (10, "0F65535"), (30, "1STEP")]
    for step, text in done:
        recorder.action(4, step, text, 100, 250)
    found = StepReader(tmp_path)
    assert found.ranges() == {0: 2 * ENTRY_BYTES, 10: ENTRY_BYTES, 30: ENTRY_BYTES}
    assert [*found.actions([0, 10, 30], {3: 77})] == [
        ActionRecord(worker=3, pid=77, epoch=4, step=step, action=text, start_ns=100, end_ns=250) for step, text in done
    ]
    assert found.last_actions({})[3].action == "1STEP"
    assert lines_of(tmp_path) == []
    assert {each.stat().st_mode & 0o777 for each in (tmp_path / FOLDER).iterdir()} == {0o600}


def test_an_action_is_in_the_file_before_the_call_returns(events: int, steps_fd: int, tmp_path: Path) -> None:
    recorder = Recorder(events, 0, StepWriter(steps_fd, 0, 10))
    for number in range(3):
        recorder.action(1, number, "0F0", number, number + 1)
        assert StepReader(tmp_path).last_actions({})[0].step == number


def test_the_hashes_stand_in_a_file_of_their_steps(events: int, steps_fd: int, tmp_path: Path) -> None:
    audit = AuditRecord(of=0, step=25, pipeline=0, rows=((0, "f" * 64, "e" * 64),))
    Recorder(events, -1, StepWriter(steps_fd, None, 10)).write(audit)
    found = decoded(unlinked((tmp_path / FOLDER / "hashes-20.jsonl").read_text().rstrip())[0])
    assert isinstance(found, AuditRecord) and (found.step, found.rows) == (25, audit.rows)
    assert lines_of(tmp_path) == []


def test_a_record_keeps_the_time_that_it_has(events: int, tmp_path: Path) -> None:
    Recorder(events, 3).write(PreparedRecord(epoch=1, at_ns=5))
    assert lines_of(tmp_path)[0]["at_ns"] == 5


def test_an_event_is_one_line_stamped_with_the_monotonic_clock(events: int, tmp_path: Path) -> None:
    before = time.monotonic_ns()
    Recorder(events, -1).write(FailedRecord(error='a "quoted"\nline \u00e9'))
    (line,) = lines_of(tmp_path)
    assert before <= line.pop("at_ns") <= now_ns()
    assert len(line.pop("chain")) == 16
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
    Recorder(events, 0).write(PreparedRecord(epoch=1))
    again = open_events(tmp_path / "events.jsonl")
    Recorder(again, 1).write(PreparedRecord(epoch=1))
    os.close(again)
    Recorder(events, 0).write(StoreEndedRecord())
    assert [line["event"] for line in lines_of(tmp_path)] == ["prepared", "prepared", "store_ended"]


def test_the_file_is_its_owners_alone_and_not_inherited(events: int, tmp_path: Path) -> None:
    assert (tmp_path / "events.jsonl").stat().st_mode & 0o777 == 0o600
    assert not os.get_inheritable(events)


def writes(fd: int, gate: int, worker: int, path: str) -> int:
    os.read(gate, 1)  # until all are there
    # Some share a descriptor, some have their own.
    recorder = Recorder(fd if worker % 2 else open_events(path), worker)
    for number in range(NUM_LINES):
        if number % 8:
            recorder.write(MovedRecord(program="plan", epoch=1, step=number, bytes=8))
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
