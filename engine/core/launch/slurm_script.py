"""The script for sbatch: one agent on each node, and the loss of a node or a task ends no other.

Rules: `--no-kill` keeps the job when a node fails, `-K0` and `--wait=0` keep the step when a task ends. The signal
before the end of the job, or at its preemption, is a notice for all workers. The code of srun says how a task ended,
and not how the run did: so the script asks an agent that comes late, which exits with the outcome of the run.
"""

from __future__ import annotations

from engine.core.launch.launch_plan import LaunchPlan, in_shell

_LATE_S = 10  # until an agent that comes late knows that there is no outcome


def slurm_script(plan: LaunchPlan) -> str:
    """Returns the script."""
    options = [
        f"--job-name=bamboo-{plan.name}",
        f"--nodes={plan.num_hosts}",
        "--ntasks-per-node=1",
        "--no-kill",
        f"--signal=TERM@{plan.grace_s}",
        f"--output=bamboo-{plan.name}-%j.log",
        *plan.extra,
    ]
    agent = f'exec {plan.line} --run "slurm-$SLURM_JOB_ID" --node "$SLURMD_NODENAME"'
    late = f'{plan.line} --run "slurm-$SLURM_JOB_ID" --node asks --hosts-within {_LATE_S}'
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {each}" for each in options),
        "",
        "# One agent on each node. A task that is killed and a node that is lost end no other.",
        f"srun --no-kill --kill-on-bad-exit=0 --wait=0 bash -c {in_shell([agent])}",
        'echo "srun: $?"',
        "",
        "# The outcome of the run stays in etcd for an hour: an agent that comes late exits with it.",
        f"exec {late}",
    ]
    return "\n".join(lines) + "\n"
