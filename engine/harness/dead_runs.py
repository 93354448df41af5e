"""Distinguishes dead runs from live ones, and deletes the private stores left by killed runs in a folder of results.

Rule: a launcher locks its run folder while it lives. Launchers without a lock are identified by their process: it has
the recorded pid and was created before the last event was written.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from engine.core.history.process_records import HostRecord
from engine.core.history.run_history import RunHistory
from engine.core.history.run_records import JobRecord
from engine.files.atomic_write import open_to_read
from engine.files.matrix_results import RESULTS
from engine.files.run_folder import RunFolder, delete_tree, run_names
from engine.runtime.process.kernel import is_alive
from engine.runtime.process.locks import unused_folder

_STORES = ("logs/etcd", "twin/logs/etcd")
_START_S = 60.0  # the time that a launcher may take from its folder to its first event
_LAST_BYTES = 1 << 16  # of a file of events, with the record of the end if there is one
_CLOCK_ERROR_S = 0.05  # of the times of processes, which the kernel counts in ticks


@contextlib.contextmanager
def dead_run(run: Path) -> Iterator[bool]:
    """Yields whether no launcher uses a run folder; if so, none can start to use it during the block."""
    with unused_folder(run) as is_unused:
        yield is_unused and not _has_launcher(RunFolder(run))


def launcher_runs(history: RunHistory, run: Path) -> bool:
    """Returns whether the process that began a run lives; with several hosts its pid may be another machine's."""
    job, host = history.first(JobRecord), history.first(HostRecord)
    is_of_several = host is not None and bool(host.node)
    if job is None or not (is_of_several or is_alive(job.pid)):
        return False
    with unused_folder(run) as is_unused:  # the pid may belong to another process by now
        return not is_unused


def live_runs(results: Path) -> list[str]:
    """Returns the names of the live runs in `results`, the oldest first."""
    live = []
    for name in run_names(results):
        with unused_folder(results / name) as is_unused:
            if not is_unused and _has_launcher(RunFolder(results / name)):
                live.append(name)
    return live


def stores(run: Path) -> list[Path]:
    """Returns the data of private stores in a run folder: of the run, and of its twin."""
    # Every launch checks every run, so the first test creates no objects.
    paths = [run / place for place in _STORES if os.path.isdir(f"{run}/{place}")]
    return [path for path in paths if path.resolve() == run.resolve() / path.relative_to(run)]


def delete_dead_stores(results: Path) -> None:
    """Deletes the private stores of killed runs in `results`; what cannot be deleted stays."""
    for name in run_names(results):
        run = results / name
        if left := stores(run):
            with dead_run(run) as is_dead:
                for store in left if is_dead else ():
                    delete_tree(store, results)


def _has_launcher(run: RunFolder) -> bool:
    import psutil

    try:
        with open(open_to_read(run.events), "rb") as file:
            first = json.loads(file.readline())
            status = os.fstat(file.fileno())
            file.seek(max(0, status.st_size - _LAST_BYTES))
            if b'\n{"event":"ended",' in file.read() or str(first["event"])[:1].isupper():
                return False  # events of another launcher's job begin so: there only the lock counts
    except FileNotFoundError:
        if (run.path / RESULTS).exists():  # a matrix that has begun
            return False
        return time.time() - run.path.stat().st_mtime < _START_S
    except (OSError, LookupError, TypeError, ValueError, RecursionError):
        return False
    try:  # a pid that was reused since then is not the launcher's
        return psutil.Process(int(first["pid"])).create_time() < status.st_mtime + _CLOCK_ERROR_S
    except (psutil.Error, LookupError, TypeError, ValueError):
        return False
