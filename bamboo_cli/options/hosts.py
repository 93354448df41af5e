"""The options of an agent on one of several hosts; `--isa` is one of `bamboo run` too."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bamboo_cli.options import completion
from engine.core.errors import Problem, problems_of

_PANEL = "Several hosts"

JobFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="JOB.yaml",
        help="Of a run on several hosts: its job file",
        show_default=False,
        autocompletion=completion.job_files,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Any field of the job, such as stages=4 or model_args.width=64; repeatable.",
        rich_help_panel=_PANEL,
    ),
]
Hosts = Annotated[
    str,
    typer.Option(
        "--hosts",
        metavar="N|NAME,NAME",
        help="The number of hosts of the run, or their names. The same line starts the agent of each.",
        rich_help_panel=_PANEL,
    ),
]
RunId = Annotated[
    str,
    typer.Option("--run", metavar="ID", help="The run in the store: the same on all hosts.", rich_help_panel=_PANEL),
]
Workers = Annotated[
    int, typer.Option("--workers", metavar="K", help="Room for workers on each host; 0: any.", rich_help_panel=_PANEL)
]
Node = Annotated[
    str, typer.Option("--node", metavar="NAME", help="This host; by default its host name.", rich_help_panel=_PANEL)
]
Address = Annotated[
    str,
    typer.Option(
        "--address",
        metavar="IP",
        help="Of this host; by default the one from which it reaches etcd.",
        rich_help_panel=_PANEL,
    ),
]
TrustedNetwork = Annotated[
    str,
    typer.Option(
        "--trusted-network",
        metavar="CIDR",
        help="Allow tensors in clear text between addresses of this network.",
        rich_help_panel=_PANEL,
    ),
]
LeaseSeconds = Annotated[
    int, typer.Option("--lease", metavar="SECONDS", help="Time to live of a host's lease.", rich_help_panel=_PANEL)
]
HostsWithin = Annotated[
    float,
    typer.Option("--hosts-within", metavar="SECONDS", min=0.0, help="Wait for all hosts.", rich_help_panel=_PANEL),
]
InstructionSet = Annotated[
    str,
    typer.Option(
        "--isa",
        metavar="SET",
        help="Compute with one instruction set on every processor: portable, avx2 or avx512.",
    ),
]


def fixing(isa: str) -> list[Problem]:
    """Fixes the instruction set, if one is named; returns the problems. No fact of this host is to be read before."""
    from engine.files.host_facts import fix_instruction_set

    return problems_of(lambda: fix_instruction_set(isa)) if isa else []
