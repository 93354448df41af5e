"""The result of a run on the terminal: its error, its summary line, and the commands that a user may want next."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bamboo_cli.echo import echo
from bamboo_cli.worker_rows import evaluation_words
from engine.core.errors import BambooError, ExitCode, Problem, RepeatedExceptionError, StorageError, UserError
from engine.core.units import finite
from engine.files.jobs.resolved_job import ResolvedJob, secret_arguments

if TYPE_CHECKING:
    from engine.core.job.job import Job
    from engine.harness.case import CaseResult


_STALLED = "training stalled for "


def print_result(result: CaseResult, resolved: ResolvedJob, as_json: bool) -> int:
    """Prints the result of a run; returns the exit code."""
    summary = result.to_plain()
    code = int(summary["exit_code"])
    try:
        _print_ending(summary, result, resolved, as_json)
        if as_json:
            echo(json.dumps(finite(summary)))
    except BrokenPipeError:
        pass  # the reader of the output is gone; the run folder has all of it
    except OSError as error:
        with contextlib.suppress(OSError):
            echo(f"bamboo: output: {error.strerror or error}; the full output is in {result.folder}", err=True)
        return code or ExitCode.STORAGE
    return code


def with_origins(problems: Iterable[Problem], resolved: ResolvedJob) -> list[Problem]:
    """Returns problems with the origins of the wrong values."""
    origins = {field: origin for field, origin in resolved.origins.items() if origin != "default"}
    return [replace(problem, source=origins.get(problem.field, "")) for problem in problems]


def _print_ending(summary: dict[str, Any], result: CaseResult, resolved: ResolvedJob, as_json: bool) -> None:
    """Prints the summary line, with the command that continues the run; to stderr for errors and beside JSON."""
    from bamboo_cli.live import untold
    from engine.core.texts import not_kept_words

    if result.error is not None:
        error: BambooError = result.error
        if isinstance(error, UserError):
            error = UserError(with_origins(error.problems, resolved))
        for line in str(error).splitlines():
            echo(f"bamboo: {line}", err=True)
    goes_on = result.may_go_on(resolved.job.steps)
    resume = _resume_command(Path(summary["run_dir"]), resolved.job) if goes_on else ""
    resume += _changed_so_that_it_works(result, resolved.job) if resume else ""
    if summary["exit_code"] in (ExitCode.STATE_LOST, ExitCode.STOPPED_RESUMABLE):
        from engine.harness.state_lost import state_lost_lines

        for line in state_lost_lines(resolved.job, result.observation.history.records, summary["steps"], resume):
            echo(f"  {line}", err=True)
    if line := not_kept_words(summary["kept"], summary["not_kept"]):
        echo(line, err=as_json)
    for line in untold(result.recovery_lines(), err=as_json):
        _print_recovery(line, err=as_json)
    echo("; ".join(_summary_parts(summary, result, resolved)), err=as_json)
    echo(summary["run_dir"], err=as_json)
    summary["next"] = resume or None
    summary |= {"blocks": resolved.job.blocks, "why_blocks": resolved.why_blocks or None}
    if not as_json:
        commands = [*([resume] if resume else []), *_next_commands(summary, result, resolved)]
        echo(f"next: {'  |  '.join(commands)}", err=True)


def _print_recovery(line: str, *, err: bool) -> None:
    from bamboo_cli.tables import say, width_of

    if width_of(err=err) is None:
        echo(line, err=err)
    else:
        say(*with_cost(line), err=err)


def with_cost(line: str) -> tuple[str | tuple[str, str], ...]:
    """Returns a line about a recovery as parts, with how long training stalled, its one cost, in bold."""
    from bamboo_cli.tables import STRONG

    before, words, after = line.partition(_STALLED)
    cost, comma, rest = after.partition(", ")
    return f"{before}{words}", (cost, STRONG), f"{comma}{rest}"


def _resume_command(run: Path, job: Job) -> str:
    """Returns the command that goes on with a run; empty without one, and from a disk that does not answer."""
    from engine.files.jobs.checkpoint_choice import resume_command
    from engine.runtime.agent.orders import answered

    try:
        return str(answered(str(run), lambda: resume_command(run, job)))
    except StorageError as error:
        echo(f"bamboo: {error}", err=True)
        return ""


def _changed_so_that_it_works(result: CaseResult, job: Job) -> str:
    """Returns further words for the command that resumes a run: with the same bits, it would fail in the same step."""
    error = result.run_error
    if error is not None and error.exit_code == ExitCode.NOT_FINITE:
        return f" --other-bits --lr {job.lr / 2:g}"
    return " --other-bits" if isinstance(error, RepeatedExceptionError) else ""  # the code was corrected


def _summary_parts(summary: dict[str, Any], result: CaseResult, resolved: ResolvedJob) -> list[str]:
    """Returns the parts of the summary line."""
    outcome = summary["outcome"]
    parts = [f"{outcome}: {summary['steps']} steps in {_duration(summary)}"]
    if summary["resumed_after"] is not None:
        origin = resolved.origin
        of = f" of run {origin.run} in {origin.place}" if origin and origin.step == summary["resumed_after"] else ""
        parts.append(f"resumed after step {summary['resumed_after']}{of}")
    if summary["loss_last"] is not None:
        parts.append(f"loss {summary['loss_first']:.4f} -> {summary['loss_last']:.4f}")
        if outcome != "finished":
            parts.append(f"last committed step {summary['steps'] - 1}, counted from 0")
    parts += evaluation_words(summary["evaluations"])
    if summary["stopped_early"]:
        parts.append(summary["stopped_early"])
    if (best := summary["best_step"]) is not None:
        parts.append(f"best {resolved.job.best.partition(':')[0]} after step {best}")
    if summary["missing"]:
        parts.append(f"missing: {', '.join(summary['missing'])}")
    if summary["trajectory"]:
        parts.append(f"trajectory {summary['trajectory'][:12]}")
        parts.append(f"weights {summary['weights'][:12]} after step {summary['weights_step']}")
    if result.is_interrupted and result.observation.twin is not None:
        parts.append(f"not compared: {result.observation.twin}")
    return parts


def _duration(summary: Mapping[str, Any]) -> str:
    """Returns the time that the command took, and its parts: until step 0, of the steps, of the twin."""
    whole_s, train_s, twin_s = summary["wall_s"], summary["train_s"], summary["twin_s"]
    if train_s is None:
        return f"{whole_s:.1f} s"
    parts = [f"start {max(0.0, whole_s - train_s):.1f} s", f"training {train_s:.1f} s"]
    parts += [f"twin {twin_s:.1f} s"] if twin_s is not None else []
    return f"{whole_s + (twin_s or 0):.1f} s ({', '.join(parts)})"


def _next_commands(summary: dict[str, Any], result: CaseResult, resolved: ResolvedJob) -> list[str]:
    """Returns the commands that a user may want after a run; a resumed one has a kill in no step of its own."""
    from engine.files.host_facts import fixed_instruction_set

    job, commands = resolved.job, [f"bamboo report --open {shlex.quote(summary['run_dir'])}"]
    is_usual = resolved.origin is None and not result.recoveries and summary["outcome"] == "finished"
    is_compared = job.audit > 0 and job.deterministic  # else a kill needs --no-twin
    if is_usual and is_compared and job.retains and job.num_workers > 1 and job.steps > 1:
        record = shlex.quote(f"{summary['run_dir']}/run.json")
        secret = "".join(f"--set {name}=VALUE " for name in secret_arguments(job))
        secret += f"--isa {isa} " if (isa := fixed_instruction_set()) else ""
        commands.append(f"bamboo run {record} {secret}--kill {job.steps // 2}:{job.slots // 2}")
    return commands
