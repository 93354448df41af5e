"""`bamboo launch`: a run on several hosts as files for Slurm, Kubernetes, Ray or ssh; and their submission."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from bamboo_cli import completion
from bamboo_cli.echo import echo
from bamboo_cli.host_options import (
    EndpointsOfHosts,
    Hosts,
    InstructionSet,
    LeaseSeconds,
    PlainHttp,
    Settings,
    TrustedNetwork,
    Workers,
    etcd_settings,
)
from bamboo_cli.run_options import TrustCode
from engine.core.errors import Problem, UserError
from engine.core.hosts.ends import USUAL_S
from engine.core.hosts.launch import PLACES, USUAL_GRACE_S, LaunchPlan, ObjectKind, problems_of_plan
from engine.core.job.job import Job, logger_names
from engine.core.units import whole_number

EPILOG = (
    "Examples:  bamboo launch slurm job.yaml --hosts 3 --etcd 10.0.0.1:2379 --trusted-network 10.0.0.0/8  |  "
    "bamboo launch k8s job.yaml --hosts 3 --image train:1 --etcd etcd:2379 --trusted-network 10.0.0.0/8 --submit  |  "
    "bamboo launch k8s job.yaml --as trainjob --hosts 3 --image train:1 --etcd etcd:2379 --trusted-network 10.0.0.0/8"
)
_ANY = "192.0.2.1"  # an address for documents: that of the hosts is not known here

JobFile = Annotated[Path, typer.Argument(metavar="JOB.yaml", help="Job file.", autocompletion=completion.job_files)]
SbatchOptions = Annotated[
    list[str] | None, typer.Option("--sbatch", metavar="OPTION", help="Extra option for sbatch; repeatable.")
]
Grace = Annotated[int, typer.Option("--grace", metavar="SECONDS", help="Time from a notice to the shutdown of a host.")]


def launch(
    place: Annotated[str, typer.Argument(metavar="PLACE", help=f"{', '.join(PLACES[:-1])} or {PLACES[-1]}.")],
    job_file: JobFile,
    *,
    hosts: Hosts = "",
    etcd: EndpointsOfHosts = "",
    etcd_plain_http: PlainHttp = False,
    trusted: TrustedNetwork = "",
    workers: Workers = 0,
    lease_s: LeaseSeconds = USUAL_S,
    settings: Settings = None,
    isa: InstructionSet = "",
    trust_code: TrustCode = False,
    name: Annotated[str, typer.Option("--name", help="Name of the run (default: the name of the job file).")] = "",
    grace_s: Grace = USUAL_GRACE_S,
    image: Annotated[str, typer.Option("--image", help="Image of the pods, with bamboo, your code and data.")] = "",
    kind: Annotated[ObjectKind, typer.Option("--as", help="Kind of Kubernetes object.")] = "job",
    extra: SbatchOptions = None,
    output: Annotated[Path | None, typer.Option("--output", metavar="DIR", help="Write the files to DIR.")] = None,
    is_submitted: Annotated[bool, typer.Option("--submit", help="Write the files and submit them.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print the files that start a run on several hosts with Slurm, Kubernetes, Ray or ssh.

    The files start one agent per host, and losing a host does not end the others. Secrets are not printed.
    """
    names = () if (number := whole_number(hosts)) is not None or not hosts else tuple(map(str.strip, hosts.split(",")))
    plan = LaunchPlan(
        name=name or job_file.stem.lower().replace("_", "-"),
        job_file=str(job_file),
        num_hosts=len(names) if number is None else number,
        etcd=etcd,
        workers=workers,
        trusted=trusted,
        plain_http=etcd_plain_http,
        trust_code=trust_code,
        settings=tuple(settings or ()),
        lease_s=lease_s,
        grace_s=grace_s,
        image=image,
        hosts=names,
        extra=tuple(extra or ()),
        isa=isa,
        kind=kind,
    )
    plan = _completed(plan, _refuse(place, plan, hosts))
    _make(place, plan, output, is_submitted=is_submitted, as_json=as_json)


def _completed(plan: LaunchPlan, job: Job) -> LaunchPlan:
    """Returns a plan with the cores of a host, and for a TrainJob with the logger of its progress."""
    named = ",".join(dict.fromkeys((*logger_names(job.logger), "kubeflow")))
    settings = (*plan.settings, *([f"logger={named}"] if plan.kind == "trainjob" else ()))
    return replace(plan, cores=plan.workers or -(-job.num_workers // plan.num_hosts), settings=settings)


def _make(place: str, plan: LaunchPlan, output: Path | None, *, is_submitted: bool, as_json: bool) -> None:
    from engine.harness.launch_files import launch_files, submit, write_files

    files = launch_files(place, plan)
    folder = output or (Path(f"launch-{plan.name}") if is_submitted else None)
    if folder is not None:
        write_files(files, folder)
    submission = submit(place, folder / files[-1].name) if folder is not None and is_submitted else ""
    if as_json:
        shown = {each.name: each.shown for each in files}
        echo(json.dumps({"files": shown, "folder": folder and str(folder), "submitted": submission or None}))
        return
    for each in files:
        echo(each.shown.rstrip("\n") if folder is None else f"wrote {folder / each.name}")
    if submission:
        echo(submission)


def _refuse(place: str, plan: LaunchPlan, hosts: str) -> Job:
    """Returns the job; raises UserError with every mistake: in the options, in the job, and in it on so many hosts."""
    from bamboo_cli.job_options import FLAG_FIELDS, resolve_options
    from engine.core.hosts.host_options import HostOptions, problems_of
    from engine.harness.launch_files import refused_variables

    problems = [*problems_of_plan(place, plan), *refused_variables(place)]
    endpoints: tuple[str, ...] = ()
    try:
        etcd = etcd_settings(plan.etcd, plan.plain_http)
        endpoints = () if etcd is None else tuple(str(getattr(each, "host", "localhost")) for each in etcd.endpoints)
    except UserError as error:
        problems += error.problems
        endpoints = (plan.etcd,)
    values: dict[str, Any] = dict.fromkeys(FLAG_FIELDS) | {"job_file": Path(plan.job_file), "results": None}
    values |= {"set": list(plan.settings), "trust_code": plan.trust_code}
    job = None
    try:
        job = resolve_options(values, program_only=False, is_plan=False).job
    except UserError as error:
        problems += error.problems
    address = plan.trusted.partition("/")[0] or _ANY
    node = plan.names[0] if plan.hosts else "any"
    options = HostOptions(
        "any", ",".join(plan.names) or hosts or "0", node, address, endpoints, plan.workers, plan.trusted
    )
    for problem in problems_of(replace(options, lease_s=plan.lease_s), job, lambda _: True):
        if problem.field == "--address":  # that of the network, which is not one of a host
            problems.append(Problem("--trusted-network", "a network such as 10.0.0.0/8", repr(plan.trusted)))
        elif problem.field == "--trusted-network" and not plan.trusted:
            problems.append(Problem("--trusted-network", "the network of the hosts", "nothing", problem.hint))
        else:
            problems.append(problem)
    if problems or job is None:  # which is a problem too
        raise UserError(problems)
    return job
