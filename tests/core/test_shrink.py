"""Shrinking finds the smallest scenario that fails, tries only smaller ones that break no rule, and asks no more."""

from __future__ import annotations

from dataclasses import replace

from engine.core.faults.fault import After, At
from engine.core.faults.matrix import is_possible, proposals, shrink
from engine.core.faults.scenario import Scenario
from engine.core.job.job import Job
from tests.core.scenario_cases import JOB, KINDS, at, scenario, wanted

BIG = scenario(
    wanted("one", at(5, "1B2")),
    wanted("two", at(8, "3B1@1"), "stop", pipeline=1, stage=3),
    wanted("three", After("one", "replay")),
)


def steps_of(found: Scenario) -> list[int]:
    return [each.trigger.step for each in found.faults if isinstance(each.trigger, At)]


def test_whatever_fails_shrinks_to_almost_nothing() -> None:
    found = shrink(BIG, lambda tried: True, KINDS)
    assert found.is_minimal
    job = found.scenario.job
    assert len(found.scenario.faults) == 1
    assert (job.stages, job.pipelines, job.microbatches, job.steps) == (1, 1, 1, 1)
    assert steps_of(found.scenario) == [0]


def test_what_only_the_whole_fails_stays() -> None:
    found = shrink(BIG, lambda tried: tried == BIG, KINDS)
    assert found.scenario == BIG
    assert found.is_minimal


def test_what_is_needed_stays() -> None:
    def fails(tried: Scenario) -> bool:
        stops = any(each.do == "stop" for each in tried.faults)
        return stops and tried.job.stages >= 3 and tried.job.steps >= 4

    found = shrink(BIG, fails, KINDS)
    job = found.scenario.job
    assert [each.id for each in found.scenario.faults] == ["two"]
    assert (job.stages, job.pipelines, job.microbatches, job.steps) == (3, 1, 1, 4)
    (fault,) = found.scenario.faults
    assert fault.target.stage == 2  # the last stage stays the last


def test_faults_that_wait_for_another_go_with_it() -> None:
    left = [[each.id for each in tried.faults] for tried in proposals(BIG) if len(tried.faults) < 3]
    assert left == [["two"], ["one", "three"], ["one", "two"]]


def test_proposals_are_smaller() -> None:
    def size(tried: Scenario) -> tuple[int, ...]:
        job = tried.job
        return (len(tried.faults), job.pipelines, job.stages, job.steps, job.microbatches)

    tried = list(proposals(BIG))
    assert tried
    for each in tried:
        assert size(each) != size(BIG)
        assert all(one <= other for one, other in zip(size(each), size(BIG), strict=True))


def test_only_scenarios_that_break_no_rule_are_tried() -> None:
    asked: list[Scenario] = []
    start = scenario(wanted("one", at(2, "1RECV_F0")), job=Job(stages=3, steps=4, redundancy="lazy"))

    def fails(tried: Scenario) -> bool:
        asked.append(tried)
        return True

    shrink(start, fails, KINDS)
    assert asked
    assert all(is_possible(each, KINDS) for each in asked)
    assert len(asked) == len({str(each) for each in asked})


def test_the_budget_is_kept() -> None:
    asked: list[Scenario] = []

    def fails(tried: Scenario) -> bool:
        asked.append(tried)
        return False

    found = shrink(BIG, fails, KINDS, budget=3)
    assert (len(asked), found.num_tries, found.is_minimal) == (3, 3, False)
    assert found.scenario == BIG


def test_a_scenario_that_cannot_be_smaller() -> None:
    job = replace(JOB, stages=1, pipelines=1, microbatches=1, steps=1, redundancy="none")
    assert list(proposals(scenario(wanted("one", at(0, "0B0")), job=job))) == []
