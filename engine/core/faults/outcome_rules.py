"""The expectations that no run of a scenario can meet, found before the run.

Rule: an expectation is refused only if no run can meet it, whatever happens at which time. So a fault at the end of the
last step counts for nothing: after the last commit no death keeps a run from its end. A lost state is none where a
checkpoint may be whole, and the run may go on from it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from engine.core.action import STAGE_OPS
from engine.core.checkpoints.keeping import keeping_of
from engine.core.config.job import Job
from engine.core.config.job_wants import fresh_ownership, holders
from engine.core.errors import Problem
from engine.core.faults.fault import After, At
from engine.core.faults.fault_kind import AT_ONCE, HARMLESS, WITH_NOTICE
from engine.core.faults.scenario import NOTICES, Every, Expect, FaultSpec
from engine.core.texts import numbered

_PLACE = "expect.outcome"
NO_TWIN = "a run without the settings of a deterministic one may have other bits each time"


def impossible_expectations(
    expect: Expect, job: Job, faults: Mapping[int, FaultSpec] | None, ending: Collection[str]
) -> Iterator[Problem]:
    """Yields the problems of expectations that no run can meet; `ending` are the kinds that end their victim.

    `faults` is None if some are not valid: they may have any effect.
    """
    if expect.trajectory == "identical" and job.audit != 1:
        hint = "the comparison needs the hashes of every step: set audit: 1 in the job"
        yield Problem("expect.trajectory", "a job that hashes every step", f"audit {job.audit}", hint)
    if expect.trajectory is not None and not job.deterministic:
        yield Problem("deterministic", "true beside a comparison with a twin", "false", NO_TWIN)
    if expect.outcome != "recovered" and expect.recovery is not None:
        hint = "a run that stops has no recovery to time"
        yield Problem("expect.recovery", "outcome recovered beside it", repr(expect.outcome), hint)
    if expect.outcome == "noticed" and expect.notice is None:
        hint = "the wrong numbers that the run must notice; another error must not pass"
        yield Problem("expect.notice", f"one of {', '.join(NOTICES)} beside outcome noticed", "nothing", hint)
    if expect.outcome != "noticed" and expect.notice is not None:
        yield Problem("expect.notice", "outcome noticed beside it", repr(expect.outcome))
    is_kept = _keeps_before_the_end(job)
    if expect.outcome == "resumable" and not is_kept:
        hint = f"with checkpoint_every {job.checkpoint_every!r} there is no checkpoint before the end"
        yield Problem(_PLACE, "a job that keeps checkpoints beside it", "'resumable'", hint)
    if faults is None:
        return
    sure = _why_kept(job, faults, ending) or _why_goes_on(job, faults, ending)
    if expect.outcome == "resumable" and is_kept and sure:
        yield Problem(_PLACE, "recovered", "'resumable'", sure)
    if expect.outcome == "recovered" and not (is_kept and job.restarts) and (why := _why_lost(job, faults, ending)):
        yield Problem(_PLACE, "state-lost", "'recovered'", why)
    if expect.outcome == "state-lost" and (why := _why_kept(job, faults, ending)):
        yield Problem(_PLACE, "recovered", "'state-lost'", why)
    if (
        expect.outcome == "recovered"
        and expect.recovery is not None
        and all(_is_harmless(each) for each in faults.values())
    ):
        hint = "no fault here loses a worker, so there is no recovery to time"
        yield Problem("expect.recovery", "a fault that ends a worker", "none", hint)
    killed = next((each.id for each in faults.values() if each.do in AT_ONCE), None)
    if expect.culprit == "nobody" and killed is not None:
        hint = f"{killed} kills a worker, and the verdict names it"
        yield Problem("expect.culprit", "exact beside a kill", "'nobody'", hint)


def _is_harmless(wanted: FaultSpec) -> bool:
    return wanted.do in HARMLESS


def _why_lost(job: Job, faults: Mapping[int, FaultSpec], ending: Collection[str]) -> str:
    """Returns why the state of a stage is surely lost; empty if a run may keep it."""
    for wanted in faults.values():
        at = wanted.trigger
        if not isinstance(at, At) or wanted.do not in ending or wanted.do in WITH_NOTICE or _is_at_the_end(at, job):
            continue
        if all(len(each) == 1 for each in holders(job)):
            alone = len(fresh_ownership(job).workers()) == 1
            held = "shards" if job.fsdp else f"{job.slot_noun}s"
            why = f"with redundancy {job.redundancy} no other worker holds its {held}"
            return f"{wanted.id} ends a worker, and {'the job has one worker' if alone else why}"
        if not _comes_first(wanted, at, faults, ending):
            continue
        victims = _victims(wanted, at, job)
        for stage, workers in enumerate(holders(job)):
            if workers <= victims:
                named = numbered("worker", sorted(workers), " and ")
                what = f"{'a shard of ' if job.fsdp else ''}{job.slot_noun} {stage % job.slots}"
                return f"{wanted.id} ends {named} at once, and no other worker holds {what}"
    return ""


def _why_kept(job: Job, faults: Mapping[int, FaultSpec], ending: Collection[str]) -> str:
    """Returns why the state of every stage is surely kept; empty if a run may lose it."""
    if not all(each.do in ending or _is_harmless(each) for each in faults.values()):
        return ""
    dead = sum(_most_victims(each) for each in faults.values() if not _is_harmless(each))
    kept = min(len(each) for each in holders(job))
    if dead >= kept:
        return ""
    lost = "no worker is" if not dead else "one worker is" if dead == 1 else f"{dead} workers are"
    return f"{lost} lost, and each {job.slot_noun} is held by {kept}"


def _keeps_before_the_end(job: Job) -> bool:
    """Returns whether the state may be kept after a step that is not the last one."""
    keeping = keeping_of(job.checkpoint_every)
    if keeping is None:
        return False
    is_due = 0 < keeping.every_steps and (keeping.every_steps < job.steps or not job.has_steps)
    return keeping.needs_time or keeping.in_epochs or is_due


def _why_goes_on(job: Job, faults: Mapping[int, FaultSpec], ending: Collection[str]) -> str:
    """Returns why a run surely goes on from a checkpoint by itself; empty if its restarts may be used up."""
    lost = sum(_most_victims(each) for each in faults.values() if each.do in ending)
    if lost > job.restarts or any(each.do not in ending and not _is_harmless(each) for each in faults.values()):
        return ""
    return f"{lost} workers are lost at most, and the run goes on by itself {job.restarts} times: set restarts: 0"


def _most_victims(wanted: FaultSpec) -> int:
    return wanted.target.count * (wanted.trigger.count if isinstance(wanted.trigger, Every) else 1)


def _is_at_the_end(at: At, job: Job) -> bool:
    return at.step == job.steps - 1 and at.action.op in STAGE_OPS


def _comes_first(wanted: FaultSpec, at: At, faults: Mapping[int, FaultSpec], ending: Collection[str]) -> bool:
    """Returns whether no other fault that ends a worker can strike before this one."""
    others = [each.trigger for each in faults.values() if each is not wanted and not _is_harmless(each)]
    return all(
        (isinstance(each, At) and each.step > at.step) or (isinstance(each, After) and each.fault == wanted.id)
        for each in others
    )


def _victims(wanted: FaultSpec, at: At, job: Job) -> frozenset[int]:
    """Returns the workers that a fault strikes if it is the first; none if they are drawn or depend on the run."""
    target, ownership = wanted.target, fresh_ownership(job)
    if target.worker is not None:
        return frozenset({target.worker})
    if target.role is not None:
        return frozenset()
    if target.count == job.slots * job.pipelines:
        return frozenset(ownership.workers())
    pipeline, stage = at.action.pipeline, at.action.stage
    if target.pipeline is not None and target.stage is not None:
        pipeline, stage = target.pipeline, target.stage
    count = target.count if target.adjacent else 1
    return frozenset(ownership.owner(pipeline, (stage + each) % job.slots) for each in range(count))
