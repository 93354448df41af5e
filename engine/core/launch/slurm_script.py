"""The script for sbatch: one agent on each node, and the loss of a node or a task ends no other.

Rules:
- `--no-kill` keeps the job when a node fails; `--kill-on-bad-exit=0` and `--wait=0` keep the step when a task ends.
- The signal before the end of the job, or at its preemption, is a notice for all workers.
- The code of srun says how a task ended, and not how the run did. So the script asks for the outcome of the run, and
  exits with it.
- Slurm runs the script on the first node. When that one is lost, Slurm keeps the job, and no script ends it. So
  a task that finds no srun waits for the outcome, and ends the job.
"""

from __future__ import annotations

from engine.core.errors import ExitCode
from engine.core.launch.launch_plan import LaunchPlan, in_shell

_RUN = '"slurm-$SLURM_JOB_ID"'
_SRUN = "/dev/tcp/$SLURM_SRUN_COMM_HOST/$SLURM_SRUN_COMM_PORT"  # where it listens, for bash


def slurm_script(plan: LaunchPlan) -> str:
    """Returns the script."""
    log = f"bamboo-{plan.name}-%j"
    options = [
        f"--job-name=bamboo-{plan.name}",
        f"--nodes={plan.num_hosts}",
        *([f"--nodelist={','.join(plan.hosts)}"] if plan.hosts else []),
        "--ntasks-per-node=1",
        f"--cpus-per-task={plan.cores}",
        "--no-kill",
        "--no-requeue",
        f"--signal=TERM@{plan.grace_s}",
        f"--output={log}.log",
        *plan.extra,
    ]
    # srun takes no number of cores from sbatch.
    srun = "srun --no-kill --kill-on-bad-exit=0 --wait=0"
    srun += f' --cpus-per-task="$SLURM_CPUS_PER_TASK" --output={log}-%N.log'
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {each}" for each in options),
        "",
        "# One agent on each node. A task that is killed and a node that is lost end no other.",
        f"{srun} bash -c {in_shell([_task(plan)])} \\",
        "    2> >(grep --invert-match 'Zero Bytes were transmitted' >&2)  # srun, of a task that looks for it",
        'code=$?; echo "srun: $code"',
        "",
        "# The outcome of the run stays in etcd for an hour. Without a run the agents have said why.",
        f"{plan.asks(_RUN)}",
        f"outcome=$?; [ $outcome = {ExitCode.NOTHING_MATCHED:d} ] && outcome=$code",
        "exit $outcome",
    ]
    return "\n".join(lines) + "\n"


def _task(plan: LaunchPlan) -> str:
    """Returns the commands of each task; SIGTERM, which comes to all its processes, is for the agent."""
    return f"""
trap : TERM
{plan.line} --run {_RUN} --node "$SLURMD_NODENAME"
code=$?
if ! timeout 5 bash -c ": < {_SRUN}"; then
    echo "srun is gone with its node: this task ends the job when the run has ended"
    {plan.asks(_RUN)}
    [ $? = {ExitCode.COORDINATOR_UNAVAILABLE:d} ] || scancel "$SLURM_JOB_ID"
fi
exit $code
"""
