"""Deaths before the first commit: all workers are restarted, three times at most, and no bit changes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from engine.core.errors import ExitCode
from engine.core.history.process_records import StartedRecord
from engine.core.history.run_records import EpochRecord, PartitionRecord, Record, StampedRecord
from engine.core.job.job import Job
from engine.runtime.agent.run_state import Ending
from engine.runtime.agent.session import run_session
from engine.runtime.process.fork_client import ForkServer
from engine.runtime.process.recorder import Recorder
from tests.e2e.conftest import Launch, Train

JOB = Job(model="mlp", stages=3, microbatches=4, steps=2)


class Killer:
    """Sends a worker a signal when the launcher writes a record of a kind, a number of times."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        kind: type[Record],
        worker: int,
        times: int = 1,
        number: signal.Signals = signal.SIGKILL,
    ):
        self.number = number
        self.kind = kind
        self.worker = worker
        self.left = times
        self.pids: dict[int, int] = {}
        self.write = Recorder.write

        def write(recorder: Recorder, record: StampedRecord) -> None:
            self.write(recorder, record)
            self.wrote(record)

        patch.setattr(Recorder, "write", write)

    def wrote(self, record: Record) -> None:
        if isinstance(record, StartedRecord):
            self.pids[record.of] = record.child
        if isinstance(record, self.kind) and getattr(record, "of", self.worker) == self.worker and self.left:
            self.left -= 1
            os.kill(self.pids[self.worker], self.number)


def run(folder: Path, server: ForkServer) -> tuple[Ending, list[dict[str, Any]]]:
    ending = run_session(JOB, folder / "events.jsonl", folder, server=server)
    return ending, [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("kind", "worker"),
    [
        pytest.param(StartedRecord, 0, id="while it joins, 0"),
        pytest.param(PartitionRecord, 1, id="while it builds, 1"),
        pytest.param(StartedRecord, 1, id="while it joins, 1", marks=pytest.mark.soak),
        pytest.param(PartitionRecord, 0, id="while it builds, 0", marks=pytest.mark.soak),
    ],
)
def test_a_worker_that_dies_before_training_is_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: ForkServer, train: Train, kind: type[Record], worker: int
) -> None:
    usual = train(JOB).view.run_state.rows
    Killer(monkeypatch, kind, worker)
    ending, events = run(tmp_path, server)
    assert (ending.outcome, ending.exit_code, ending.error) == ("finished", 0, None)
    assert ending.view.run_state.rows == usual
    (restart,) = (each for each in events if each["event"] == "restart")
    assert (restart["number"], restart["reason"]) == (1, f"worker {worker} was killed (SIGKILL)")
    assert f"{restart['reason']} before the first commit; all workers are restarted (1 of at most 3)" in (
        ending.view.run_state.notes
    )
    assert [each["of"] for each in events if each["event"] == "started"] == [0, 1, 2] * 2


def test_the_fourth_death_before_training_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: ForkServer
) -> None:
    Killer(monkeypatch, StartedRecord, 1, times=9)
    ending, events = run(tmp_path, server)
    assert (ending.outcome, ending.exit_code) == ("failed", ExitCode.NOT_RECOVERED)
    assert str(ending.error).startswith("training did not recover: worker 1 was killed (SIGKILL); worker 1 (pid ")
    assert [each["number"] for each in events if each["event"] == "restart"] == [1, 2, 3]
    assert [each["of"] for each in events if each["event"] == "exit" and not each["expected"]] == [1] * 4


def test_an_heir_is_faster_than_a_restart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: ForkServer) -> None:
    Killer(monkeypatch, EpochRecord, 1)
    ending, events = run(tmp_path, server)
    assert ending.outcome == "finished"
    assert not [each for each in events if each["event"] == "restart"]


def test_a_fault_in_the_first_step_without_an_heir_counts_as_struck(launch: Launch) -> None:
    launcher = launch("run", "--model", "mlp", "--stages", "2", "--steps", "2", "--redundancy", "none", "--kill", "0:1")
    done = launcher.wait()
    assert done.code == 0, done.stderr
    assert "before the first commit; all workers are restarted (1 of at most 3)" in done.stderr
    assert [each["difference"] for each in launcher.events("comparison")] == [None]
    assert [each["fault"] for each in launcher.events("confirmed")] == ["0:1"]
    assert launcher.leftovers() == []
    report = launch("report", str(launcher.folder / "results" / "latest"))
    assert "Worker 1 was lost before the first commit, and all workers were restarted." in report.wait().stdout
