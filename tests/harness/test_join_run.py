"""Which runs a worker can join: one that goes on, takes workers, and has the code and the arithmetic of this host."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.core.errors import BambooError, ExitCode
from engine.core.history.process_records import ExitRecord, TrainingEndedRecord, WaitingRecord
from engine.core.history.run_records import (
    VERSION,
    AddedRecord,
    CrampedRecord,
    EpochRecord,
    JobRecord,
    PolicyRecord,
    Record,
)
from engine.core.job.job import Job
from engine.files.host_facts import host_facts
from engine.files.linked_lines import add_records
from engine.files.run_folder import RunFolder
from engine.files.trajectory_file import own_sources
from engine.harness import live_run
from engine.harness.live_run import AddedWorker, run_to_join
from engine.runtime.process.locks import folder_used
from engine.runtime.process.recorder import Recorder, open_events

NAME = "20260101-120000-gpt-1a2b"


@pytest.fixture(name="run")
def _run(tmp_path: Path) -> Iterator[Callable[[Job], RunFolder]]:
    """Returns a function that makes the folder of a run of this process."""

    def made(job: Job) -> RunFolder:
        fd = open_events(folder.events)
        Recorder(fd, -1).write(JobRecord(version=VERSION, job=job, injectable=True))
        os.close(fd)
        folder.run_json.write_text(json.dumps({"host": host_facts(Path.cwd()), "sources": own_sources()}))
        return folder

    folder = RunFolder(tmp_path / NAME)
    folder.path.mkdir(mode=0o700)
    with folder_used(folder.path):
        yield made


Made = Callable[[Job], RunFolder]
ELASTIC = Job(elastic=True, blocks=2)


def refused(results: Path, run: str = NAME) -> tuple[int, str]:
    with pytest.raises(BambooError) as raised:
        run_to_join(results, run)
    return int(raised.value.exit_code), str(raised.value)


def test_a_run_that_takes_workers_is_found_by_its_name_or_folder(tmp_path: Path, run: Made) -> None:
    folder = run(ELASTIC)
    assert run_to_join(tmp_path, NAME).path == run_to_join(tmp_path, str(folder.path)).path == folder.path
    assert run_to_join(tmp_path, "20260101").path == folder.path


def test_a_run_without_elastic_and_standby_is_refused_with_the_way_out(tmp_path: Path, run: Made) -> None:
    run(Job())
    code, text = refused(tmp_path)
    assert code == ExitCode.USAGE
    assert "--elastic" in text
    assert "--standby N" in text


def test_a_run_that_is_not_there_or_has_ended(tmp_path: Path, run: Made) -> None:
    folder = run(ELASTIC)
    code, text = refused(tmp_path, NAME.replace("gpt", "gpd"))
    assert (code, NAME in text) == (ExitCode.NOTHING_MATCHED, True)
    add_records(folder.events, TrainingEndedRecord(outcome="finished", exit_code=0))
    code, text = refused(tmp_path)
    assert (code, "has ended" in text) == (ExitCode.NOTHING_MATCHED, True)


@pytest.mark.parametrize("name", ["latest", NAME])
def test_a_run_that_has_ended_is_not_suggested_again(tmp_path: Path, run: Made, name: str) -> None:
    folder = run(ELASTIC)
    (tmp_path / "latest").symlink_to(NAME)
    assert run_to_join(tmp_path, name).path.name == NAME
    add_records(folder.events, TrainingEndedRecord(outcome="finished", exit_code=0))
    code, text = refused(tmp_path, name)
    assert (code, f"{NAME} has ended" in text) == (ExitCode.NOTHING_MATCHED, True)
    assert text.endswith("(no run is live there)"), "its launcher still lives, as of one that compares with the twin"


def test_a_name_that_is_like_none_brings_the_runs_that_go_on(tmp_path: Path, run: Made) -> None:
    run(ELASTIC)
    for unlike in ("x", str(tmp_path)):
        code, text = refused(tmp_path, unlike)
        assert (code, repr(unlike) in text) == (ExitCode.NOTHING_MATCHED, True)
    assert f"running now: {NAME}" in refused(tmp_path, "x")[1]
    assert "did you mean 'latest'?" in refused(tmp_path, "latst")[1]
    assert "not a run folder" in refused(tmp_path, "/")[1]


@pytest.mark.parametrize("field", ["torch", "isa", "kernel_variables", "sources"])
def test_other_code_or_arithmetic_is_refused_with_both_values(tmp_path: Path, run: Made, field: str) -> None:
    folder = run(ELASTIC)
    facts = json.loads(folder.run_json.read_text())
    place = facts if field == "sources" else facts["host"]
    now, place[field] = place[field], "another"
    folder.run_json.write_text(json.dumps(facts))
    code, text = refused(tmp_path)
    assert code == ExitCode.ENVIRONMENT
    assert f"{field}: expected 'another' as in run {NAME}, found {now!r}" in text


def test_the_command_says_that_its_worker_waits_for_memory(monkeypatch: pytest.MonkeyPatch, run: Made) -> None:
    folder = run(ELASTIC)
    (cramped, free) = (CrampedRecord(at_ns=7, of=3, why=why) for why in ("keeps waiting: one block takes 2 MB", ""))
    waits, other = WaitingRecord(at_ns=6, of=3, lost=""), CrampedRecord(at_ns=7, of=4, why="waits on")
    assert followed(monkeypatch, folder, waits, other, cramped, free) == [
        ("waits", "worker 3 has loaded code and data, and is waiting"),
        ("cramped", "worker 3 keeps waiting: one block takes 2 MB"),
        ("cramped", "worker 3 has memory enough now, and may join"),
    ]


def followed(monkeypatch: pytest.MonkeyPatch, folder: RunFolder, *records: Record) -> list[tuple[str, str]]:
    """Returns what the command says of worker 3 while records come, as (event, text)."""

    def added() -> AddedRecord:
        (request,) = folder.path.glob("join-*")
        return AddedRecord(at_ns=5, request=request.name, of=3, joins=True)

    ended = TrainingEndedRecord(outcome="finished", exit_code=0)
    coming = iter([added, *((lambda each=each: each) for each in (*records, ended))])
    monkeypatch.setattr(live_run, "_pause", lambda is_breakable: add_records(folder.events, next(coming)()))
    return [(each["event"], each["text"]) for each in AddedWorker(folder, is_standby=False).follow()][1:-1]


def epoch(number: int, *members: int, owners: tuple[int, ...]) -> EpochRecord:
    return EpochRecord(
        at_ns=10 + number,
        epoch=number,
        members=members,
        verdict=(),
        reason="x",
        planned=True,
        owners=owners,
        shadows=((),) * len(owners),
    )


def test_the_command_says_why_its_worker_owns_nothing(monkeypatch: pytest.MonkeyPatch, run: Made) -> None:
    folder = run(Job(stages=3, elastic=True))
    told = followed(
        *(monkeypatch, folder, epoch(1, 0, 1, 2, owners=(0, 1, 2)), WaitingRecord(at_ns=12, of=3, lost="")),
        epoch(2, 0, 1, 2, 3, owners=(0, 1, 2)),
        PolicyRecord(at_ns=13, step=4, why="nothing moves", owners=()),
        PolicyRecord(at_ns=14, step=5, why="nothing moves again", owners=()),
        epoch(3, 0, 1, 3, owners=(0, 1, 1)),
        PolicyRecord(at_ns=15, step=6, why="a stage moves", owners=(0, 1, 3)),
        epoch(4, 0, 1, 3, owners=(0, 1, 3)),
    )
    assert [text for event, text in told if event == "idle"] == [
        "worker 3 owns no stage: 3 stages for 4 workers; start with --max-workers 4, or resume with it",
        "worker 3 owns no stage: nothing moves again",
    ]
    assert [event for event, _ in told] == ["waits", "member", "idle", "idle", "owns"]


def test_the_command_says_that_the_run_has_no_place(monkeypatch: pytest.MonkeyPatch, run: Made) -> None:
    folder = run(Job(stages=3, elastic=True, max_workers=3))
    told = followed(monkeypatch, folder, epoch(1, 0, 1, 2, owners=(0, 1, 2)), WaitingRecord(at_ns=12, of=3, lost=""))
    assert told == [
        ("waits", "worker 3 has loaded code and data, and is waiting, because the run has 3 workers (--max-workers)")
    ]


def test_a_worker_that_dies_is_told_of_though_the_run_goes_on(monkeypatch: pytest.MonkeyPatch, run: Made) -> None:
    folder = run(ELASTIC)
    waits = iter(range(1_000))

    def wait(is_breakable: bool) -> None:
        number = next(waits)
        if number == 0:
            (request,) = folder.path.glob("join-*")
            add_records(folder.events, AddedRecord(at_ns=5, request=request.name, of=3, joins=True))
        elif number == 1:
            add_records(folder.events, ExitRecord(at_ns=8, of=3, code=-9, expected=False, seen_ns=7))
        time.sleep(0.001)

    monkeypatch.setattr(live_run, "_pause", wait)
    monkeypatch.setattr(live_run, "_ENDS_WITHIN_S", 0.05)
    with pytest.raises(BambooError, match="worker 3 exited with code -9, and the run continues without it"):
        list(AddedWorker(folder, is_standby=False).follow())
