"""`bamboo agent --join` as its users start it, on runs whose launcher is this test: refusals, and its end."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.core.errors import ExitCode
from engine.core.history.process_records import ExitRecord, RefusedRecord, TrainingEndedRecord
from engine.core.history.run_records import VERSION, AddedRecord, JobRecord, StampedRecord
from engine.core.job.job import Job
from engine.files.host_facts import host_facts
from engine.files.linked_lines import add_records
from engine.files.run_folder import RunFolder
from engine.files.trajectory_file import own_sources
from engine.runtime.agent.requests import TOO_LATE
from engine.runtime.process.locks import folder_used
from engine.runtime.process.recorder import Recorder, open_events
from tests.e2e.launcher import Done, Launcher

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

NAME = "20260101-120000-gpt-1a2b"
FORCED_AFTER_S = 4.0  # from a signal to the end of a command that does not end by itself
Launch = Callable[..., Launcher]
Run = Callable[..., RunFolder]


@pytest.fixture(name="run")
def _run(tmp_path: Path) -> Iterator[Run]:
    """Returns a function that makes the folder of a run whose launcher is this process."""
    folder = RunFolder(tmp_path / "runs" / NAME)
    folder.path.mkdir(mode=0o700, parents=True)

    def made(job: Job | None, **facts: object) -> RunFolder:
        if job is not None:
            fd = open_events(folder.events)
            Recorder(fd, -1).write(JobRecord(version=VERSION, job=job, injectable=True))
            os.close(fd)
            facts_now = {"host": {**host_facts(Path.cwd()), **facts}, "sources": own_sources()}
            folder.run_json.write_text(json.dumps(facts_now))
        return folder

    with folder_used(folder.path):
        yield made


ELASTIC = Job(elastic=True, blocks=2)


def joins(launch: Launch, folder: RunFolder, run: str = NAME, *words: str) -> Launcher:
    return launch("agent", "--join", run, "--results", str(folder.path.parent), *words)


def refused(launch: Launch, folder: RunFolder, code: int, run: str = NAME, *words: str) -> str:
    done = joins(launch, folder, run, *words).wait(60)
    assert (done.code, done.stdout) == (code, ""), done
    assert "Traceback" not in done.stderr
    assert not list(folder.path.glob("join-*")), "a request was left"
    return " ".join(done.stderr.replace("\u2502", " ").split())


def answered(command: Launcher, folder: RunFolder, made: Callable[[str], StampedRecord]) -> None:
    """Answers the request of a command as a launcher does."""
    until_s = time.monotonic() + 60
    while not (found := list(folder.path.glob("join-*.json"))):
        assert command.process.poll() is None, command.wait()
        assert time.monotonic() < until_s
        time.sleep(0.01)
    add_records(folder.events, made(found[0].name))
    found[0].unlink()


def test_a_run_that_is_not_there_or_has_ended_or_has_not_begun(launch: Launch, run: Run) -> None:
    text = refused(launch, run(None), ExitCode.NOTHING_MATCHED)
    assert "has not begun" in text
    folder = run(ELASTIC)
    assert NAME in refused(launch, folder, ExitCode.NOTHING_MATCHED, NAME.replace("gpt", "gpd"))
    add_records(folder.events, TrainingEndedRecord(outcome="finished", exit_code=0))
    assert "has ended" in refused(launch, folder, ExitCode.NOTHING_MATCHED)


def test_other_code_or_arithmetic(launch: Launch, run: Run) -> None:
    folder = run(ELASTIC, torch="1.0", isa="vax")
    text = refused(launch, folder, ExitCode.ENVIRONMENT)
    now = host_facts(Path.cwd())
    for field, there in (("torch", "1.0"), ("isa", "vax")):
        assert f"{field}: expected {there!r} as in run {NAME}, found {now[field]!r}" in text


def test_a_run_that_takes_no_workers_and_bad_options(launch: Launch, run: Run) -> None:
    folder = run(Job())
    text = refused(launch, folder, ExitCode.USAGE)
    assert "--elastic" in text
    assert "--standby N" in text
    assert "--join" in refused(launch, folder, ExitCode.USAGE, "")
    assert "3" in refused(launch, folder, ExitCode.USAGE, NAME, "3")
    assert "--standbys" in refused(launch, folder, ExitCode.USAGE, NAME, "--standbys")


def test_the_last_step_has_begun(launch: Launch, run: Run) -> None:
    folder = run(ELASTIC)
    command = joins(launch, folder)
    answered(command, folder, lambda name: RefusedRecord(request=name, reason=TOO_LATE))
    done = command.wait(60)
    assert (done.code, done.stdout) == (ExitCode.NOTHING_MATCHED, "")
    assert TOO_LATE in done.stderr


def interrupted(command: Launcher, folder: RunFolder) -> None:
    """Lets a command have its worker, and interrupts it."""
    answered(command, folder, lambda name: AddedRecord(request=name, of=3, joins=True))
    while "worker 3 starts" not in (command.folder / "stdout").read_text():
        time.sleep(0.01)
    command.interrupt(signal.SIGINT)
    while not (notices := list(folder.path.glob("join-*.json"))):
        assert command.process.poll() is None, command.wait()
        time.sleep(0.01)
    assert json.loads(notices[0].read_text()) == {"ask": "leave", "worker": 3}
    notices[0].unlink()


def test_after_an_interrupt_it_waits_until_its_worker_has_left_however_long_that_takes(
    launch: Launch, run: Run
) -> None:
    folder = run(ELASTIC)
    command = joins(launch, folder)
    interrupted(command, folder)
    time.sleep(FORCED_AFTER_S + 0.5)
    add_records(folder.events, ExitRecord(of=3, code=ExitCode.LEFT_WITH_NOTICE, expected=True, seen_ns=1))
    done: Done = command.wait(60)
    assert done.code == 0, done
    assert done.stdout.splitlines()[-2:] == ["worker 3 gets its notice", "worker 3 exited with code 86"]


def test_a_second_interrupt_ends_it_without_its_worker(launch: Launch, run: Run) -> None:
    folder = run(ELASTIC)
    command = joins(launch, folder)
    interrupted(command, folder)
    command.interrupt(signal.SIGINT)
    assert command.wait(60).code == 128 + signal.SIGINT
