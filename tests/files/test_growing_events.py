"""Events that grow between two looks."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.core.errors import StorageError
from engine.core.history.process_records import HeardRecord
from engine.core.history.run_records import CommitRecord, UnreadLine
from engine.files.events_file import GrowingEvents
from tests.core.made_records import lines_of

LINES = lines_of([{"event": "job", "steps": 9, "stages": 2}, *({"event": "commit", "step": step} for step in range(4))])


def test_each_line_is_read_once_and_an_unfinished_one_later(tmp_path: Path) -> None:
    events = GrowingEvents(tmp_path / "events.jsonl")
    assert events.read_on().is_empty
    for end in (30, len(LINES) // 2, len(LINES) - 1, len(LINES)):
        events.path.write_text(LINES[:end])
        assert len([*events.read_on().records]) == LINES[:end].count("\n")
    assert events.read_on().committed == 3
    done = LINES.rpartition("\n{")[0]
    events.path.write_text("x" * len(done) + LINES[len(done) :])  # a second reading of the first lines would fail
    assert events.read_on().committed == 3


def test_a_torn_line_is_counted_and_the_next_is_read(tmp_path: Path) -> None:
    events = GrowingEvents(tmp_path / "events.jsonl")
    events.path.write_text(LINES)
    events.read_on()
    events.path.write_text(f"{LINES}garbage\n{LINES.splitlines()[1]}\n")
    history = events.read_on()
    assert [each.number for each in history.of(UnreadLine)] == [6]
    assert len(history.of(CommitRecord)) == 5


def test_a_look_refuses_new_commits_of_steps_that_the_job_has_not(tmp_path: Path) -> None:
    events = GrowingEvents(tmp_path / "events.jsonl")
    events.path.write_text(LINES)
    events.read_on()
    events.path.write_text(LINES + lines_of([{"event": "commit", "step": 9}, {"event": "commit", "step": 4}]))
    with pytest.raises(StorageError, match="step 9 is committed, and the job has 9 steps"):
        events.read_on()


def test_decisions_that_a_host_has_heard_count_and_of_many_commits_the_last_one_is_read(tmp_path: Path) -> None:
    job, *commits = LINES.splitlines()
    heard = lines_of([{"event": "heard", "of": "b", "line": line} for line in commits])
    for last_commits, number in ((False, 4), (True, 1)):
        events = GrowingEvents(tmp_path / "events.jsonl", last_commits=last_commits)
        events.path.write_text(f"{job}\n{heard}")
        history = events.read_on()
        assert history.committed == 3
        assert len(history.of(HeardRecord)) == number
