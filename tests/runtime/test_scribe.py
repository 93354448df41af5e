"""The scribe: the order of records, its errors, its end behind the launcher's, and a disk that does not answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from engine.core.errors import NothingMatchedError, Problem, StorageError, UserError
from engine.core.history.process_records import EndedRecord
from engine.core.history.run_records import VERSION, CommitRecord, JobRecord, PreparedRecord
from engine.core.job.job import Job
from engine.files.events_file import read_history
from engine.files.evidence import chain_flaws
from engine.runtime.agent import orders
from engine.runtime.agent import orders as away
from engine.runtime.agent.orders import answered
from engine.runtime.agent.scribe import Scribe
from engine.runtime.agent.scribe_work import scribe_for
from engine.runtime.process.subprocesses import is_readable


def commit(step: int) -> CommitRecord:
    return CommitRecord(step=step, loss=1.0, grad_norm=1.0, clip_factor=1.0, last=False)


@pytest.fixture(name="scribe", params=[False, True], ids=["process", "thread"])
def _scribe(request: pytest.FixtureRequest) -> Iterator[Scribe]:
    with scribe_for(is_in_process=request.param) as scribe:
        yield scribe


def test_records_come_in_their_order_between_results_that_are_awaited(tmp_path: Path, scribe: Scribe) -> None:
    folder = scribe.make_run_folder(str(tmp_path), "mlp", print)
    recorder, fds = scribe.recorder(folder.events, Job())
    recorder.write(JobRecord(version=VERSION, job=Job(steps=3000)))
    for step in range(2000):
        recorder.write(commit(step))
    scribe.write(folder.trajectory, text := "\u00e9\n" * 1_500_000)
    scribe.add(folder.events, PreparedRecord(epoch=1))
    recorder.settle()
    assert folder.trajectory.read_text() == text
    history = read_history(folder.events)
    assert list(history.commits.steps) == list(range(2000))
    assert {each.pid for each in history.of(PreparedRecord)} == {os.getpid()}
    scribe.seal(folder, EndedRecord(outcome="finished", exit_code=0))
    assert chain_flaws(folder.path, "events.jsonl") == (True, [])
    for fd in fds:
        os.close(fd)


def test_the_records_of_a_killed_launcher_arrive(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from engine.core.job.job import Job
from engine.core.history.run_records import VERSION
from engine.core.history.run_records import JobRecord
from engine.runtime.agent.scribe_work import scribe_for
from tests.runtime.test_scribe import commit
with scribe_for(False) as scribe:
    recorder, _ = scribe.recorder(Path({str(tmp_path / "events.jsonl")!r}), Job())
    os.kill(scribe._child.pid, signal.SIGSTOP)
    recorder.write(JobRecord(version=VERSION, job=Job(steps=100)))
    for step in range(100):
        recorder.write(commit(step))
    print(scribe._child.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pidfd = os.pidfd_open(pid := int(done.stdout))
    os.kill(pid, signal.SIGCONT)
    assert is_readable(pidfd, 20.0), "it ends when it has written all"
    os.close(pidfd)
    assert len(read_history(tmp_path / "events.jsonl").commits) == 100


def test_a_record_that_cannot_be_written_ends_the_run_at_the_next_look(tmp_path: Path, scribe: Scribe) -> None:
    recorder, fds = scribe.recorder(tmp_path / "events.jsonl", Job())
    recorder.write(PreparedRecord(epoch=1))
    recorder.settle()
    scribe.tell("add", str(tmp_path / "gone" / "events.jsonl"), ["{}"])
    with pytest.raises(StorageError, match=r"cannot write '.*gone/events.jsonl'"):
        recorder.settle()
    recorder.settle()  # it was told once
    for fd in fds:
        os.close(fd)


def _stopped(scribe: Scribe) -> Scribe:
    assert scribe._child is not None
    scribe._child.signal(signal.SIGSTOP)
    return scribe


def test_a_disk_that_does_not_answer_is_given_up_with_all_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(away, "LIMIT_S", 0.5)
    with scribe_for(is_in_process=False) as scribe:
        folder = scribe.make_run_folder(str(tmp_path), "mlp", print)
        recorder, fds = scribe.recorder(folder.events, Job())
        _stopped(scribe)
        begun_s = time.monotonic()
        for number in range(3):
            recorder.write(PreparedRecord(epoch=number))
        assert not recorder.look()
        assert time.monotonic() - begun_s < 0.4, "the event loop does not wait for it"
        with pytest.raises(StorageError) as refusal:
            scribe.write(folder.run_json, "{}")
        missing = "not written: 3 records, run.json"
        assert str(refusal.value) == f"{str(folder.path)!r} has not answered for 0.5 s; {missing}"
        begun_s = time.monotonic()
        for later in (recorder.look, recorder.settle, partial(scribe.add, folder.events)):
            with pytest.raises(StorageError, match="has not answered"):
                later()
        assert time.monotonic() - begun_s < 0.4, "nothing waits any more"
        for fd in fds:
            os.close(fd)


def test_records_that_wait_for_a_disk_take_a_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "_MOST_BYTES", 100_000)
    with scribe_for(is_in_process=False) as scribe:
        recorder, fds = scribe.recorder(tmp_path / "events.jsonl", Job())
        _stopped(scribe)
        for step in range(10_000):
            recorder.write(commit(step))
        with pytest.raises(StorageError, match=r"does not answer, and 1\d\d,\d\d\d bytes wait for it; not written: "):
            recorder.look()
        for fd in fds:
            os.close(fd)


def test_the_message_says_how_the_process_has_ended(tmp_path: Path) -> None:
    with scribe_for(is_in_process=False) as scribe:
        folder = scribe.make_run_folder(str(tmp_path), "mlp", print)
        assert scribe._child is not None
        scribe._child.signal(signal.SIGKILL)
        with pytest.raises(StorageError, match=r"the process that writes the files of the run was killed \(SIGKILL\)"):
            scribe.write(folder.run_json, "{}")


def _fails(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("work", "kind", "text"),
    [
        (lambda: _fails(NothingMatchedError("no run yet")), NothingMatchedError, "no run yet"),
        (lambda: _fails(UserError([Problem("a", "b", "c")])), UserError, "a: expected b, found c"),
        (lambda: _fails(OSError(5, "no", "file")), StorageError, "file: no"),
        (lambda: time.sleep(60), StorageError, "'here' has not answered for 0.3 s"),
        (lambda: os._exit(3), StorageError, "the process that reads 'here' has ended"),
    ],
)
def test_a_work_in_another_process_ends_as_it_would_here(
    work: Callable[[], object], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as refusal:
        answered("here", work, 0.3 if "answered" in text else 20.0)
    assert str(refusal.value) == text


def test_a_work_in_another_process_returns_plain_values() -> None:
    assert answered("here", lambda: [os.getppid(), {"a": None}]) == [os.getpid(), {"a": None}]
