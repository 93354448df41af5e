"""The script for ssh: a line for each host, all at once; the end of one ends no other.

Rule: every agent exits with the outcome of the run. The code 255 is that of ssh, and 85 of a host that was cut off.
"""

from __future__ import annotations

from shlex import quote

from engine.core.errors import ExitCode
from engine.core.launch.launch_plan import LaunchPlan, in_shell

_UNKNOWN = " | ".join(str(int(each)) for each in (ExitCode.NOTHING_MATCHED, ExitCode.COORDINATOR_UNAVAILABLE))


def ssh_lines(plan: LaunchPlan, folder: str, run: str) -> list[str]:
    """Returns a line for each host, which begins in `folder` of that host; ssh takes no variables along."""
    found = []
    environment = in_shell(["env", *(f"{name}={value}" for name, value in plan.variables)]) if plan.variables else ""
    for host, node in zip(plan.hosts, plan.names, strict=True):
        agent = f"cd {quote(folder)} && exec {environment} {plan.line} --run {quote(run)} --node {quote(node)}"
        found.append(f"ssh -o BatchMode=yes -o ServerAliveInterval=5 {quote(host)} {quote(agent)}")
    return found


def ssh_script(plan: LaunchPlan, folder: str, run: str) -> str:
    """Returns the script."""
    lines = [
        "#!/bin/bash",
        "# One agent on each host. A host that is lost ends no other.",
        "agents=()",
        *(f"{line} & agents+=($!)" for line in ssh_lines(plan, folder, run)),
        f"outcome={ExitCode.COORDINATOR_UNAVAILABLE:d}",
        'for agent in "${agents[@]}"; do',
        '    wait "$agent"; code=$?',
        '    echo "an agent has ended with $code"',
        "    case $code in 255 | 85 | 137 | 143) ;; *) outcome=$code ;; esac",
        "done",
        "# etcd knows more than an agent that was lost or has left, if it is reached from here.",
        plan.asks(quote(run)),
        f"asked=$?; case $asked in {_UNKNOWN}) ;; *) outcome=$asked ;; esac",
        'exit "$outcome"',
    ]
    return "\n".join(lines) + "\n"
