"""Shrinking: reduces a failing scenario to the smallest one that still fails.

Rules: it is pure; the caller decides whether a scenario fails. Each proposal is smaller and breaks no rule: fewer
faults first, then fewer pipelines, blocks, stages, steps and microbatches, down to one, to a half, and by one. Faults
move with the reduction: a fault at the first or last stage stays there, and faults keep their distance from the first
fault. The result is a scenario of which no proposal fails, or the smallest one found within `budget` tries.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from engine.core.action import STAGE_OPS
from engine.core.config.job import Job
from engine.core.config.job_rules import check_job
from engine.core.faults.fault import After, At
from engine.core.faults.scenario import FaultSpec, Scenario
from engine.core.faults.scenario_rules import check_scenario


@dataclass(frozen=True, slots=True)
class Shrunk:
    """The smallest scenario found, the number of tries, and whether no proposal was left untried."""

    scenario: Scenario
    num_tries: int
    is_minimal: bool


def shrink(scenario: Scenario, fails: Callable[[Scenario], bool], ending: Collection[str], budget: int = 40) -> Shrunk:
    """Returns the smallest scenario found for which `fails` is true, as it is for the given one.

    `ending` are the kinds of faults that end their victim.
    """
    num_tries = 0
    tried: list[Scenario] = []
    while True:
        for proposal in proposals(scenario):
            if proposal in tried or not is_possible(proposal, ending):
                continue
            if num_tries == budget:
                return Shrunk(scenario, num_tries, is_minimal=False)
            num_tries += 1
            tried.append(proposal)
            if fails(proposal):
                scenario = proposal
                break
        else:
            return Shrunk(scenario, num_tries, is_minimal=True)


def is_possible(scenario: Scenario, ending: Collection[str]) -> bool:
    """Returns whether a scenario breaks no rule."""
    return not check_job(scenario.job) and not check_scenario(scenario, ending)


def proposals(scenario: Scenario) -> Iterator[Scenario]:
    """Yields smaller scenarios, the greatest reductions first; some may break a rule."""
    for number in range(len(scenario.faults)):
        if len(scenario.faults) > 1:
            yield _without_fault(scenario, number)
    job = scenario.job
    for count in _fewer(job.pipelines):
        yield _mapped(scenario, replace(job, pipelines=count), pipelines=count)
    for count in _fewer(job.blocks):
        yield _mapped(scenario, replace(job, blocks=count))
    for count in _fewer(job.stages):
        yield _mapped(scenario, replace(job, stages=count))
    first = min((each.trigger.step for each in scenario.faults if isinstance(each.trigger, At)), default=0)
    for earlier in dict.fromkeys((first, first // 2, 1)):
        if 0 < earlier <= first:
            yield _mapped(scenario, replace(job, steps=job.steps - earlier), earlier=earlier)
    for count in _fewer(job.steps):
        yield replace(scenario, job=replace(job, steps=count))
    for count in _fewer(job.microbatches):
        yield _mapped(scenario, replace(job, microbatches=count), microbatches=count)


def _fewer(count: int) -> list[int]:
    """Returns the smaller counts to try: one, a half, one less."""
    return [each for each in dict.fromkeys((1, count // 2, count - 1)) if 0 < each < count]


def _without_fault(scenario: Scenario, number: int) -> Scenario:
    """Returns the scenario without a fault and the faults that wait for it."""
    gone = {scenario.faults[number].id}
    left = list(scenario.faults)
    while True:
        staying = [
            each
            for each in left
            if each.id not in gone and not (isinstance(each.trigger, After) and each.trigger.fault in gone)
        ]
        gone |= {each.id for each in left} - {each.id for each in staying}
        if len(staying) == len(left):
            return replace(scenario, faults=tuple(staying))
        left = staying


def _mapped(scenario: Scenario, job: Job, **smaller: int) -> Scenario:
    """Returns the scenario with a smaller job; moves each fault to a place that this job has."""
    slots, old = job.slots, scenario.job.slots
    pipelines = smaller.get("pipelines", scenario.job.pipelines)
    microbatches = smaller.get("microbatches", scenario.job.microbatches)

    def stage_of(stage: int) -> int:
        if slots == old:
            return stage
        return slots - 1 if stage == old - 1 else min(stage, max(0, slots - 2))

    def moved(wanted: FaultSpec) -> FaultSpec:
        trigger, target = wanted.trigger, wanted.target
        if isinstance(trigger, At):
            action = trigger.action._replace(
                stage=stage_of(trigger.action.stage),
                pipeline=min(trigger.action.pipeline, pipelines - 1),
            )
            if action.op not in STAGE_OPS:
                action = action._replace(microbatch=min(action.microbatch, microbatches - 1))
            trigger = replace(trigger, action=action, step=trigger.step - smaller.get("earlier", 0))
        if target.stage is not None and target.pipeline is not None:
            target = replace(target, stage=stage_of(target.stage), pipeline=min(target.pipeline, pipelines - 1))
        return replace(wanted, trigger=trigger, target=target)

    return replace(scenario, job=job, faults=tuple(moved(each) for each in scenario.faults))
