"""What a user wants to know when the state of a stage is lost: who died, what is left, why, and what to do.

Rules: nothing is said of copies that this job could not have had, and nothing advised that would not have helped: with
what is advised, any as many workers may be gone at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from engine.core.checks.recovery_log import RecoveryLog
from engine.core.config.job import Job
from engine.core.config.job_wants import fresh_ownership
from engine.core.exclusion import Cause
from engine.core.history.process_records import ExitRecord
from engine.core.history.record import Record
from engine.core.history.run_records import CommitRecord, EpochRecord
from engine.core.ownership import Slot


@dataclass(slots=True)
class Loss:
    """How the state was lost.

    `workers` is how many there were when every slot had its shadows for the last time, `gone` names those who were lost
    since, each with how. Without redundancy nothing is made whole again, so that is the beginning of the run.
    """

    job: Job
    workers: int
    gone: dict[int, str] = field(default_factory=dict)

    def why(self) -> str:
        """Returns why nobody holds the state any more."""
        job = self.job
        if job.fsdp:
            return "with --fsdp each owner of a stage holds a shard of it, and nobody can take over from the others"
        if job.redundancy == "none":
            return "no redundancy: each stage is held by its owners only"
        if self.workers == 1:
            return "there was one worker, and nobody else to hold a stage"
        level = 1 if job.redundancy == "reroute" else job.redundancy_level
        name = job.redundancy if job.redundancy == "reroute" else f"{job.redundancy} redundancy of level {level}"
        kept = min(level, self.workers - 1) + 1
        gone = "one was" if len(self.gone) == 1 else f"{len(self.gone)} were"
        return (
            f"{name} keeps each stage on at least {kept} of {self.workers} workers; {gone} gone before others held it"
        )

    def advice(self) -> list[str]:
        """Returns the options that would each have helped."""
        job, gone = self.job, len(self.gone)
        if job.fsdp:
            whole = replace(self, job=replace(job, fsdp=0))
            enough = fewest_holders(whole.job) > gone
            return ["--fsdp 0"] if enough else [f"--fsdp 0 {each}" for each in whole.advice()]
        found = []
        if gone < self.workers:
            level = f"--redundancy-level {gone}" if gone > job.redundancy_level else ""
            lazy = "--redundancy lazy" if job.redundancy in ("none", "reroute") else ""
            found += [" ".join(filter(None, (lazy, level)))] if lazy or level else []
        pipelines = job.pipelines + 1
        while fewest_holders(replace(job, pipelines=pipelines)) <= gone:
            pipelines += 1
        return [*found, f"--pipelines {pipelines}"]


def fewest_holders(job: Job) -> int:
    """Returns how many workers hold the stage that the fewest hold, in any pipeline, while nobody has failed.

    The job has no fsdp.
    """
    ownership = fresh_ownership(job)
    return min(
        len({worker for pipeline in range(job.pipelines) for worker in ownership.replicas(pipeline, stage)})
        for stage in range(job.stages)
    )


def loss_of(job: Job, records: Iterable[Record]) -> Loss:
    """Returns how the state was lost, by the records of the run."""
    log = RecoveryLog()
    loss = Loss(job, job.stages // job.stages_per_worker * job.pipelines)
    members, is_quiet = loss.workers, True
    for record in records:
        owners = log.history.owners  # before
        list(log.read(record))
        match record:
            case ExitRecord() if not record.expected:
                is_quiet = False
                loss.gone[record.of] = _how(record.of, owners, log)
            case EpochRecord():
                is_quiet = False
                for out in record.verdict:
                    if out.cause is not Cause.LEFT:
                        loss.gone.setdefault(out.worker, _how(out.worker, owners, log))
                members = len(record.members)
            case CommitRecord():
                # In the step after a recovery shadows are made whole; a step in which nothing happens ends with all.
                if is_quiet and job.redundancy != "none":
                    loss.workers, loss.gone = members, {}
                is_quiet = True
    return loss


def _how(worker: int, owners: Mapping[Slot, int], log: RecoveryLog) -> str:
    slots = [
        f"{stage}@{pipeline}" if pipeline else str(stage)
        for (pipeline, stage), at in sorted(owners.items())
        if at == worker
    ]
    named = f"stage{'' if len(slots) == 1 else 's'} {' and '.join(slots)}" if slots else "no stage"
    at = log.last_action(worker)
    where = f"its last action was {at[1]} of step {at[0]}" if at else "it had done nothing since the last commit"
    return f"worker {worker} ({named}): {where}"


def state_lost_lines(job: Job, records: Iterable[Record], num_committed: int) -> list[str]:
    """Returns the screen that says all of this; `num_committed` steps are."""
    loss = loss_of(job, records)
    kept = f"steps 0 to {num_committed - 1} were committed" if num_committed else "no step was committed"
    return [
        *(f"died   {how}" for how in loss.gone.values()),
        f"kept   {kept}",
        f"why    {loss.why()}",
        "next   there is no checkpoint to resume from: start the run again, with",
        f"       {' or '.join(loss.advice())} to survive this",
    ]
