"""`bamboo run`: trains a job; also shows its plan and where its values come from."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bamboo_cli.options.etcd import Endpoints, PlainHttp, etcd_settings
from bamboo_cli.options.faults import DEFAULT_GRACE, Grace, Kills, NoTwin, faults_of, grace_seconds
from bamboo_cli.options.job import takes_job
from engine.core.errors import BambooError, ExitCode, UserError
from engine.files.jobs.resolved_job import Resolved, explain

if TYPE_CHECKING:
    from bamboo_cli.aftermath import Aftermath
    from engine.core.faults.fault import Fault
    from engine.files.run_folder import RunFolder
    from engine.runtime.agent.session import Ending
    from engine.runtime.store.etcd_settings import EtcdSettings

EPILOG = (
    "Examples:  bamboo run  |  bamboo run job.yaml --stages 2  |  bamboo run --model resnet18 "
    "--set model_args.width=16  |  bamboo run --kill 5:2  |  bamboo run --redundancy eager --kill 5:2:B:3 --kill 9:0  "
    "|  bamboo run --dry-run --explain  |  bamboo run --json --steps 5"
)


@takes_job
def run(
    resolved: Resolved,
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object to stdout; progress to stderr.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan; start no process.")] = False,
    kill: Kills = None,
    no_twin: NoTwin = False,
    grace: Grace = DEFAULT_GRACE,
    etcd: Endpoints = "",
    etcd_plain_http: PlainHttp = False,
    explained: Annotated[
        bool, typer.Option("--explain", help="Print each value and its origin; start no process.")
    ] = False,
) -> None:
    """Train a model in a pipeline of worker processes. Without arguments: a small GPT on real text, 4 stages."""
    faults = faults_of(kill or (), resolved.job, with_twin=not no_twin)
    grace_s = grace_seconds(grace)
    if explained:
        _print_explanation(resolved, as_json and not dry_run)
    if dry_run:
        from bamboo_cli.options.plan import print_plan

        print_plan(resolved.job, as_json, faults)
    if not (explained or dry_run):
        settings = etcd_settings(etcd, etcd_plain_http)
        raise typer.Exit(_train(resolved, as_json, settings, faults, grace_s, with_twin=not no_twin))


def _print_explanation(resolved: Resolved, as_json: bool) -> None:
    rows = explain(resolved)
    if as_json:
        typer.echo(json.dumps({field: {"value": value, "origin": origin} for field, value, origin in rows}))
        return
    width = max(len(field) for field, _, _ in rows)
    value_width = min(32, max(len(repr(value)) for _, value, _ in rows))
    for field, value, origin in rows:
        typer.echo(f"{field:<{width}}  {value!r:<{value_width}}  {origin}")


def _train(
    resolved: Resolved,
    as_json: bool,
    etcd: EtcdSettings | None,
    faults: tuple[Fault, ...],
    grace_s: float,
    *,
    with_twin: bool,
) -> int:
    started_s = time.monotonic()
    # These load torch-free parts only; still, --help should not pay for them.
    from bamboo_cli.aftermath import aftermath_of
    from bamboo_cli.live import SCREEN
    from engine.files.run_folder import create_run_folder
    from engine.files.trajectory_file import write_trajectory
    from engine.harness.run_driver import drive, summary_of
    from engine.models.offer import unreadable_data

    job = resolved.job
    if problems := unreadable_data(job):
        raise _with_origins(UserError(problems), resolved)
    folder = create_run_folder(
        Path(job.results), job.name or _run_name(job.model), datetime.now(), secrets.token_hex(2)
    )
    _write_facts(folder, resolved)
    ending = drive(job, folder, SCREEN, etcd, faults=faults, grace_s=grace_s)
    wall_s = time.monotonic() - started_s
    write_trajectory(folder.trajectory, ending.view.account.rows)
    aftermath = aftermath_of(job, folder, ending, faults, etcd, SCREEN, with_twin=with_twin)
    ending = _judged(ending, aftermath)
    summary = summary_of(folder, ending, wall_s) | aftermath.as_dict()
    _write_facts(folder, resolved, summary)
    try:
        _print_ending(summary, ending, aftermath, resolved, folder, as_json)
        if as_json:
            typer.echo(json.dumps(summary))
    except BrokenPipeError:
        pass  # everything is on disk; whoever read the output has had enough
    except OSError as error:
        with contextlib.suppress(OSError):
            typer.echo(f"bamboo: output: {error.strerror or error}; all of it is in {folder.path}", err=True)
        return ending.exit_code or ExitCode.STORAGE
    return ending.exit_code


def _judged(ending: Ending, aftermath: Aftermath) -> Ending:
    """Returns the ending of a run, which failed also where it finished and its faults say otherwise."""
    error = aftermath.error()
    if ending.exit_code or error is None:
        return ending
    outcome = "invalid" if error.exit_code is ExitCode.INVALID_CASE else "failed"
    return replace(ending, outcome=outcome, exit_code=int(error.exit_code), error=error)


def _run_name(model: str) -> str:
    """Returns a folder's name for a model; of package.module:factory the factory."""
    return model.rpartition(":")[2].lower().replace("_", "-")[:40]


def _write_facts(folder: RunFolder, resolved: Resolved, summary: dict[str, Any] | None = None) -> None:
    from engine.files.host_facts import host_facts

    folder.write_run_json(
        {"job": asdict(resolved.job), "origins": resolved.origins, "host": host_facts(Path.cwd()), "result": summary}
    )


def _with_origins(error: BambooError, resolved: Resolved) -> BambooError:
    """Returns a user's error with the places that the values came from."""
    if not isinstance(error, UserError):
        return error
    origins = {field: origin for field, origin in resolved.origins.items() if origin != "default"}
    return UserError(replace(problem, source=origins.get(problem.field, "")) for problem in error.problems)


def _print_ending(
    summary: dict[str, Any],
    ending: Ending,
    aftermath: Aftermath,
    resolved: Resolved,
    folder: RunFolder,
    as_json: bool,
) -> None:
    """Prints the summary line; what went wrong goes to stderr, and so does everything when stdout is for JSON."""
    if ending.error is not None:
        for line in str(_with_origins(ending.error, resolved)).splitlines():
            typer.echo(f"bamboo: {line}", err=True)
    if ending.exit_code == ExitCode.STATE_LOST:
        from engine.files.events_file import read_events
        from engine.harness.state_lost import state_lost_lines

        for line in state_lost_lines(resolved.job, read_events(folder.events), summary["steps"]):
            typer.echo(f"  {line}", err=True)
    for line in aftermath.lines(summary["steps"] - 1):
        typer.echo(line, err=as_json)
    parts = [f"{ending.outcome}: {summary['steps']} steps in {summary['wall_s']:.1f} s"]
    if summary["steps"]:
        parts.append(f"loss {summary['loss_first']:.4f} -> {summary['loss_last']:.4f}")
        if ending.outcome != "finished":
            parts.append(f"last committed step {summary['steps'] - 1}")
    if summary["validation_loss"] is not None:
        parts.append(f"validation {summary['validation_loss']:.4f}")
    if summary["validation_metric"] is not None:
        parts.append(f"accuracy {summary['validation_metric']:.1%}")
    if summary["missing"]:
        parts.append(f"missing: {', '.join(summary['missing'])}")
    if summary["trajectory"]:
        parts.append(f"trajectory {summary['trajectory'][:12]}")
    typer.echo("; ".join(parts), err=as_json)
    typer.echo(summary["run_dir"], err=as_json)
