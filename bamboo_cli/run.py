"""`bamboo run`: trains a job; also shows its plan and the origin of its values."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from bamboo_cli.echo import echo
from bamboo_cli.host_options import Endpoints, InstructionSet, PlainHttp, etcd_settings, fixing
from bamboo_cli.job_options import OtherBits, Resume, takes_job
from bamboo_cli.run_options import (
    DEFAULT_GRACE,
    Grace,
    Injectable,
    Keywords,
    Kills,
    NoticeCommand,
    NoticeEvery,
    NoticeUrl,
    NoTwin,
    Spot,
    Tee,
    YesNo,
    announcing,
    asking,
    grace_on,
    grace_seconds,
    misspelt_kills,
    scenario_of,
)
from bamboo_cli.run_result import print_result, with_origins
from engine.core.checkpoint_rules import begun_with
from engine.core.checks.determinism import promises
from engine.core.errors import Problem, UserError, noting, required
from engine.files.jobs.resolved_job import ResolvedJob, explain

if TYPE_CHECKING:
    from engine.core.faults.fault import Fault
    from engine.core.faults.scenario import Scenario
    from engine.core.hosts.notice_answer import NoticeFrom
    from engine.runtime.process.spawner import Spawner
    from engine.runtime.store.etcd_settings import EtcdSettings

EPILOG = (
    "Examples:  bamboo run  |  bamboo run job.yaml --stages 2  |  bamboo run --model resnet18 "
    "--set model_args.width=16  |  bamboo run --kill 5:2  |  bamboo run --redundancy eager --kill 5:2:B:3 --kill 9:0  "
    "|  bamboo run results/latest/run.json  |  bamboo run --dry-run --explain  |  bamboo run --json --steps 5"
)
_AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout and progress to stderr.")]
_Explained = Annotated[
    bool, typer.Option("--explain", help="Print every value and where it comes from; start nothing.")
]
_Build = Annotated[
    bool,
    typer.Option(
        "--build",
        help="With --dry-run: also build the model, and print parameters, FLOPs, stage and memory of each layer.",
    ),
]
_InProcess = Annotated[
    bool, typer.Option("--in-process", help="Run workers as threads of this process, for a debugger; slower.")
]


class _Own(NamedTuple):
    """What the command's own flags say: the scenario of the kills, the grace, the source of notices, the etcd."""

    scenario: Scenario | None
    grace_s: float | None
    notices: NoticeFrom | None
    store: EtcdSettings | None


def _own(values: Mapping[str, Any], resolved: ResolvedJob | None, problems: list[Problem]) -> _Own:
    """Reads the flags beside those of the job, and appends their mistakes; a kill without a job has a form alone."""
    kills, in_process = values["kill"] or (), values["in_process"]
    scenario, store = None, None
    if resolved is None:
        problems += misspelt_kills(kills)
    else:
        kill_problems: list[Problem] = []
        job, with_twin, after = resolved.job, not values["no_twin"], begun_with(resolved.origin)
        scenario = noting(kill_problems, lambda: scenario_of(kills, job, with_twin=with_twin, after=after))
        problems += with_origins(kill_problems, resolved)
    if values["build"] and not values["dry_run"]:
        problems.append(Problem("--build", "--dry-run with it", "--build", "a run builds its model anyway"))
    spot = values["spot"]
    grace_s = noting(problems, lambda: grace_seconds(grace_on(spot, values["grace"])))
    every, sources = values["notice_every"], (values["notice_command"], values["notice_url"])
    notices = noting(problems, lambda: asking(*sources, every, in_process, spot))
    if not (values["dry_run"] or values["explained"]):
        store = noting(problems, lambda: etcd_settings(values["etcd"], values["etcd_plain_http"]))
        problems += _not_in_process(resolved) if in_process else ()
    return _Own(scenario, grace_s, notices, store)


def _not_in_process(resolved: ResolvedJob | None) -> Iterator[Problem]:
    if resolved is not None and resolved.job.backend == "nccl":
        yield Problem("--in-process", "a backend other than nccl", "nccl", "NCCL wants a process for each worker")


@partial(takes_job, first=lambda values: fixing(values["isa"]), own=_own)
def run(
    resolved: ResolvedJob,
    own: _Own,
    *,
    as_json: _AsJson = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the program; start nothing.")] = False,
    build: _Build = False,
    kill: Kills = None,
    no_twin: NoTwin = False,
    tee: Tee = False,
    grace: Grace = DEFAULT_GRACE,
    notice_command: NoticeCommand = None,
    notice_url: NoticeUrl = None,
    notice_every: NoticeEvery = None,
    spot: Spot = None,
    injectable: Injectable = YesNo.YES,
    in_process: _InProcess = False,
    resume: Resume = None,
    other_bits: OtherBits = False,
    etcd: Endpoints = "",
    etcd_plain_http: PlainHttp = False,
    isa: InstructionSet = "",
    explained: _Explained = False,
    keywords: Keywords = False,
) -> None:
    """Train a model in a pipeline of worker processes. Without arguments: a small GPT on real text, 4 stages."""
    from engine.core.faults.expansion import expand

    faults = expand(scenario := required(own.scenario, "a scenario of the kills"), resolved.job.seed)
    options: dict[str, Any] = {"grace_s": own.grace_s, "injectable": injectable is YesNo.YES, "notices": own.notices}
    _say_first(resolved, bool(faults))
    if explained:
        _print_explanation(resolved, as_json and not dry_run)
    if dry_run:
        _print_plan(resolved, as_json, faults, build)
    if not (explained or dry_run):
        from engine.runtime.process.interrupts import holding

        try:
            with holding(), _server(in_process) as server:  # it imports torch while this process imports the rest
                from bamboo_cli.live import screen
                from engine.harness.case import case_of_job
                from engine.harness.case_runner import run_case

                case = case_of_job(resolved, scenario, **options)
                result = run_case(case, own.store, announcing(screen(tee=tee), keywords), server)
                raise typer.Exit(print_result(result, resolved, as_json))
        except UserError as error:
            raise UserError(with_origins(error.problems, resolved)) from None


def _say_first(resolved: ResolvedJob, has_faults: bool) -> None:
    from engine.files.accelerators import sharing

    if resolved.with_faults and not has_faults:
        echo(f"the job of that run, without its faults; with them: {resolved.with_faults}", err=True)
    for line in (resolved.blocks_line, sharing(resolved.job)):
        if line:
            echo(line, err=True)


def _print_plan(resolved: ResolvedJob, as_json: bool, faults: Sequence[Fault], build: bool) -> None:
    from bamboo_cli.plan import print_plan

    try:
        print_plan(resolved.job, as_json, faults, build=build, why_blocks=resolved.why_blocks)
    except UserError as error:
        raise UserError(with_origins(error.problems, resolved)) from None


def _server(in_process: bool) -> contextlib.AbstractContextManager[Spawner]:
    """Returns what starts the workers of the run and of its twin, as a context."""
    if not in_process:
        from engine.runtime.process.fork_client import ForkServer

        return ForkServer()
    from engine.runtime.process.thread_server import ThreadServer

    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, os.getcwd())  # as in worker processes
    return ThreadServer()


def _print_explanation(resolved: ResolvedJob, as_json: bool) -> None:
    rows = [*explain(resolved), *promises(resolved.job)]
    if as_json:
        echo(json.dumps({field: {"value": value, "origin": origin} for field, value, origin in rows}))
        return
    from bamboo_cli.tables import print_table

    shown = [(field, repr(value), origin) for field, value, origin in rows]
    print_table(("field", "value", "origin"), (False, False, False), shown, has_head=False)
