"""`bamboo inject`: runs a scenario, or injects its faults into a running job, and checks its expectations."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bamboo_cli import completion
from bamboo_cli.echo import echo
from bamboo_cli.host_options import (
    BedHosts,
    BedLease,
    Endpoints,
    PlainHttp,
    etcd_settings,
    problems_of_bed,
    refuse_job_on_bed,
)
from bamboo_cli.inject_external import WORST_FIRST, InjectOptions, inject_external, print_verdict
from bamboo_cli.matrix import Junit
from bamboo_cli.run_options import EventsMax, Tee, TrustCode, events_setting, tell_untrusted
from engine.core.errors import Problem, UserError, problems_of
from engine.core.hosts.ends import USUAL_S

if TYPE_CHECKING:
    from engine.core.job.job_rules import JobParts
    from engine.files.jobs.scenario_file import LoadedScenario
    from engine.files.run_folder import RunFolder
    from engine.files.strict_yaml import Document
    from engine.harness.case import CaseResult

EPILOG = (
    "Examples:  bamboo inject kill-middle-stage  |  bamboo inject mine.yaml --dry-run  |  "
    "bamboo inject kill-middle-stage --repeat 5 --json  |  "
    "bamboo inject --scenario kill-middle-stage --run latest  |  bamboo inject host-loss --hosts 3"
)


_File = Annotated[
    str,
    typer.Argument(
        metavar="SCENARIO",
        help="a shipped scenario, or a file",
        show_default=False,
        autocompletion=completion.scenarios,
    ),
]
_Command = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="-- COMMAND",
        help="the command that starts another launcher's job, such as -- torchrun train.py",
        show_default=False,
    ),
]
_Scenario = Annotated[
    str,
    typer.Option(
        "--scenario",
        metavar="SCENARIO",
        help="Same as the argument.",
        show_default=False,
        autocompletion=completion.scenarios,
    ),
]
_Run = Annotated[
    str,
    typer.Option(
        "--run",
        metavar="RUN",
        help="Inject into a running job: its folder name, or latest if it is the only one running.",
        autocompletion=completion.runs,
    ),
]
_Pid = Annotated[
    int,
    typer.Option(
        "--attach",
        metavar="PID",
        help="Strike another launcher's running job, whose root process is PID; bamboo leaves the job running.",
        show_default=False,
        min=0,
    ),
]
_Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Override a field of the job; repeatable.")
]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Print each fault with its current victim and moment.")]
_Seed = Annotated[int | None, typer.Option("--seed", help="Seed of random choices (default: the job's seed).", min=0)]


def inject(
    file: _File = "",
    command: _Command = None,
    scenario: _Scenario = "",
    run: _Run = "",
    attach: _Pid = 0,
    settings: _Settings = None,
    seed: _Seed = None,
    repeat: Annotated[int, typer.Option("--repeat", help="Number of repetitions.", min=1)] = 1,
    dry_run: _DryRun = False,
    tee: Tee = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    results: Annotated[Path | None, typer.Option("--results", help="Folder that holds the runs.")] = None,
    junit: Junit = None,
    trust_code: TrustCode = False,
    events_max: EventsMax = "",
    etcd: Endpoints = "",
    etcd_plain_http: PlainHttp = False,
    hosts: BedHosts = 0,
    lease_s: BedLease = USUAL_S,
) -> None:
    """Run a scenario (job, faults and fault-free twin), then check its expectations."""
    from engine.files.jobs.external_file import is_external
    from engine.files.jobs.library import find_scenario
    from engine.files.strict_yaml import read_yaml

    name, words = _chosen(file, scenario, command or (), lambda: etcd_settings(etcd, etcd_plain_http))
    document = read_yaml(find_scenario(name))
    changed = [*(settings or ()), *events_setting(events_max), *([f"results={results}"] * (results is not None))]
    shared = (repeat, dry_run, tee, as_json, trust_code, junit, results or Path("results"), attach)
    options = InjectOptions(*shared, run, seed, changed, etcd, etcd_plain_http, hosts, lease_s)
    if words or attach or is_external(document):
        own = {"--run": run, "--set": settings, "--seed": seed, "--etcd": etcd, "--hosts": hosts}
        raise typer.Exit(inject_external(document, words, own, options))
    raise typer.Exit(_inject_own(document, options))


def _chosen(file: str, scenario: str, words: Sequence[str], check: Callable[[], object]) -> tuple[str, Sequence[str]]:
    """Returns the scenario that is named, and the command; raises UserError if none is, or two are."""
    if not (file or scenario) or (scenario and Path(file).suffix in (".yaml", ".yml")):  # no command has such a name
        names = f"{file} and {scenario}" if file else "none"
        problem = Problem("inject", "one scenario", names, "such as: bamboo inject kill-middle-stage")
        raise UserError([problem, *problems_of(check)])
    return (scenario, [file, *words] if file else []) if scenario else (file, words)


def _inject_own(document: Document, options: InjectOptions) -> int:
    """Runs a scenario for a job of bamboo's own; returns the exit code."""
    from engine.core.faults.fault import OnHosts
    from engine.files.jobs.scenario_file import load_scenario
    from engine.harness.job_checks import findable, offered, readable
    from engine.runtime.faults.registry import kinds

    run, hosts, as_json = options.run, options.hosts, options.as_json
    acting = (findable if run else readable if options.dry_run else offered).trusting(options.trusts)

    def load() -> LoadedScenario:
        return load_scenario(
            document, kinds(), options.seed, options.changed, acting, OnHosts(hosts), to_attach=bool(run)
        )

    problems = _own_problems(options, "" if hosts else options.etcd)
    problems += problems_of_bed(hosts, options.lease_s, {"--run": run, "--etcd": options.etcd, "--tee": options.tee})
    if problems:
        raise UserError([*problems_of(load), *problems])
    loaded = load()
    refuse_job_on_bed(hosts, options.lease_s, loaded)
    folder = _run_to_strike(run, Path(loaded.scenario.job.results)) if run else None
    if options.dry_run:
        _print_plan(loaded, folder, acting, as_json)
        return 0
    cases = _run(loaded, options) if folder is None else _attach(loaded, folder, as_json)
    return _print_all(loaded, cases, as_json)


def _own_problems(options: InjectOptions, etcd: str) -> list[Problem]:
    """Returns the mistakes in the flags beside the scenario and its job."""
    problems = [] if options.dry_run or options.run else problems_of(lambda: etcd_settings(etcd, options.plain_http))
    if options.junit is not None:
        hint = "for a job of bamboo's own: bamboo matrix --junit FILE"
        problems.append(Problem("--junit", "a scenario for a job of another launcher", str(options.junit), hint))
    if options.run and options.tee and not options.dry_run:
        hint = "give --tee to the command that started the job"
        problems.append(Problem("--tee", "a job that this command starts", "--run", hint))
    return problems


def _run_to_strike(run: str, results: Path) -> RunFolder:
    """Returns a run; raises UserError for ``latest`` while several runs go on, because it may be another one by now."""
    from engine.files.run_folder import LATEST, find_run
    from engine.harness.dead_runs import live_runs

    live = live_runs(results) if run == LATEST else []
    if len(live) > 1:
        hint = f"running now: {', '.join(live)}"
        raise UserError([Problem("--run", "the name of one run", f"{LATEST}, and {len(live)} runs go on", hint)])
    return find_run(results, run)


def _attach(loaded: LoadedScenario, folder: RunFolder, as_json: bool) -> list[CaseResult]:
    from engine.harness.attach import attach
    from engine.runtime.process.interrupts import holding

    with holding():
        case = attach(loaded, folder, partial(echo, err=True))
        _print_case(loaded, case, as_json)
    return [case]


def _run(loaded: LoadedScenario, options: InjectOptions) -> list[CaseResult]:
    """Runs the scenario as often as asked, with `hosts` on new ones each time; an interrupted run is the last."""
    from bamboo_cli.live import screen
    from engine.harness.case import case_of_file
    from engine.harness.case_runner import run_case
    from engine.harness.leak_check import mark_processes
    from engine.runtime.process.fork_client import ForkServer
    from engine.runtime.process.interrupts import holding

    store = None if options.hosts else etcd_settings(options.etcd, options.plain_http)
    echo(f"job: {loaded.job_from}", err=True)
    cases: list[CaseResult] = []
    mark_processes()
    # One server for all runs: its start takes as long as a short job.
    with holding() as interrupts, nullcontext() if options.hosts else ForkServer() as server:
        for _ in range(options.repeat):
            if options.hosts:
                from engine.harness.bed_case import run_on_bed

                cases.append(run_on_bed(loaded, options.hosts, options.lease_s, screen()))
            else:
                cases.append(run_case(case_of_file(loaded), store, screen(tee=options.tee), server))
            _print_case(loaded, cases[-1], options.as_json)
            if interrupts.first is not None:
                break
    return cases


def _print_plan(loaded: LoadedScenario, folder: RunFolder | None, acting: JobParts, as_json: bool) -> None:
    """Prints the faults of a scenario, or of one for a run that is going, as of now."""
    from engine.harness.attach import as_of_now

    tell_untrusted(loaded.foreign if folder is None else (), acting)
    _print_faults(loaded if folder is None else as_of_now(loaded, folder), as_json)


def _print_faults(loaded: LoadedScenario, as_json: bool) -> None:
    from bamboo_cli.plan import NOT_CALLED, NOT_COUNTED, faults_as_plain
    from engine.core.faults.scenario import Every

    job = loaded.scenario.job
    faults = faults_as_plain(loaded.faults, job)
    if as_json:
        facts = {"scenario": loaded.scenario.name, "seed": loaded.seed, "job_from": loaded.job_from, "faults": faults}
        facts |= {} if job.has_program else {"not_called": job.schedule}
        echo(json.dumps(facts if job.has_steps else facts | {"not_counted": job.data}))
        return
    echo(f"job: {loaded.job_from}")
    for each in faults:
        echo(each["text"])
    drawn = [each.id for each in loaded.scenario.faults if isinstance(each.trigger, Every)]
    if not job.has_steps:
        echo(NOT_COUNTED + (f", and so are the moments of {' and '.join(drawn)}" if drawn else ""))
    if not job.has_program:
        unknown = f"its actions and the moments of {' and '.join(drawn)}" if drawn else "its actions"
        echo(f"{NOT_CALLED} ({job.schedule}): {unknown} are not known")


def _print_case(loaded: LoadedScenario, case: CaseResult, as_json: bool) -> None:
    """Prints the verdict and a line per check, or why the run could not begin; to stderr beside JSON."""
    from bamboo_cli.live import untold

    reason = next((f": {each.text}" for each in case.checks if (each.name, each.result) == ("outcome", "invalid")), "")
    verdict = f"{loaded.scenario.name}: {case.verdict_word}{reason}"
    checks, recoveries = [] if reason else case.checks, untold(map(str, case.recoveries), err=as_json)
    print_verdict(verdict, checks, recoveries, case.folder, err=as_json)


def _print_all(loaded: LoadedScenario, cases: Sequence[CaseResult], as_json: bool) -> int:
    """Prints the summary of all runs; returns the exit code."""
    from engine.harness.case import stall_figures

    worst = min(cases, key=lambda case: (WORST_FIRST.index(case.verdict_word), not case.exit_code))
    stalls = stall_figures(cases)
    if len(cases) > 1:
        passed = sum(each.verdict == "passed" for each in cases)
        parts = [f"{passed} of {len(cases)} passed"]
        parts += [f"training stalled for {', '.join(f'{name} {each}' for name, each in stalls.items())}"] * bool(stalls)
        echo("; ".join(parts), err=as_json)
    if as_json:
        facts = {"scenario": loaded.scenario.name, "seed": loaded.seed, "verdict": worst.verdict_word}
        stalls_ms = {name: round(each.least_ns / 1e6, 3) for name, each in stalls.items()}
        facts |= {"exit_code": int(worst.exit_code), "stall_ms": stalls_ms, "runs": [each.as_dict() for each in cases]}
        echo(json.dumps(facts))
    return int(worst.exit_code)
