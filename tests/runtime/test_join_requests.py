"""Requests for one more worker while a job runs: who may ask, until when, and what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.core.history.process_records import RefusedRecord
from engine.core.history.run_history import RunHistory
from engine.core.history.run_records import VERSION, AddedRecord, JobRecord
from engine.core.job.job import Job
from engine.core.protocol.state import State
from engine.files.events_file import read_history
from engine.runtime.agent.requests import CLOSED, TOO_LATE, JoinRequests, WorkerControls
from engine.runtime.process.recorder import Recorder, open_events
from tests.core.membership_cases import committed, running

JOIN = {"ask": "join", "standby": False}
ELASTIC = Job(stages=3, elastic=True, blocks=2)


class Run:
    """A run with a folder; `state` is that of its protocol."""

    def __init__(self, folder: Path, job: Job = ELASTIC):
        self.folder, self.state, self.is_stopping = folder, running(), False
        self.joins: list[bool] = []
        self.noticed: list[int] = []
        self.on_start: Callable[[], object] = lambda: None
        self.events = folder / "events.jsonl"
        self._recorder = Recorder(open_events(self.events), -1)
        self._recorder.write(JobRecord(version=VERSION, job=job, injectable=True))
        self._requests = JoinRequests(folder, job, self._recorder)

    def ask(self, text: str, name: str = "join-1.json", mode: int = 0o600) -> Path:
        path = self.folder / name
        path.write_text(text)
        path.chmod(mode)
        return path

    def look(self) -> RunHistory:
        def start(joins: bool) -> int:
            self.joins.append(joins)
            self.on_start()
            return 2 + len(self.joins)

        def notify(worker: int) -> bool:
            self.noticed.append(worker)
            return worker < 3

        self._requests.look(self.state, WorkerControls(start, notify, range(3), self.is_stopping))
        return read_history(self.events)


@pytest.fixture(name="run")
def _run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def reasons(history: RunHistory) -> list[str]:
    return [each.reason for each in history.of(RefusedRecord)]


@pytest.mark.parametrize("is_standby", [False, True])
def test_a_request_starts_a_worker_and_is_answered_by_its_number(run: Run, is_standby: bool) -> None:
    path = run.ask(json.dumps(JOIN | {"standby": is_standby}))
    (added,) = run.look().of(AddedRecord)
    assert (added.request, added.of, added.joins) == ("join-1.json", 3, not is_standby)
    assert not path.exists()
    assert len(run.look().of(AddedRecord)) == 1, "it is answered once"


def test_one_worker_is_started_at_a_look(run: Run) -> None:
    for number in range(3):
        run.ask(json.dumps(JOIN), f"join-{number}.json")
    assert [len(run.look().of(AddedRecord)) for _ in range(3)] == [1, 2, 3]


def test_a_request_that_is_withdrawn_leaves_no_worker(run: Run) -> None:
    """The command was interrupted before it has the number of its worker."""
    run.on_start = run.ask(json.dumps(JOIN)).unlink
    run.look()
    assert (run.joins, run.noticed) == ([True], [3])
    run.on_start = lambda: None
    run.ask(json.dumps(JOIN))
    run.look()
    assert (run.joins, run.noticed) == ([True, True], [3])


def test_a_notice_goes_to_the_worker(run: Run) -> None:
    run.ask('{"ask": "leave", "worker": 2}')
    assert (reasons(run.look()), run.noticed) == ([], [2])
    run.ask('{"ask": "leave", "worker": 7}')
    assert reasons(run.look()) == ["there is no worker 7"]


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "3", "{}", '{"ask": "join"}', '{"ask": "join", "standby": 1}', "[" * 99, '{"ask": NaN}'),
        *('{"ask": "join", "standby": false, "more": 1}', '{"ask": "leave", "worker": true}', '{"ask": "stop"}'),
    ],
)
def test_any_other_text_is_refused(run: Run, text: str) -> None:
    run.ask(text)
    assert len(reasons(run.look())) == 1
    assert (run.joins, run.noticed) == ([], [])


def test_a_file_that_another_user_may_have_written_is_refused(run: Run, tmp_path: Path) -> None:
    run.ask(json.dumps(JOIN), mode=0o644)
    assert reasons(run.look()) == ["expected a regular file of this user with mode 0600"]
    os.symlink(run.ask(json.dumps(JOIN), "other"), tmp_path / "join-2.json")
    assert len(reasons(run.look())) == 2
    assert run.joins == []


def last_step(state: State) -> State:
    return committed(state._replace(last_step=1))


def test_a_run_that_takes_none_or_ends_refuses(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir()
    run = Run(tmp_path / "closed", Job(stages=3))
    run.ask(json.dumps(JOIN))
    assert reasons(run.look()) == [CLOSED]
    run = Run(tmp_path, Job(stages=3, standby=1))
    run.ask(json.dumps(JOIN))
    run.state = last_step(run.state)
    assert reasons(run.look()) == [TOO_LATE]
    run.ask(json.dumps(JOIN))
    run.state, run.is_stopping = running(), True
    assert reasons(run.look()) == [TOO_LATE, TOO_LATE]
