"""`bamboo status`: the owners of the stages of a run, its progress, and its verdicts."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from bamboo_cli import completion
from bamboo_cli.echo import echo
from bamboo_cli.host_options import EndpointsOfRun, PlainHttp, etcd_settings, settings_of_run
from bamboo_cli.report import DEFAULT_RESULTS, Results
from engine.core.units import finite

if TYPE_CHECKING:
    from engine.core.history.process_records import StoreRecord
    from engine.core.protocol.run_status import RunStatus
    from engine.files.events_file import GrowingEvents
    from engine.runtime.store.etcd_settings import EtcdSettings

EPILOG = (
    "Examples:  bamboo status  |  bamboo status --watch  |  bamboo status 20261121-1200 --json  |  "
    "bamboo status --wait 4711 --etcd 10.0.0.9:2379"
)
_EVERY_S = 1.0
_START_S = 60.0  # the time that a run may take to start its store, its coordinator and its workers


def status(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="Name of a run, or the start of it (default: the latest). With --wait and --etcd, also the ID of a "
            "run on several hosts.",
            autocompletion=completion.runs,
        ),
    ] = None,
    *,
    results: Results = DEFAULT_RESULTS,
    watch: Annotated[
        bool, typer.Option("--watch", help="Refresh every second until the run ends; a pipe gets only the changes.")
    ] = False,
    wait: Annotated[
        bool,
        typer.Option("--wait", help="Wait until the run ends, print the outcome, and exit with the run's exit code."),
    ] = False,
    etcd: EndpointsOfRun = "",
    plain_http: PlainHttp = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object (with --watch, one per line).")
    ] = False,
) -> None:
    """Show the stage owners, step, heartbeats and verdicts of a run, from its etcd or else from its events.

    Exit with 69 if the process that started the run is gone and the run's end was not recorded.
    """
    from engine.core.errors import Problem, UserError

    if wait and watch:
        raise UserError([Problem("--watch", "none beside --wait", "both", "--wait prints the outcome alone")])
    if wait:
        _wait_for_end(results, run, etcd, plain_http=plain_http, as_json=as_json)
    _show(Reader(results, run, etcd, plain_http), watch=watch, as_json=as_json)


def _show(reader: Reader, *, watch: bool, as_json: bool) -> None:
    """Shows the status once, or until the run ends; raises CoordinatorUnavailableError if its launcher is gone."""
    from bamboo_cli.status_picture import StatusPicture
    from engine.core.protocol.run_status import CHECKING, COMPARING, UNDER_WAY, without_word

    with nullcontext() if as_json else StatusPicture(watch) as picture:
        while True:
            run_status, live, has_launcher = reader.look()
            phase, run_status = run_status.phase, run_status if has_launcher else without_word(run_status)
            if picture is None:
                echo(json.dumps(finite(asdict(run_status) | {"live": live})))
            else:
                picture.show(run_status, live)
            if not (has_launcher and watch and (live or run_status.phase in UNDER_WAY)):
                break
            time.sleep(_EVERY_S)
    if not has_launcher:
        last = f"last committed step {run_status.committed}" if run_status.committed >= 0 else "no step was committed"
        if phase in (COMPARING, CHECKING):
            last = f"training had ended before ({last}), and the launcher was {phase}"
        _lament(f"{last}{reader.elsewhere}", as_json=as_json)


def _lament(last: str, *, as_json: bool) -> NoReturn:
    from engine.core.errors import CoordinatorUnavailableError

    error = CoordinatorUnavailableError(f"the launcher is gone and did not record the end of the run; {last}")
    if not as_json:
        raise error
    echo(f"bamboo: {error}", err=True)  # the status is the one object on stdout: its phase tells programs
    raise typer.Exit(int(error.exit_code))


def _wait_for_end(results: Path, run: str | None, etcd: str, *, plain_http: bool, as_json: bool) -> NoReturn:
    """Prints the outcome of a run as soon as it has one, and exits with its exit code; raises BambooError."""
    from engine.harness.awaited_outcome import awaited_end

    name, end = awaited_end(results, run, etcd_settings(etcd, plain_http))
    summary = {"run": name, "outcome": end.words, "exit_code": end.code}
    echo(json.dumps(summary) if as_json else f"{name}: {end.words}; exit code {end.code}")
    raise typer.Exit(end.code)


class Reader:
    """Looks for the status of a run again and again; reads each line of its events once."""

    def __init__(self, results: Path, run: str | None, etcd: str, plain_http: bool):
        self._results = results
        self._run = run
        self._etcd = etcd
        self._plain_http = plain_http
        self._is_told = False
        self._events: GrowingEvents | None = None

    def look(self) -> tuple[RunStatus, bool, bool]:
        """Returns the status, whether it is from the store, and whether a launcher runs or recorded the end."""
        from engine.core.history.process_records import StoreRecord
        from engine.core.protocol.run_status import live_status, status_of_history
        from engine.files.events_file import GrowingEvents, StepReader
        from engine.files.run_folder import find_run
        from engine.harness.dead_runs import launcher_runs

        folder = find_run(self._results, self._run)
        if self._events is None or self._events.path != folder.events:
            self._events = GrowingEvents(folder.events, last_commits=True)
        history = self._events.read_on()
        store, name = history.first(StoreRecord), folder.path.name
        store_status = self._from_store(folder.logs, store) if store and not history.training_ended else None
        runs = launcher_runs(history, folder.path)
        history = self._events.read_on()  # a launcher records the end of training before its store stops, then its own
        history.last_action |= StepReader(folder.path).last_actions({})
        if store_status is not None and not history.training_ended:
            return live_status(store_status, status_of_history(name, history)), True, True
        run_status = status_of_history(name, history)
        is_new = not run_status.workers and time.time() - folder.path.stat().st_mtime < _START_S
        return run_status, False, is_new or history.ended is not None or runs

    @property
    def elsewhere(self) -> str:
        """The words that tell where more is known: other hosts may continue a run on several hosts."""
        from engine.core.history.process_records import HostRecord

        host = self._events.read_on().first(HostRecord) if self._events is not None else None
        if host is None or not host.node:
            return ""
        return f"; other hosts may continue it: bamboo status --wait {host.run_id} --etcd HOST:PORT"

    def _from_store(self, logs: Path, store: StoreRecord) -> RunStatus | None:
        """Returns the status in a store that the user named; None, once with a reason, if there is none any more."""
        settings = settings_of_run(logs, store, self._etcd, self._plain_http)
        if settings is not None:
            return _status_in(store.run_id, settings)
        if not self._is_told:
            hint = "is none that --etcd or BAMBOO_ETCD names"
            echo(f"its store was not contacted: {', '.join(store.endpoints)!r} {hint}", err=True)
        self._is_told = True
        return None


def _status_in(run_id: str, settings: EtcdSettings) -> RunStatus | None:
    from engine.codec.documents import status_of_keys
    from engine.core.errors import CoordinatorUnavailableError
    from engine.core.protocol.coordinator_state import ROLE
    from engine.runtime.store.etcd_kv import EtcdKV

    kv = EtcdKV(settings, f"/bamboo/{run_id}/", deadline_s=2.0)
    try:
        keys = {item.key: item.value for item in kv.read_prefix("").items}
        return status_of_keys(run_id, keys, time.monotonic_ns()) if ROLE in keys else None
    except CoordinatorUnavailableError:
        return None
    finally:
        kv.close()
