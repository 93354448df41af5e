"""`bamboo status`: the owners of the stages of a run, its progress, and its verdicts."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bamboo_cli.report import DEFAULT_RESULTS, Results

if TYPE_CHECKING:
    from engine.core.history.process_records import StoreRecord
    from engine.core.history.run_history import RunHistory
    from engine.core.membership.run_status import RunStatus
    from engine.files.run_folder import RunFolder

EPILOG = "Examples:  bamboo status  |  bamboo status --watch  |  bamboo status 20261121-1200 --json"
_EVERY_S = 1.0
_START_S = 60.0  # the time that a run may take to start its store, its coordinator and its workers


def status(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="A run's folder name, or its beginning; the latest by default.")
    ] = None,
    *,
    results: Results = DEFAULT_RESULTS,
    watch: Annotated[bool, typer.Option("--watch", help="Print it again every second until the run ends.")] = False,
    plain_http: Annotated[
        bool, typer.Option("--etcd-plain-http", help="Allow clear text to an etcd that is not on this host.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object (with --watch, one per line).")
    ] = False,
) -> None:
    """Show the owners of the stages of a run, its step, heartbeats and verdicts, from etcd or else from its events.

    Exit with 69 if the launcher of the run is gone and did not record its end.
    """
    from engine.core.errors import CoordinatorUnavailableError
    from engine.core.history.recorded_status import STARTING, without_word

    while True:
        found, live, has_launcher = _find(results, run, plain_http)
        found = found if has_launcher else without_word(found)
        typer.echo(json.dumps(asdict(found) | {"live": live}) if as_json else "\n".join(_lines(found, live)))
        if not has_launcher:
            last = f"last committed step {found.committed}" if found.committed >= 0 else "no step was committed"
            raise CoordinatorUnavailableError(f"the launcher is gone and did not record the end of the run; {last}")
        if not (watch and (live or found.phase == STARTING)):
            return
        time.sleep(_EVERY_S)


def _find(results: Path, run: str | None, plain_http: bool) -> tuple[RunStatus, bool, bool]:
    """Returns the status of a run, whether it is from the store, and whether a launcher runs or recorded the end."""
    from engine.core.history.process_records import StoreRecord
    from engine.core.history.recorded_status import status_of_history
    from engine.files.run_folder import find_run

    folder = find_run(results, run)
    history = _history(folder)
    store = history.first(StoreRecord)
    if store and not history.ended:
        if (told := _from_store(store, plain_http)) is not None:
            return told, True, True
        history = _history(folder)  # a run records its end before its store stops
    found = status_of_history(folder.path.name, history)
    is_new = not found.workers and time.time() - folder.path.stat().st_mtime < _START_S
    return found, False, is_new or history.ended is not None


def _history(folder: RunFolder) -> RunHistory:
    """Returns the history of a run; it is empty if the run has only its folder yet."""
    from engine.core.history.run_history import RunHistory
    from engine.files.events_file import read_history

    return read_history(folder.events) if folder.events.exists() else RunHistory()


def _from_store(store: StoreRecord, plain_http: bool) -> RunStatus | None:
    """Returns the status in the store of a run; None if the store is gone, or the run has no coordinator any more."""
    from bamboo_cli.options.etcd import etcd_settings
    from engine.core.errors import CoordinatorUnavailableError
    from engine.core.membership.run_status import status_of_keys
    from engine.runtime.agent.coordinator import ROLE
    from engine.runtime.store.etcd_kv import EtcdKV

    # The environment describes a kept cluster, not a run's private etcd.
    settings = etcd_settings(",".join(store.endpoints), plain_http, {} if store.private else os.environ)
    assert settings is not None
    kv = EtcdKV(settings, f"/bamboo/{store.run_id}/", deadline_s=2.0)
    try:
        keys = {item.key: item.value for item in kv.read_prefix("").items}
        return status_of_keys(store.run_id, keys) if ROLE in keys else None
    except CoordinatorUnavailableError:
        return None
    finally:
        kv.close()


def _lines(found: RunStatus, live: bool) -> list[str]:
    steps = f"step {found.committed + 1} of {found.num_steps}" if found.num_steps else "no step yet"
    lines = [f"{found.run_id}: {found.phase}, epoch {found.epoch}, {steps}" + ("" if live else " (from events)")]
    for each in found.workers:
        heard = "" if each.heard_s_ago is None else f"  heard {each.heard_s_ago:.1f} s ago"
        before = f"  before {_slots(each.before)}" if each.before else ""
        lines.append(f"  worker {each.worker}  pid {each.pid}  stage {_slots(each.now)}{before}  {each.state}{heard}")
    return lines + [f"  epoch {epoch}: {reason}" for epoch, reason in found.verdicts]


def _slots(slots: tuple[tuple[int, int], ...]) -> str:
    return " ".join(f"{pipeline}.{stage}" for pipeline, stage in slots) or "-"
