"""The loss of the state of a stage: resumes from a checkpoint, or explains the loss.

The explanation has the dead workers, the committed steps, the reason and the advice.

Rules: the reason mentions only copies that this job could have had. Each advised option would have helped: with it, as
many workers may die at once. Nothing helps a model that hangs on every worker. If a worker refuses a checkpoint before
training, the next older one is tried, unless the user named its step. User code that has changed since the workers
started is not used silently: the run stops.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from engine.core.checkpoint_rules import Ladder, Resumption, next_rung
from engine.core.checks.recoveries import RecoveryLog
from engine.core.errors import BambooError, ExitCode, WorkerFailedError
from engine.core.exclusion import Cause
from engine.core.history.process_records import ExitRecord
from engine.core.history.run_records import CommitRecord, EpochRecord, Record
from engine.core.job.job import Job
from engine.core.job.partition import holders
from engine.core.ownership import Slot
from engine.core.texts import counted, spans
from engine.files.jobs.checkpoint_choice import tell_refused

if TYPE_CHECKING:
    from engine.runtime.agent.agent import Agent


@dataclass(slots=True)
class LostState:
    """The loss of a state, since every slot last had its shadows: the number of workers then, those gone and hung."""

    job: Job
    workers: int
    gone: dict[int, str] = field(default_factory=dict)
    hung: set[int] = field(default_factory=set)

    @property
    def hangs_everywhere(self) -> bool:
        """Whether the heirs hung too: then the cause is the model, and another copy would hang as well."""
        return len(self.gone) > 1 and self.hung >= self.gone.keys()

    def why(self) -> str:
        """Returns why no worker holds the state any more."""
        job = self.job
        if job.redundancy == "none":
            holder = "shard is held by its owner" if job.fsdp else f"{job.slot_noun} is held by its owners"
            return f"no redundancy: each {holder} only"
        if self.workers == 1:
            return f"there was one worker, and no other to hold a {job.slot_noun}"
        level = 1 if job.redundancy == "reroute" else job.redundancy_level
        name = job.redundancy if job.redundancy == "reroute" else f"{job.redundancy} redundancy of level {level}"
        copies = min(level, self.workers - 1) + 1
        gone = "one was" if len(self.gone) == 1 else f"{len(self.gone)} were"
        return (
            f"{name} keeps each {'shard' if job.fsdp else job.slot_noun} on at least {copies} of {self.workers} "
            f"workers; {gone} gone before others held it"
        )

    def advice(self) -> list[str]:
        """Returns options of which each would have preserved the state."""
        job, gone = self.job, len(self.gone)
        options = []
        if gone < self.workers:
            level = f"--redundancy-level {gone}" if gone > job.redundancy_level else ""
            lazy = "--redundancy lazy" if job.redundancy in ("none", "reroute") else ""
            options += [" ".join(filter(None, (lazy, level)))] if lazy or level else []
        if job.fsdp:  # a shard is in one pipeline
            whole = replace(self, job=replace(job, fsdp=0))
            return options or [f"--fsdp 0 {option}" for option in whole.advice()]
        pipelines = job.pipelines + 1
        while fewest_holders(replace(job, pipelines=pipelines)) <= gone:
            pipelines += 1
        return [*options, f"--pipelines {pipelines}"]


def fewest_holders(job: Job) -> int:
    """Returns the smallest number of workers with a copy of a stage, or of a shard, before failures."""
    return min(map(len, holders(job)))


def lost_state_of(job: Job, records: Iterable[Record]) -> LostState:
    """Returns the loss recorded by a run."""
    log = RecoveryLog()
    lost = LostState(job, job.num_workers)
    members, is_quiet = lost.workers, True
    for record in records:
        owners = log.history.owners  # before
        list(log.read(record))
        match record:
            case ExitRecord() if not record.expected:
                is_quiet = False
                lost.gone[record.of] = _how(record.of, owners, log)
            case EpochRecord():
                is_quiet = False
                for out in record.verdict:
                    if out.cause is not Cause.LEFT:
                        lost.gone.setdefault(out.worker, _how(out.worker, owners, log))
                    if out.cause is Cause.HANG:
                        lost.hung.add(out.worker)
                members = len(record.members)
            case CommitRecord():
                # The step after a recovery restores the shadows, so a step without an event ends with all of them.
                if is_quiet and job.redundancy != "none":
                    lost.workers, lost.gone = members, {}
                is_quiet = True
    return lost


def _how(worker: int, owners: Mapping[Slot, int], log: RecoveryLog) -> str:
    stages: dict[int, list[int]] = {}
    for pipeline, stage in sorted(slot for slot, at in owners.items() if at == worker):
        stages.setdefault(pipeline, []).append(stage)
    slots = [f"{span}@{pipeline}" if pipeline else span for pipeline, of in stages.items() for span in spans(of)]
    noun = log.history.job.slot_noun
    named = f"{noun}{'s' * (sum(map(len, stages.values())) > 1)} {' and '.join(slots)}" if slots else f"no {noun}"
    at = log.last_action(worker)
    where = f"its last action was {at[1]} of step {at[0]}" if at else "it had done nothing since the last commit"
    return f"worker {worker} ({named}): {where}"


def state_lost_lines(job: Job, records: Iterable[Record], num_committed: int, resume: str = "") -> list[str]:
    """Returns the explanation as lines after so many commits; `resume` is the command to continue with."""
    lost = lost_state_of(job, records)
    done = f"steps 0 to {num_committed - 1} were committed" if num_committed else "no step was committed"
    done += ", but no checkpoint was written" if num_committed and not resume else ""
    lines = [*(f"died   {how}" for how in lost.gone.values()), f"done   {done}", f"why    {lost.why()}"]
    if lost.hangs_everywhere:
        return [*lines, "next   each heir hung too: look for an endless loop or wait in the model; no redundancy helps"]
    advice = " or ".join(lost.advice())
    if resume:
        return [*lines, f"next   {resume}", f"       with {advice} it would survive this"]
    next_ = "next   there is no checkpoint to resume from: start the run again, with"
    return [*lines, next_, f"       {advice} to survive this"]


@dataclass(slots=True)
class Restarts:
    """Resumes one run from a checkpoint after each loss of a state."""

    ladder: Ladder
    place: str  # of its checkpoints; empty if it keeps none
    run: str  # the name of its folder
    say: Callable[[str], object]
    origin: Resumption | None = None  # of the run

    def revive(self, agent: Agent) -> Resumption | None:
        """Returns the checkpoint to resume from; None for a run that ends, with the exit code of the ladder's end."""
        cause = agent.cause
        if cause is None or agent.interrupted is not None:
            return None
        could_not_load = cause.exit_code == ExitCode.STORAGE and not agent.run_state.going_at_ns
        has_older = self.origin is not None and not self.origin.is_named
        if cause.exit_code != ExitCode.STATE_LOST and not (could_not_load and has_older):
            return None
        good = self._newest_good(agent, before=self.origin.step if could_not_load and self.origin else None)
        self.ladder, code = next_rung(self.ladder, None if good is None else good.step, time.monotonic_ns())
        stop = ""
        if code == ExitCode.STOPPED_RESUMABLE:
            used = f"it has used its {counted(self.ladder.most, 'restart')} per hour"
            stop = used if self.ladder.most else "restarts are off"
        elif code is None and (changed := agent.checkpoints.changed_code()):
            code, stop = ExitCode.STOPPED_RESUMABLE, f"{', '.join(changed)} changed meanwhile: it would give other bits"
        if stop and code is not None:
            agent.cause = WorkerFailedError(f"{cause}; {stop}", code)
        if code is not None or good is None:
            return None
        self.origin = good
        why = agent.node.state.reason if cause.exit_code == ExitCode.STATE_LOST else str(cause)
        agent.run_state.note(f"{why}; training resumes from the checkpoint of step {good.step}")
        return good

    def _newest_good(self, agent: Agent, before: int | None) -> Resumption | None:
        places: list[tuple[str, str, int | None]] = [(self.place, self.run, None)]
        if self.origin is not None:
            places.append((self.origin.place, self.origin.run, self.origin.step if self.origin.is_named else None))
        for place, run, step in places:
            if not place:
                continue
            try:
                good, init, monitors = agent.checkpoints.newest_good(place, run, step, before)
            except BambooError as error:
                self.say(f"no checkpoint can be read: {error}")
                continue
            tell_refused(good, place, self.say)
            if good.name is not None:
                resumption = Resumption(
                    *(good.name.step, place, good.name.file, run), step is not None, init, monitors=monitors
                )
                return replace(resumption, other_bits=self.origin is not None and self.origin.other_bits)
        return None
