"""Plan repair: a drawing, every kill of every schedule against the planner, its growth, and what it leaves alone."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest

from engine.codec.messages import encode
from engine.core.action import COMPUTE_OPS, Action, Op, Program
from engine.core.errors import InvariantError, ScheduleError
from engine.core.job.job import Job as JobOfRun
from engine.core.message_kinds import MAX_BYTES
from engine.core.ownership import Grid, Ownership
from engine.core.program import planner
from engine.core.program.build import baseline
from engine.core.program.dependencies import Routes, peers_program, routes_of
from engine.core.program.dry_run import dry_run
from engine.core.program.inventory import Inventory, PlanMessage, ValueRuns, to_json
from engine.core.program.owners import owners_program
from engine.core.program.plan_repair import Baseline, RepairedProgram, _Repair, baseline_of
from engine.core.program.planner import Plan, PlanInput, held_at_start, make_plan
from engine.core.program.verify import verify
from engine.core.protocol.plan_orders import with_repair
from engine.core.protocol.worker_inputs import plan_epoch
from engine.core.value import Kind, Value
from tests.core.drawing import drawn_program
from tests.core.recovery_cases import Failure, Job, assert_faultless, distinct_kills, fail, seeded
from tests.soaked import soaked

FORWARDS_FIRST = ("gpipe", "looped-bfs")
JOBS = [
    Job(Grid(3, 5)),
    Job(Grid(4, 8), redundancy="eager"),
    Job(Grid(4, 8), "eager-1f1b", log_every=2),
    Job(Grid(4, 6), "zb1p"),
    Job(Grid(6, 7), "interleaved", stages_per_worker=2),
    Job(Grid(8, 8), "interleaved-flexible", stages_per_worker=2, log_every=2),
    Job(Grid(8, 8), "zbv", stages_per_worker=2),
    Job(Grid(8, 8), "dualpipev-overlapped", "eager", stages_per_worker=2),
    Job(Grid(3, 4, pipelines=2), redundancy="reroute"),
    Job(Grid(4, 4, blocks=2)),
]


def _values(kind: Kind, stage: int, *microbatches: int) -> tuple[Value, ...]:
    return tuple(Value(kind, 0, stage, each) for each in microbatches)


def test_untouched_workers_go_on_and_the_successor_merges() -> None:
    """Worker 2 of four has died after 2F1; worker 1 has its stage. 0SEND_F2, 2SEND_F1, 3SEND_B0 were under way."""
    ownership = Ownership(Grid(4, 3), (0, 1, 1, 3))
    given = (
        Inventory(
            *(0, 5, ((0, 0),), {(0, 0): 3}),
            values=ValueRuns(_values(Kind.ACTIVATION, 0, 0, 1, 2) + _values(Kind.RESIDUAL, 0, 0, 1, 2)),
        ),
        Inventory(
            *(1, 5, ((0, 1), (0, 2)), {(0, 1): 2}),
            values=ValueRuns(_values(Kind.ACTIVATION, 1, 0, 1) + _values(Kind.RESIDUAL, 1, 0, 1)),
        ),
        Inventory(
            *(3, 5, ((0, 3),), {(0, 3): 1}, {(0, 3): 1}),
            values=ValueRuns(_values(Kind.GRADIENT, 3, 0)),
        ),
    )
    plan = make_plan(PlanInput(2, 4, ownership, given), baseline("1f1b", ownership.grid, (0, 1, 2, 3)))
    assert isinstance(plan.program, RepairedProgram)
    assert drawn_program(_without_end(plan.program)).splitlines() == [
        "0: 0SEND_F2 0RECV_B0 0B0 0RECV_B1 0B1 0RECV_B2 0B2",
        "1: 2F0 1RECV_F2 1F2 2F1 2SEND_F1 2RECV_B0 2B0 1B0 1SEND_B0 2F2 2SEND_F2 2RECV_B1 2B1 1B1 1SEND_B1 "
        "2RECV_B2 2B2 1B2 1SEND_B2",
        "3: 3SEND_B0 3RECV_F1 3F1 3B1 3SEND_B1 3RECV_F2 3F2 3B2 3SEND_B2",
    ]


def _without_end(program: Program) -> Program:
    end = ("REDUCE_GRAD", "LOG", "COMMIT", "STEP")
    return {worker: tuple(each for each in line if each.op not in end) for worker, line in program.items()}


def _computed(program: Program) -> Counter[tuple[int, Action]]:
    """Returns the compute actions by worker; both parts of a backward are the whole."""
    tasks = Counter((worker, each) for worker, line in program.items() for each in line if each.op in COMPUTE_OPS)
    for worker, action in [task for task in tasks if task[1].op is Op.W]:
        parts = [(worker, action._replace(op=op)) for op in (Op.I, Op.W)]
        if tasks[parts[0]]:
            tasks -= Counter(parts)
            tasks[worker, action._replace(op=Op.B)] += 1
    return tasks


def compared(failure: Failure, repair: Plan) -> tuple[float, float]:
    """Expects that a repair does what the planner would do; returns how long either takes, in forwards."""
    given = failure.given
    oracle, held = planner.replanned(given, repair.adopted), held_at_start(given)
    assert verify(repair.program, given.ownership, (), held=held) == ()
    assert _computed(repair.program) == _computed(oracle.program)
    took, best = (dry_run(plan.program, given.ownership, held=held).makespan for plan in (repair, oracle))
    return took, best


def _repairs(job: Job, every: int) -> Iterator[tuple[Failure, bool]]:
    """Yields failures with the plan made from the program that was running, and whether it is a repair."""
    base = baseline(job.schedule, job.grid, job.ownership().owners)
    for failure in distinct_kills(job, every):
        plan = make_plan(failure.given, base)
        yield replace(failure, plan=plan), plan.repair is not None


@pytest.mark.parametrize("part", [4, soaked(9)])
@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.schedule}-{job.grid.stages}-{job.redundancy}")
def test_a_repair_does_the_work_of_the_planner_in_no_more_time(job: Job, part: int) -> None:
    ratios, num_planned = [], 0
    every = max(1, job.grid.stages * job.grid.microbatches // part)
    for number, (failure, is_repair) in enumerate(_repairs(job, every)):
        assert_faultless(failure.finish(seeded(number)))
        if is_repair:
            took, best = compared(failure, failure.plan)
            assert took <= max(1.02 * best, best + 1), "in a step of a few forwards, two valid orders may differ by one"
            ratios.append(took / best if best else 1.0)
        else:
            num_planned += not planner._done(failure.given)
    assert len(ratios) > 2 * part and sum(ratios) / len(ratios) < 1.005
    assert num_planned <= len(ratios) // 20, "nearly every failure inside a step can be repaired"


def test_a_worker_with_another_order_has_another_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest covers what a repair decides: workers that decided differently stop each other."""
    job = Job(Grid(4, 5))
    base = baseline(job.schedule, job.grid, job.ownership().owners)
    given = [failure.given for failure, is_repair in _repairs(job, every=5) if is_repair]
    right = [make_plan(each, base) for each in given]
    merged = _Repair._merged
    monkeypatch.setattr(_Repair, "_merged", lambda self, worker: merged(self, worker)[::-1])
    monkeypatch.setattr(planner, "refuse_stuck", lambda *given: None)
    wrong = [make_plan(each, base) for each in given]
    pairs = [(one, other) for one, other in zip(right, wrong, strict=True) if dict(one.program) != dict(other.program)]
    assert len(pairs) > 5 and all(one.digest != other.digest for one, other in pairs)


def test_a_successor_that_would_wait_for_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(Grid(4, 5))
    base = baseline(job.schedule, job.grid, job.ownership().owners)
    given = [failure.given for failure, is_repair in _repairs(job, every=5) if is_repair]
    merged = _Repair._merged
    monkeypatch.setattr(_Repair, "_merged", lambda self, worker: merged(self, worker)[::-1])
    refused = 0
    for each in given:
        try:
            make_plan(each, base)
        except ScheduleError:
            refused += 1
    assert refused > 5


@pytest.mark.parametrize("schedule", FORWARDS_FIRST)
def test_steps_with_all_forwards_first_are_planned_from_scratch(schedule: str) -> None:
    """Merged in that order, two stages would take up to a fifth longer."""
    stages_per_worker = 2 if schedule == "looped-bfs" else 1
    grid = Grid(4 * stages_per_worker, 8)
    assert baseline(schedule, grid, Job(grid, schedule, stages_per_worker=stages_per_worker).ownership().owners) is None


def test_any_baseline_gives_a_right_plan() -> None:
    """What workers hold decides: with the owners of another time the plan is another one, and right."""
    job = Job(Grid(4, 5))
    owners = [(0, 1, 2, 3), (0, 1, 1, 3), (1, 1, 2, 3), (3, 1, 2, 3), (0, 1, 2, 2)]
    seen = Counter[bool]()
    for number, failure in enumerate(distinct_kills(job)):
        base = baseline(job.schedule, job.grid, owners[number % len(owners)])
        plan = make_plan(failure.given, base)
        seen[plan.repair is None] += 1
        assert_faultless(replace(failure, plan=plan).finish(seeded(number)))
    assert min(seen.values()) > 10


def test_a_shadow_that_waits_for_its_state_gets_it_in_a_repair() -> None:
    ownership = Ownership(Grid(2, 2), (0, 1), shadows=((1,), (0,)))
    given = PlanInput(2, 4, ownership, (Inventory(0, 5, ((0, 0), (0, 1))), Inventory(1, 5, ((0, 1),))))
    plan = make_plan(given, baseline("1f1b", ownership.grid, (0, 1)))
    assert plan.repair is not None and plan.repair.healing == ((1, (0, 0)),)
    assert [worker for worker, line in plan.program.items() if Action(0, Op.HEAL) in line] == [0, 1]
    assert verify(plan.program, ownership, planner.healing_in(given), held=held_at_start(given)) == ()


def test_a_repair_that_ends_one_of_two_tied_stages_alone_is_not_followed() -> None:
    """The coordinator, which makes it, knows nothing of ties: stage 0 is logged, and stage 2 is not."""
    given = [
        Inventory(each, 5, ((0, each),), {(0, each): 1}, {(0, each): 1}, ((0, each),) if each < 2 else (), ValueRuns())
        for each in range(3)
    ]
    texts = tuple((held.worker, to_json(held)) for held in given)
    owners = tuple(range(3))
    document = PlanMessage(2, 4, owners, (), owners, ((), (), ()), texts, before=owners)
    source = PlanInput(2, 4, Ownership(Grid(3, 1), owners), tuple(given))
    repair = planner.repair_of(source, _base(Grid(3, 1), owners))
    assert repair is not None and repair.done == ((0, 0), (0, 1))
    for ties, is_followed in (((), True), (((0, 2),), False), (((0, 1),), True)):
        plan = plan_epoch(Grid(3, 1, ties=ties), "1f1b", replace(document, repair=repair)).plan
        assert (plan.repair == repair) is is_followed
        assert sum(each.op is Op.REDUCE_GRAD for line in plan.program.values() for each in line) == (
            1 if is_followed else 2
        )


def _base(grid: Grid, owners: tuple[int, ...]) -> Baseline:
    """Returns the baseline of any step; a single microbatch is a wave of forwards, which the planner plans."""
    starts: dict[int, list[float]] = {worker: [] for worker in owners}
    program = owners_program("1f1b", grid, owners)
    for start, _, worker, _ in dry_run(program, Ownership(grid, owners)).spans:
        starts[worker].append(start)
    return baseline_of(program, starts, grid, owners)


def _document(microbatches: int) -> tuple[JobOfRun, PlanMessage]:
    """Returns a job of four workers, and the document of the plan after worker 2 has died at the start of a step."""
    owners, slots = (0, 1, 2, 3), {0: ((0, 0),), 1: ((0, 1), (0, 2)), 3: ((0, 3),)}
    texts = tuple((worker, to_json(Inventory(worker, 5, whole))) for worker, whole in slots.items())
    shadows: tuple[tuple[int, ...], ...] = ((), (), (), ())
    document = PlanMessage(2, 4, (0, 1, 3), (), (0, 1, 1, 3), shadows, texts, before=owners)
    return JobOfRun(microbatches=microbatches), document


@pytest.mark.parametrize("microbatches", [2, 512, 4000, 11000])
def test_a_document_is_never_longer_than_a_message(microbatches: int) -> None:
    job, document = _document(microbatches)
    sent = with_repair(job, document)
    assert len(encode(sent)) <= MAX_BYTES
    assert (sent.repair is None) is (microbatches == 11000)


def test_an_inventory_that_cannot_be_is_left_to_the_workers_to_refuse() -> None:
    """It is a worker's text: one that claims billions of values costs the coordinator neither time nor memory."""
    job, document = _document(8)
    claims = document.inventories[0][1].replace('"values":[]', '"values":[["residual",0,0,[0,9999999999]]]')
    spoiled = replace(document, inventories=((0, claims), *document.inventories[1:]))
    assert with_repair(job, spoiled) == spoiled
    with pytest.raises(InvariantError, match="holds what no step"):
        plan_epoch(job.grid, job.schedule, spoiled)


def test_routes_among_the_peers_are_those_of_the_whole_program() -> None:
    for job in JOBS:
        for failure, is_repair in _repairs(job, every=23):
            program, ownership = failure.plan.program, failure.given.ownership
            for worker in program if is_repair else ():
                among = peers_program(worker, program, ownership)
                assert routes_of(worker, among, ownership) == routes_of(worker, program, ownership)


def _calls(work: Callable[[], object]) -> int:
    calls = [0]

    def note(frame: object, event: str, argument: object) -> None:
        calls[0] += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls[0]


def _half_way(stages: int) -> tuple[Job, Failure]:
    job, order = Job(Grid(stages, 32)), seeded(0)
    machine = job.machine()
    machine.run(order, sum(map(len, machine.program.values())) // 2)
    failure = fail(machine, [stages // 2], order)
    assert failure is not None
    return job, failure


def test_the_work_of_one_failure_grows_with_the_job_and_that_of_an_untouched_worker_does_not() -> None:
    """In calls, so that no clock decides; an untouched worker reads the programs of its neighbours."""
    plans, shares = [], []
    for stages in (8, 64):
        job, failure = _half_way(stages)
        base, given = baseline(job.schedule, job.grid, job.ownership().owners), failure.given
        plans.append(_calls(partial(make_plan, given, base)))
        plan = make_plan(given, base)
        assert plan.repair
        shares.append(_calls(partial(_share, plan, given.ownership)))
    assert plans[1] / plans[0] < 8**1.1
    assert shares[1] / shares[0] < 8**0.3


def _share(plan: Plan, ownership: Ownership) -> Routes:
    return routes_of(1, peers_program(1, plan.program, ownership), ownership)
