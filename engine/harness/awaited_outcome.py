"""The outcome of a run that was started elsewhere: of several hosts from their store, of any run from its folder.

Rule: the folder of a host only has the records of that host. If the run may continue without it, only the store knows.
"""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

from engine.core.errors import CoordinatorUnavailableError, NothingMatchedError
from engine.core.history.process_records import HostRecord
from engine.core.history.run_records import JobRecord
from engine.files.events_file import GrowingEvents
from engine.files.run_folder import RunFolder, find_run
from engine.harness.dead_runs import launcher_runs
from engine.runtime.agent.host_registry import HostKeys, HostOutcome
from engine.runtime.process.interrupts import rest
from engine.runtime.store.etcd_settings import EtcdSettings

_POLL_S = 0.25
_CALL_S = 2.0
_START_S = 60.0  # the time that a launcher may take from its folder to its first event
_LEFT = "left"


def awaited_end(results: Path, run: str | None, etcd: EtcdSettings | None) -> tuple[str, HostOutcome]:
    """Waits for the end of a run; returns its name and its outcome. `run` is an id in the store, or names a folder.

    Raises:
        NothingMatchedError: neither the store nor the folder of results knows the run.
        CoordinatorUnavailableError: nothing is left that knows the outcome.
    """
    if run and etcd is not None and (outcome := _of_store(run, etcd)) is not None:
        return run, outcome
    try:
        folder = find_run(results, run)
    except NothingMatchedError as error:
        if etcd is None or not run:
            raise
        places = ", ".join(map(str, etcd.endpoints))
        raise NothingMatchedError(f"no run {run!r} of several hosts in the store at {places}, and {error}") from error
    run_id = _run_id(folder)
    if run_id and etcd is not None and (outcome := _of_store(run_id, etcd)) is not None:
        return run_id, outcome
    return folder.path.name, _of_folder(folder, run_id)


def _of_store(run_id: str, etcd: EtcdSettings) -> HostOutcome | None:
    from engine.runtime.store.etcd_kv import EtcdKV

    with closing(EtcdKV(etcd, f"/bamboo/{run_id}/", deadline_s=_CALL_S)) as kv:
        return HostKeys(kv).end()


def _run_id(folder: RunFolder) -> str:
    """Returns the name in the store of a run on several hosts; an empty string for one host."""
    host = GrowingEvents(folder.events, last_commits=True).read_on().first(HostRecord)
    return host.run_id if host is not None and host.node else ""


def _of_folder(folder: RunFolder, run_id: str) -> HostOutcome:
    events = GrowingEvents(folder.events, last_commits=True)
    while True:
        history = events.read_on()
        is_new = history.first(JobRecord) is None and time.time() - folder.path.stat().st_mtime < _START_S
        if history.ended is None and not is_new and not launcher_runs(history, folder.path):
            history = events.read_on()
            if history.ended is None:
                raise _unknown("the launcher is gone and did not record the end of the run", run_id)
        if history.ended is not None:
            if history.ended.outcome == _LEFT:
                raise _unknown("this host has left the run, which continues without it", run_id)
            return HostOutcome(history.ended.exit_code, history.ended.outcome)
        rest(_POLL_S)


def _unknown(why: str, run_id: str) -> CoordinatorUnavailableError:
    hint = f"; its store may know more: bamboo status --wait {run_id} --etcd HOST:PORT" if run_id else ""
    return CoordinatorUnavailableError(why + hint)
