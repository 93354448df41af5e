"""A full disk and failing writes: training goes on, or ends with 74, the last committed step and a right result.

`make soak-disk` holds the same rules at some forty places.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from engine.core.checks.trajectory import TrajectoryRow
from engine.core.errors import StorageError
from engine.core.history.process_records import LostRecord
from engine.core.history.run_history import gaps
from engine.core.history.run_records import AGENT, VERSION, JobRecord, PreparedRecord
from engine.core.job.job import Job
from engine.files.events_file import read_events, read_history
from engine.runtime.process.recorder import Recorder, StepWriter, open_events, open_steps
from tests.e2e.disk_soak import PLACES, fail_at, kept_store, whole_run

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")


@pytest.fixture(name="store", scope="module")
def _store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with kept_store(tmp_path_factory.mktemp("kept") / "store") as store:
        yield store


@pytest.fixture(name="whole", scope="module")
def _whole(tmp_path_factory: pytest.TempPathFactory, store: str) -> list[TrajectoryRow]:
    return whole_run(tmp_path_factory.mktemp("whole") / "launch", store)


@needs_root
@pytest.mark.e2e
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["kill, a disk of 48 KiB", "run, a store on a disk of 600 KiB"])
def test_a_run_on_a_full_disk(name: str, tmp_path: Path, store: str, whole: Sequence[TrajectoryRow]) -> None:
    """Before, the run ended without its result and blamed the output; a store without room was a lack of the host."""
    verdict = fail_at(PLACES[name], tmp_path / "place", store, whole)
    assert verdict.problems == ()
    assert verdict.code == 74


@pytest.mark.e2e
@pytest.mark.timeout(120)
def test_a_run_whose_files_may_not_grow(tmp_path: Path, store: str, whole: Sequence[TrajectoryRow]) -> None:
    """Before, a quota on the events ended the run without its result."""
    verdict = fail_at(PLACES["kill, files of 8000 bytes"], tmp_path / "place", store, whole)
    assert verdict.problems == ()
    assert (verdict.code, verdict.steps > 0) == (74, True)


def test_a_worker_counts_the_records_that_it_lost(tmp_path: Path) -> None:
    """Before, the OSError of a record ended the worker, and then each of its heirs."""
    path = tmp_path / "events.jsonl"
    fd = open_events(path)
    Recorder(fd, AGENT).write(JobRecord(version=VERSION, job=Job()))
    recorder = Recorder(fd, 3, StepWriter(open_steps(tmp_path / "steps"), 3, 10))
    with open("/dev/full", "wb") as full:
        kept = os.dup(fd)
        os.dup2(full.fileno(), fd)
        recorder.write(PreparedRecord(epoch=1))
        recorder.write(PreparedRecord(epoch=1))
        os.dup2(kept, fd)
    recorder.write(PreparedRecord(epoch=2))
    lost = [each for each in read_events(path) if isinstance(each, LostRecord)]
    assert [(each.worker, each.records, each.why) for each in lost] == [(3, 2, "No space left on device")]
    assert gaps(read_history(path)) == ("worker 3 could not write 2 records: No space left on device",)


def test_the_agent_names_the_file_that_it_cannot_write(tmp_path: Path) -> None:
    """Before, the error said "output"."""
    with open("/dev/full", "wb") as full, pytest.raises(StorageError, match=r"cannot write '/dev/full': No space left"):
        Recorder(full.fileno(), AGENT).write(PreparedRecord(epoch=1))


def test_a_print_of_a_layer_survives_a_full_disk() -> None:
    """Before, a print in a layer raised OSError, which ended the worker and each heir."""
    code = (
        "import sys\n"
        "from engine.runtime.process.subprocesses import log_stream\n"
        "stream = log_stream(1)\n"
        "for _ in range(3): print('word ' * 5000, file=stream)\n"
        "stream.flush(); print('on it goes', file=sys.stderr)\n"
    )
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"on it goes\n")
