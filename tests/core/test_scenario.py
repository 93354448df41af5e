"""The rules between the parts of a scenario: what can be known before the run to be impossible."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.core.faults.fault import After, FaultKind, Parameter, kind_problems
from engine.core.faults.scenario import Every, Expect, FaultSpec, Limits, Scenario
from engine.core.faults.scenario_rules import check_scenario
from engine.core.job.job import Job
from engine.core.job.partition import initial_program
from tests.core.scenario_cases import JOB, KINDS, at, scenario, wanted
from tests.looped import looped

FIRST = wanted("first", at(5, "2B3"))


def problems(case: Scenario) -> list[str]:
    return [str(each) for each in check_scenario(case, KINDS)]


def test_a_link_leads_to_another_worker() -> None:
    """A fault on a link to the victim itself would meet no frame, and the case would be invalid after its run."""

    def told(peer: int, *others: FaultSpec, **target: int) -> list[str]:
        cut = replace(wanted("a", at(5, "2B3"), "cut-link", **target), parameters={"peer": peer})
        return problems(scenario(cut, *others))

    own = initial_program(JOB)[1].owner(0, 2)
    told_so = "faults.0.peer: expected another worker than {0}, the victim, found {0} (no link leads to itself)"
    assert told(own) == [told_so.format(own)]
    assert told(own + 1) == []
    assert told(5, worker=5) == [told_so.format(5)]
    assert told(own, wanted("b", at(2, "2B3"))) == [], "its slot has another owner by then"


def test_a_link_leads_to_a_worker_with_which_the_victim_exchanges_tensors() -> None:
    def told(peer: int, **fields: Any) -> list[str]:
        cut = replace(wanted("a", at(5, "2B3"), "cut-link"), parameters={"peer": peer})
        return problems(scenario(cut, job=replace(JOB, **fields)))

    own = initial_program(JOB)[1].owner(0, 2)
    (problem,) = told(own - 2)
    assert problem == (
        f"faults.0.peer: expected a worker that exchanges tensors with worker {own}: {own - 1}, {own + 1}, {own + 4}, "
        f"found {own - 2} (no frame would meet the fault)"
    )
    assert [told(own + by) for by in (-1, 1, 4)] == [[], [], []], "its neighbours, and that of the other pipeline"
    assert told(own - 2, blocks=2, elastic=True) == [], "slots of an elastic job may move"


@looped(
    "case",
    [
        scenario(FIRST),
        scenario(FIRST, wanted("second", After("first", "replay"), role="recoverer")),
        scenario(wanted("second", After("first", delay_ns=5)), FIRST),
        scenario(FIRST, wanted("heal", at(6, "2HEAL"))),
        scenario(wanted("many", Every(20, 3), role="random", count=2, adjacent=True), wanted("heal", at(6, "2HEAL"))),
        scenario(wanted("ends", at(0, "0F0"), worker=7), wanted("last", at(11, "3STEP@1", "after"))),
        scenario(wanted("all", at(1, "0REDUCE_GRAD"), count=8), wanted("row", at(1, "0B0"), count=4, adjacent=True)),
        scenario(wanted("row", at(1, "0B0"), pipeline=1, stage=3, count=2)),
        scenario(FIRST, expect=Expect(trajectory="identical", recovery=Limits(p95_ns=1))),
    ],
)
def test_a_good_scenario_has_no_problem(case: Scenario) -> None:
    assert problems(case) == []


@looped(
    ("fault", "problem"),
    [
        (wanted("a", at(12, "0F0")), "at.step: expected a step from 0 to 11, found 12 (the job has 12)"),
        (wanted("a", at(1, "4F0")), "at.stage: expected a stage from 0 to 3, found 4 (the job has 4)"),
        (wanted("a", at(1, "0F0@2")), "at.pipeline: expected a pipeline from 0 to 1, found 2 (the job has 2)"),
        (wanted("a", at(1, "0F4")), "at.microbatch: expected a microbatch from 0 to 3, found 4 (the job has 4)"),
        (
            wanted("a", at(1, "0RECV_F0")),
            "at.action: expected an action of stage 0 with schedule 1f1b, found 'RECV_F' "
            "(the first stage has no stage before it: no RECV_F)",
        ),
        (
            wanted("a", at(1, "3SEND_F0")),
            "at.action: expected an action of stage 3 with schedule 1f1b, found 'SEND_F' "
            "(the last stage has no stage after it: no SEND_F)",
        ),
        (
            wanted("a", at(1, "1W0")),
            "at.action: expected an action of stage 1 with schedule 1f1b, found 'W' "
            "(this schedule has whole backwards: B instead of I and W)",
        ),
        (
            wanted("a", at(1, "1STREAM0")),
            "at.action: expected an action of stage 1 with schedule 1f1b, found 'STREAM' "
            "(log_every is 0, and after the last backward the log is sent)",
        ),
        (
            wanted("a", at(1, "1HEAL")),
            "at.action: expected an action of a step after a failure, found 'HEAL' "
            "(a shadow is healed only after a failure: add a fault that ends a worker before step 1)",
        ),
        (wanted("a", at(1, "1B0"), stage=1), "target: expected both pipeline and stage, found no pipeline"),
        (wanted("a", at(1, "1B0"), worker=8), "target.worker: expected a worker from 0 to 7, found 8 (the job has 8)"),
        (
            replace(wanted("a", at(1, "1B0"), "cut-link"), parameters={"peer": 8}),
            "peer: expected a worker from 0 to 7, found 8 (the job has 8)",
        ),
        (
            wanted("a", at(1, "1B0"), "gpu-oom"),
            "do: expected a kind for a job on GPUs, found 'gpu-oom' "
            "(its workers compute on the CPU: with without_gpu: double a worker plays its GPU)",
        ),
        (
            wanted("a", at(1, "1B0"), worker=1, role="random"),
            "target: expected one of a slot, a worker and a role, found a worker and role random",
        ),
        (
            wanted("a", at(1, "1B0"), role="recoverer"),
            "target.role: expected random, shadow or neighbour with `at`, found 'recoverer' "
            "(it recovers from a fault: use `after`)",
        ),
        (
            wanted("a", at(1, "1B0"), count=9),
            "target.count: expected a whole number <= 8, found 9 (there are 8 slots)",
        ),
        (
            wanted("a", at(1, "1B0"), count=5, adjacent=True),
            "target.count: expected a whole number <= 4, found 5 (there are 4 stages in a pipeline)",
        ),
        (wanted("a", at(1, "1B0"), adjacent=True), "target.adjacent: expected a count of 2 or more with it"),
        (wanted("a", at(1, "1B0"), count=2, worker=1), "target.count: expected 1 with a worker or such a role"),
        (
            wanted("a", Every(2, 2), worker=1),
            "target: expected role random or a slot with `every`, found a worker (a worker dies but once)",
        ),
        (
            wanted("a", After("a", "plan")),
            "after.fault: expected a fault that does not wait for this one, found a -> a",
        ),
    ],
)
def test_what_can_never_be_is_told_before_the_run(fault: FaultSpec, problem: str) -> None:
    found = problems(scenario(fault))
    assert len(found) == 1 and found[0].startswith(f"faults.0.{problem}"), found


def test_a_link_has_no_tensor_that_nccl_sends() -> None:
    kind = FaultKind("delay-link", "Delays.", "worker", ends=False, acts_on="frames")
    assert [str(each) for each in kind_problems(kind, {}, replace(JOB, device="cuda", backend="nccl"))] == [
        "do: expected a kind for a job over links, found 'delay-link' "
        "(NCCL sends between GPUs, past the links: set backend: direct, or take cut-link)"
    ]
    assert list(kind_problems(kind, {}, JOB)) == []
    on_processes = replace(kind, acts_on="process")
    assert list(kind_problems(on_processes, {}, replace(JOB, device="cuda", backend="nccl"))) == []


def test_healing_needs_a_failure_in_an_earlier_step_and_somebody_to_heal() -> None:
    heal = wanted("heal", at(5, "2HEAL"))
    assert "a shadow is healed only" in problems(scenario(FIRST, heal))[0]
    pause = wanted("pause", at(1, "2B3"), do="stop")
    assert "a shadow is healed only" in problems(scenario(pause, heal))[0]
    kill = wanted("kill", at(1, "2B3"))
    assert problems(scenario(kill, heal)) == []
    assert "with redundancy none" in problems(scenario(kill, heal, job=replace(JOB, redundancy="none")))[0]


def test_a_forward_is_redone_in_the_step_that_a_recovery_finishes_or_nobody_knows_which() -> None:
    again = wanted("again", at(5, "2f3"))
    for first in (FIRST, wanted("warned", at(2, "2B3"), do="terminate"), wanted("many", Every(2, 2), role="random")):
        assert problems(scenario(first, again)) == []
    for first in (wanted("early", at(2, "2B3")), wanted("late", at(6, "2B3")), wanted("slow", at(5, "2B3"), do="stop")):
        (found,) = problems(scenario(first, again))
        assert "add a fault that ends a worker in that step" in found


def test_only_the_owner_of_a_slot_counts_for_what_its_actions_are() -> None:
    """A shadow that runs redundant forwards, or gets a log, is never at a fault of the slot."""
    job = Job(stages=2, microbatches=2, redundancy="eager")
    (found,) = problems(scenario(wanted("a", at(1, "1SEND_F0")), job=job))
    assert found.endswith("(the last stage has no stage after it: no SEND_F)")


def test_a_fault_waits_for_one_that_is_there_and_does_not_wait_for_it() -> None:
    (found,) = problems(scenario(FIRST, wanted("second", After("frist", "plan"))))
    assert found == "faults.1.after.fault: expected the id of another fault, found 'frist' (did you mean 'first'?)"
    a, b = wanted("a", After("b", "plan")), wanted("b", After("a", "plan"))
    found, other = problems(scenario(a, b))
    assert found.endswith("expected a fault that does not wait for this one, found a -> b -> a")
    assert other.endswith("found b -> a -> b")
    inner = problems(scenario(a, b, wanted("c", After("a", "plan"))))
    assert len(inner) == 2
    (found,) = problems(scenario(wanted("many", Every(2, 2)), wanted("c", After("many", "plan"))))
    assert found.startswith("faults.1.after.fault: expected a fault with `at` or `after`, found 'many'")


def test_ids_and_moments_are_unique() -> None:
    assert problems(scenario(FIRST, wanted("first", at(6, "2B3")))) == [
        "faults.1.id: expected an id of its own, found 'first' (faults.0 has it)"
    ]
    assert problems(scenario(wanted("a-2", at(6, "2B3")), wanted("a", Every(2, 2)))) == [
        "faults.1.id: expected an id of its own, found 'a-2' (faults.0 has it)"
    ]
    (found,) = problems(scenario(FIRST, wanted("second", at(5, "2B3"))))
    assert found.startswith("faults.1.at: expected another moment than faults.0, found before 2B3 of step 5 (one fault")


def test_expectations_fit_the_job_and_each_other() -> None:
    expect = Expect("noticed", trajectory="identical", recovery=Limits(max_ns=1), notice="not-finite")
    found = problems(scenario(FIRST, job=replace(JOB, audit=2), expect=expect))
    assert [each.split(":")[0] for each in found] == ["expect.trajectory", "expect.recovery"]


@looped(
    ("kind", "name", "value", "read"),
    [
        ("stop", "for", "100ms", 100_000_000),
        ("stop", "for", 100, None),
        ("stop", "for", "long", None),
        ("exit", "code", 3, 3),
        ("exit", "code", -1, None),
        ("exit", "code", True, None),
        ("slow", "factor", 2, 2),
        ("slow", "factor", 1.5, 1.5),
        ("slow", "factor", 0, None),
        ("slow", "factor", True, None),
        ("gil", "gil", "no", "no"),
        ("gil", "gil", "maybe", None),
        ("say", "text", "x", "x"),
        ("say", "text", 5, None),
    ],
)
def test_a_parameter_is_read_in_the_units_of_the_program(kind: str, name: str, value: object, read: object) -> None:
    (parameter,) = KINDS[kind].parameters
    assert isinstance(parameter, Parameter) and parameter.name == name
    assert parameter.read(value) == read


def test_a_kind_knows_the_defaults_of_its_parameters() -> None:
    assert KINDS["terminate"].with_defaults({}) == {"grace_ns": 60_000_000_000}
    assert KINDS["terminate"].with_defaults({"grace_ns": 1}) == {"grace_ns": 1}
    assert KINDS["stop"].with_defaults({}) == {}


def test_limits_read_well() -> None:
    assert str(Limits(10**9, None, {"detect": 5 * 10**7})) == "p95 1s, detect 50ms"
    assert str(Every(2.5, 3)) == "every 2.5 steps on average, 3 at most"


def test_a_worker_that_waits_cannot_be_named_by_its_number() -> None:
    """It owns nothing at the start, and the owner of a slot is struck, whoever that is by then."""
    job = replace(JOB, standby=1, elastic=True)
    named = [problems(scenario(wanted("a", at(1, "1B0"), worker=worker), job=job)) for worker in (8, 9)]
    expected = "faults.0.target.worker: expected a worker from 0 to 7, found"
    assert named == [
        [f"{expected} 8 (worker 8 waits at first: name a stage of its own)"],
        [f"{expected} 9 (the job has 8)"],
    ]
