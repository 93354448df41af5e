"""The cells of scenarios/matrix-hangs.yaml over the double of NCCL: whoever stops is put out, and nobody else.

Workers are threads here. So a process that stands still is a thread that does, and who stops in init or in an abort
stands in that call of NCCL: its own deadline must end it, because the others see no error. Of the 36 cells, one of each
row runs in `make test`, and all with real processes in `make soak-tests` (`tests/e2e/test_hang_matrix.py`).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest

from engine.core.checks.trajectory import trajectory_hash
from engine.core.exclusion import Cause, Exclusion
from engine.core.faults.fault import Fault
from engine.files.jobs.matrix_file import PlannedCell, read_matrix
from engine.runtime.agent import session
from engine.runtime.agent.run_state import Ending
from engine.runtime.faults.registry import kinds
from engine.runtime.transport.nccl_transport import ENDS_ITSELF
from engine.runtime.worker import thread_worker
from engine.runtime.worker import worker as backends
from tests.doubles.fake_nccl import FakeNccl, NcclBesideLinks
from tests.runtime.thread_runs import run_in_threads

ROWS = ("before", "in", "after", "init", "abort", "kernel")
WAITS = ("RECV_F", "RECV_B", "REDUCE_GRAD", "LOG", "HEAL", "COMMIT")
IN_NCCL = {"init": ("connect", 3), "abort": ("revoke", 2)}  # the call of a worker that lives through two deaths
OF_DIAGONAL = set(zip(ROWS, WAITS, strict=True))
CELLS = [
    pytest.param(row, waits, id=f"{row}/{waits}", marks=[] if (row, waits) in OF_DIAGONAL else pytest.mark.soak)
    for row in ROWS
    for waits in WAITS
]
DEADLINE_S = 10.0  # that of the scenarios

pytestmark = pytest.mark.timeout(90)


@cache
def cells() -> dict[str, PlannedCell]:
    return {each.cell.name: each for each in read_matrix("matrix-hangs", kinds()).cells}


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNccl]:
    """Puts the transport of NCCL in place of that of each worker in this process, on a double with short deadlines."""
    nccl = FakeNccl()
    nccl.open_s, nccl.abort_s = 1.0, 0.4
    monkeypatch.setattr(thread_worker, "ThreadBackend", partial(NcclBesideLinks, nccl))
    monkeypatch.setattr(session, "refuse_what_this_host_lacks", lambda job: None)
    yield nccl
    nccl.stands.clear()


@pytest.fixture(scope="module")
def twin() -> str:
    """The trajectory of the job without a fault, which all cells have."""
    job = next(iter(cells().values())).loaded.scenario.job
    return trajectory_hash(run_in_threads(replace(job, device="cpu")).view.run_state.rows)


def run(row: str, waits: str, nccl: FakeNccl) -> tuple[Ending, tuple[Exclusion, ...], float]:
    """Returns the end of the run of a cell, its verdicts behind those of the deaths, and the seconds of all of it."""
    loaded = cells()[f"{row}/{waits}"].loaded
    faults = [in_threads(each) for each in loaded.faults]
    if row in IN_NCCL:
        del faults[-1]
        nccl.stands[1 if waits == "RECV_F" else 0] = IN_NCCL[row]  # type: ignore[assignment]
    since_s = time.monotonic()
    ending = run_in_threads(replace(loaded.scenario.job, device="cpu", backend="nccl"), faults)
    seconds = time.monotonic() - since_s
    verdicts = [out for epoch in ending.view.run_state.epochs for out in epoch.verdict]
    return ending, tuple(verdicts[2 if row in IN_NCCL else 1 :]), seconds


def in_threads(fault: Fault) -> Fault:
    return replace(fault, do="hang", parameters={}) if fault.do == "stop" else fault


def wrong(row: str, waits: str, nccl: FakeNccl, twin: str) -> list[str]:
    """Returns what is wrong with a cell: whoever stopped is named with the cause, and nobody else is out."""
    ending, verdicts, seconds = run(row, waits, nccl)
    if (ending.outcome, ending.error) != ("finished", None):
        return [f"the run {ending.outcome}: {ending.error}"]
    found = [] if seconds < DEADLINE_S else [f"it took {seconds:.1f} s"]
    found += [] if trajectory_hash(ending.view.run_state.rows) == twin else ["other weights than the twin's"]
    if [each.cause for each in verdicts] != [Cause.RAISED if row in IN_NCCL else Cause.HANG]:
        found.append(f"verdicts {verdicts}")
    elif row in IN_NCCL and ENDS_ITSELF not in verdicts[0].why:
        found.append(f"no word of NCCL: {verdicts[0].why}")
    elif row == "kernel" and "hangs in a kernel of a played GPU for" not in verdicts[0].why:
        found.append(f"no word of the GPU: {verdicts[0].why}")
    return [*found, *nccl.wrongs]


@pytest.mark.parametrize(("row", "waits"), CELLS)
def test_whoever_stops_is_put_out_and_nobody_else(twin: str, nccl: FakeNccl, row: str, waits: str) -> None:
    assert wrong(row, waits, nccl, twin) == []


def test_planted_abort_without_a_deadline_turns_its_cell_red(twin: str, nccl: FakeNccl) -> None:
    """Nobody is put out for 3 s, which is ten times the deadlines of the cell; without an end the test would last."""
    nccl.abort_s = 1e6
    release = threading.Timer(3.0, nccl.stands.clear)
    release.start()
    assert wrong("abort", "RECV_F", nccl, twin) == ["verdicts ()"]
    release.cancel()


def test_a_process_that_ends_itself_says_why_first(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr(os, "kill", lambda *given: done.append(given))
    control: Any = SimpleNamespace(at=(3, 1, True), send=done.append)
    backends.end_this_process(control, "GPU 0 (NVIDIA H100)", ENDS_ITSELF)
    told, killed = done
    assert (told.step, told.exception.in_verdict()) == (
        3,
        "ended with GPU error: NCCL did not abort the communicator of a group in time, on GPU 0 (NVIDIA H100)",
    )
    assert killed == (os.getpid(), signal.SIGKILL)


def test_the_matrix_has_six_places_times_six_calls() -> None:
    assert [f"{row}/{waits}" for row in ROWS for waits in WAITS] == list(cells())
