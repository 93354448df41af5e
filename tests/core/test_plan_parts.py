"""Parts of plans: each member follows its part as it would follow the whole, and a wrong base is noticed."""

from __future__ import annotations

from dataclasses import replace

from engine.codec.messages import encode
from engine.core.job.job import Job as RunJob
from engine.core.ownership import Grid, Members, Ownership, fresh, with_shadows
from engine.core.program.build import baseline, build_program
from engine.core.program.inventory import Inventory, PlanMessage, PlanPartMessage, from_json, to_json
from engine.core.program.plan_parts import document_of, first_grid, grid_of, parts_of
from engine.core.program.planner import PlanInput, healing_in, held_at_start, repair_of
from engine.core.program.verify import verify
from engine.core.protocol.orders import held_at_boundary
from engine.core.protocol.plan_orders import at_boundary
from engine.core.protocol.worker_inputs import plan_epoch
from tests.core.recovery_cases import Job
from tests.looped import looped


def _plan(workers: int, victim: int) -> tuple[Grid, PlanMessage, PlanMessage]:
    """Returns the grid of a job whose worker `victim` dies at the start of a step, the base, and the whole plan."""
    before = with_shadows(fresh(Grid(workers, 8)), "lazy", 1, range(workers))
    members = tuple(worker for worker in range(workers) if worker != victim)
    heir = before.shadows[victim][0]
    owners = tuple(heir if owner == victim else owner for owner in before.owners)
    shadows = tuple(
        tuple(each for each in line if each not in (victim, owner))
        for owner, line in zip(owners, before.shadows, strict=True)
    )
    after = Ownership(before.grid, owners, shadows)
    held = [Inventory(worker, 5, tuple(sorted(before.held_by(worker)))) for worker in members]
    base = baseline("1f1b", before.grid, before.owners)
    assert base is not None
    repair = repair_of(PlanInput(2, 4, after, tuple(held)), base)
    assert repair is not None
    texts = tuple((each.worker, to_json(each)) for each in held)
    hosts = tuple(worker // 4 for worker in range(workers))
    there = tuple(host for worker, host in enumerate(hosts) if worker != victim)
    plan = PlanMessage(2, 4, members, (), owners, shadows, texts, hosts=there, before=before.owners, repair=repair)
    return before.grid, first_grid(1, Members.of(range(workers)), before, hosts), plan


GRID, BASE, PLAN = _plan(12, 5)
PARTS = dict(parts_of(PLAN, BASE, GRID))


def test_every_member_follows_its_part_as_it_would_follow_the_whole() -> None:
    whole = plan_epoch(GRID, "1f1b", PLAN)
    assert {*PARTS} == {*PLAN.members}
    for worker, part in PARTS.items():
        document = document_of(part, (BASE,), worker, GRID)
        assert document is not None and grid_of(document) == grid_of(PLAN)
        mine = plan_epoch(GRID, "1f1b", document)
        assert (mine.ownership, mine.plan.digest) == (whole.ownership, whole.plan.digest)
        assert worker in mine.plan.program
        assert all(mine.plan.program[each] == whole.plan.program[each] for each in mine.plan.program)


def test_the_bytes_of_a_part_do_not_grow_with_the_job() -> None:
    few, many = (max(len(encode(part)) for part in dict(_parts(workers)).values()) for workers in (16, 128))
    assert many < 1.1 * few + 50
    assert many < len(encode(_plan(128, 64)[2])) / 20


def _parts(workers: int) -> dict[int, PlanPartMessage]:
    grid, base, plan = _plan(workers, workers // 2)
    return dict(parts_of(plan, base, grid))


@looped(
    "known",
    [
        (),
        (replace(BASE, epoch=3),),
        (replace(BASE, owners=(1, *BASE.owners[1:])),),
        (replace(BASE, shadows=((7,), *BASE.shadows[1:])),),
        (replace(BASE, hosts=(1, *BASE.hosts[1:])),),
        (replace(grid_of(PLAN), epoch=1),),
    ],
)
def test_a_member_with_another_base_needs_the_whole(known: tuple[PlanMessage, ...]) -> None:
    assert [document_of(part, known, worker, GRID) for worker, part in PARTS.items()] == [None] * len(PARTS)


def test_only_members_with_a_tied_stage_need_the_whole_unless_the_step_ends() -> None:
    tied = replace(GRID, ties=((1, 8),))
    needs = [worker for worker, part in PARTS.items() if document_of(part, (BASE,), worker, tied) is None]
    assert needs == [worker for worker in PARTS if worker in (1, 8)]
    assert all(document_of(replace(part, ends=True), (BASE,), worker, tied) is None for worker, part in PARTS.items())


def test_a_part_names_the_wanted_owners_that_are_others() -> None:
    plan = replace(PLAN, wanted=(*PLAN.owners[:-1], 3))
    for worker, part in parts_of(plan, BASE, GRID):
        assert part.wanted == ((11, 3),)
        document = document_of(part, (BASE,), worker, GRID)
        assert document is not None and document.wanted == plan.wanted
        assert plan_epoch(GRID, "1f1b", document).plan.digest == plan_epoch(GRID, "1f1b", plan).plan.digest
        forgotten = replace(document, wanted=())
        assert plan_epoch(GRID, "1f1b", forgotten).plan.digest != plan_epoch(GRID, "1f1b", plan).plan.digest


JOBS = [
    Job(Grid(4, 6)),
    Job(Grid(4, 6), "gpipe"),
    Job(Grid(4, 6), "zb1p"),
    Job(Grid(8, 8), "interleaved", stages_per_worker=2),
    Job(Grid(8, 8), "zbv", stages_per_worker=2),
    Job(Grid(4, 6, pipelines=2)),
    Job(Grid(4, 6, blocks=2)),
    Job(Grid(4, 6, slices=2)),
]


def _of_run(grid: Grid) -> RunJob:
    """Returns the job of a run with the shape of a grid."""
    stages, microbatches = grid.stages // grid.blocks, grid.microbatches // grid.slices
    return RunJob(
        stages=stages, microbatches=microbatches, pipelines=grid.pipelines, blocks=grid.blocks, slices=grid.slices
    )


@looped("job", JOBS)
@looped("moved", [(), (1,), (1, 2)])
def test_a_prepared_step_is_a_whole_step_of_its_owners(job: Job, moved: tuple[int, ...]) -> None:
    """All slots of some workers move to their shadows, and other members become the shadows."""
    before = job.ownership()
    members, slots = before.workers(), before.grid.slots()
    lines = zip(slots, before.owners, before.shadows, strict=True)
    owners = tuple(line[0] if owner in moved else owner for _, owner, line in lines)
    after = job.healed(Ownership(job.grid, owners), tuple(each for each in members if each not in moved))
    texts = tuple((each, to_json(held_at_boundary(each, 5, before))) for each in members)
    shown = (after.owners, after.shadows, texts)
    document = at_boundary(_of_run(job.grid), PlanMessage(2, 4, members, moved, *shown, before=after.owners))
    given = PlanInput(2, 4, after, tuple(from_json(text) for _, text in texts))
    assert document.repair is not None
    plan = plan_epoch(job.grid, job.schedule, document).plan
    usual = build_program(job.schedule, after, "lazy", healing_in(given))
    assert {worker: plan.program[worker] for worker in members} == {worker: usual.get(worker, ()) for worker in members}
    assert verify(dict(plan.program), after, healing_in(given), held=held_at_start(given)) == ()


def test_stages_in_shards_are_planned_by_each_member() -> None:
    ownership = fresh(Grid(1, 4, 2))
    texts = tuple((worker, to_json(held_at_boundary(worker, 5, ownership))) for worker in (0, 1))
    document = PlanMessage(2, 4, (0, 1), (), (0, 1), ((), ()), texts, before=(0, 1))
    assert at_boundary(RunJob(pipelines=2, stages=1, microbatches=4), document).repair is not None
    assert at_boundary(RunJob(pipelines=2, stages=1, microbatches=4, fsdp=1), document) is document


def test_a_plan_that_is_no_repair_or_whose_grid_is_none_of_its_own_has_no_parts() -> None:
    assert not dict(parts_of(replace(PLAN, repair=None), BASE, GRID))
    assert not dict(parts_of(replace(PLAN, wanted=PLAN.owners), BASE, GRID))
    assert not dict(parts_of(replace(PLAN, hosts=()), BASE, GRID))
