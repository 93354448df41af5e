"""Cases of recovery: a job of some shape and policy, killed at some point, planned, and run to its end."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from zlib import crc32

from engine.core.action import Program
from engine.core.ownership import Grid, Ownership, Redundancy, Slot, fresh, with_shadows
from engine.core.program.build import baseline, build_program
from engine.core.program.handoff import Ship, ships_in
from engine.core.program.inventory import Inventory, SavedResiduals, from_json, to_json
from engine.core.program.planner import Plan, PlanInput, healing_in, held_at_start, make_plan
from engine.core.program.schedules import SCHEDULES
from engine.core.program.verify import verify
from engine.core.value import Kind
from tests.core.provenance import Machine, State

ANY_ORDER = 1
STEPS = 2


@dataclass(frozen=True)
class Job:
    """The shape and the policy of a job; with `retain`, workers keep what goes elsewhere until the commit."""

    grid: Grid
    schedule: str = "1f1b"
    redundancy: Redundancy = "lazy"
    level: int = 1
    retain: bool = True
    stages_per_worker: int = 1
    log_every: int = 0
    residuals: str = "recompute"
    copy_time: float | None = None
    machine_type: type[Machine] = Machine

    def ownership(self) -> Ownership:
        """Returns the ownership before any failure."""
        whole = fresh(self.grid, self.stages_per_worker, SCHEDULES[self.schedule].placement)
        return self.healed(whole, whole.workers())

    def healed(self, ownership: Ownership, members: Collection[int]) -> Ownership:
        """Returns the ownership with the shadows that the policy wants."""
        return with_shadows(ownership, self.redundancy, self.level, members)

    def program(self, ownership: Ownership, healing: Collection[tuple[int, Slot]] = ()) -> Program:
        """Returns the program of a whole step."""
        how = (ownership, self.redundancy, frozenset(healing), self.log_every)
        return build_program(self.schedule, *how, copy_time=self.copy_time)

    def machine(self) -> Machine:
        """Returns the job at the start of its first step."""
        machine = self.machine_type(self.ownership(), self.retain)
        machine.enter([self.program(machine.ownership)], machine.ownership)
        return machine


@dataclass(frozen=True)
class Failure:
    """A failure: the frozen survivors, the input of the plan, and the plan."""

    machine: Machine
    given: PlanInput
    plan: Plan

    def finish(self, order: random.Random) -> Machine:
        """Returns the machine after the plan has run to its end."""
        self.machine.enter([self.plan.program], self.given.ownership)
        assert self.machine.run(order)
        return self.machine


def heirs(ownership: Ownership, inventories: Collection[Inventory], leavers: Collection[int] = ()) -> Ownership:
    """Returns the owner of each slot among the workers with an inventory; -1 if none of them holds the stage.

    A leaver owns no slot that another worker holds; it is a shadow until it leaves.
    """
    holders: dict[Slot, list[int]] = {}
    for inventory in inventories:
        for slot in inventory.whole:
            holders.setdefault(slot, []).append(inventory.worker)
    owners, shadows = [], []
    for slot in ownership.grid.slots():
        live = [worker for worker in ownership.replicas(*slot) if worker in holders.get(slot, ())]
        others = [each for d in range(ownership.grid.pipelines) for each in holders.get((d, slot[1]), ())]
        staying = [worker for worker in (*live, *others) if worker not in leavers]
        owners.append([*staying, *live, *others, -1][0])
        shadows.append(tuple(worker for worker in live if worker != owners[-1]))
    return replace(ownership, owners=tuple(owners), shadows=tuple(shadows))


def offering(held: Inventory) -> Inventory:
    """Returns the inventory of a worker that can send all its residuals."""
    saved = {}
    for slot in held.whole:
        microbatches = list(held.values.since(Kind.RESIDUAL, slot, held.added.get(slot, 0)))
        following = [each for number, each in enumerate(microbatches) if each == microbatches[0] + number]
        if following:
            saved[slot] = SavedResiduals(following[0], (1000,) * len(following), 10**6, 1000)
    return replace(held, saved=saved)


def fail(
    machine: Machine,
    victims: Collection[int],
    order: random.Random,
    leavers: Collection[int] = (),
    job: Job | None = None,
) -> Failure | None:
    """Returns the survivors after `victims` are killed, with their plan; None if a stage is lost.

    With the `job` the plan is mostly a repair: of the program of its first owners, or of the present ones.

    The `leavers` hand over in the open step: they stay, as shadows if others hold their stages.

    A step with all votes may be committed or not; it must be if a worker has taken it.
    """
    newest = machine.newest()
    committed = newest if machine.all_voted(newest) and order.random() < 0.5 else newest - 1
    left = machine.left_by(victims)
    for leaver in leavers:  # it can send them then
        left.take_back(leaver)
    inventories = left.inventories()
    ownership = heirs(machine.ownership, inventories, leavers)
    if -1 in ownership.owners:
        return None
    ships: tuple[Ship, ...] = ()
    if job is not None and job.residuals != "recompute":
        inventories = tuple(offering(each) if each.worker in leavers else each for each in inventories)
        assert all(from_json(to_json(each)) == each for each in inventories)
        left_ns = dict.fromkeys(leavers, 10**12)
        ships = ships_in(ownership, committed + 1, inventories, job.residuals, 1e9, left_ns)
    given = PlanInput(1, committed, ownership, inventories, ships)
    bases = [None, machine.ownership.owners, machine.ownership.owners, job.ownership().owners] if job else [None]
    before = bases[crc32(repr(inventories).encode()) % len(bases)]  # the kills stay those that `order` gives
    base = baseline(job.schedule, job.grid, before) if job and before else None
    plan = make_plan(given, base)
    assert plan.lost_stages == () and plan.step == committed + 1
    assert verify(plan.program, ownership, healing_in(given), held=held_at_start(given)) == ()
    left.catch_up(committed)
    left.adopt(plan.adopted, ownership)
    if job is not None and job.copy_time is not None:
        plan = replace(plan, program=left.with_copies(plan.program, job.copy_time))
    return Failure(left, given, plan)


def seeded(number: int) -> random.Random:
    """Returns the random generator of the history with that number."""
    return random.Random(number)  # noqa: S311 - nothing here is secret


@lru_cache
def faultless(grid: Grid) -> tuple[State, ...]:
    """Returns the state after each step of a run with no fault; it depends on nothing but the shape."""
    job = Job(grid, redundancy="none")
    machine, states = job.machine(), []
    for _ in range(STEPS + 4):  # each failure may come after the votes of a step
        assert machine.run(seeded(ANY_ORDER))
        states.append(machine.state())
        machine.enter([job.program(machine.ownership)], machine.ownership)
    return tuple(states)


def assert_faultless(machine: Machine) -> None:
    """Asserts that every replica of every slot equals that of a run without a fault."""
    assert machine.state() == faultless(machine.ownership.grid)[machine.newest() - 1]


def single_kills(job: Job) -> Iterator[Failure]:
    """Yields a failure for each worker after each of its actions, in one run of a step that nothing else disturbs."""
    order = seeded(ANY_ORDER)
    machine = job.machine()
    for victim in machine.bodies:
        yield from _failure(machine, victim, order, job)
    while not machine.run(order, limit=1):
        yield from _failure(machine, machine.done[-1][0], order, job)


def distinct_kills(job: Job, every: int = 1, first: int = 0) -> Iterator[Failure]:
    """Yields each `every`th failure of `single_kills` from `first` on, if its survivors are not those of another."""
    order = seeded(ANY_ORDER)
    machine, seen = job.machine(), set[str]()
    victims = list(machine.bodies)
    number, ended = 0, False
    while not ended:
        for victim in victims:
            number += 1
            if number % every == first % every:
                survivors = f"{machine.all_voted(machine.newest())} {machine.left_by([victim]).inventories()}"
                if survivors not in seen:
                    seen.add(survivors)
                    yield from _failure(machine, victim, order, job)
        ended = machine.run(order, limit=1)
        victims = [machine.done[-1][0]]


def _failure(machine: Machine, victim: int, order: random.Random, job: Job) -> Iterator[Failure]:
    failure = fail(machine, [victim], order, job=job)
    if failure is not None:
        yield failure


def hand_overs(job: Job, every: int = 1) -> Iterator[Failure]:
    """Yields each `every`th hand-over of a worker inside a step: after each of its actions, in one run of a step."""
    order, number = seeded(ANY_ORDER), 0
    machine = job.machine()
    leavers = list(machine.bodies)
    while leavers:
        for leaver in leavers:
            failure = fail(machine, [], order, [leaver], job) if number % every == 0 else None
            number += 1
            if failure is not None:
                yield failure
        leavers = [] if machine.run(order, limit=1) else [machine.done[-1][0]]


def random_job(order: random.Random) -> Job:
    """Returns a small job of any kind."""
    stages = order.randint(1, 4)
    ties: tuple[tuple[int, ...], ...] = ()
    if stages > 1 and order.random() < 0.4:
        ties = (tuple(sorted(order.sample(range(stages), 2))),)
    pipelines = order.choice([1, 1, 2, 3]) if stages < 4 else 1
    grid = Grid(stages, order.randint(1, 5), pipelines, ties)
    policies: list[Redundancy] = ["lazy", "eager"] if pipelines == 1 else ["lazy", "lazy", "eager", "reroute", "none"]
    redundancy = order.choice(policies)
    return Job(grid, order.choice(["1f1b", "gpipe"]), redundancy, order.randint(1, 2), order.random() < 0.7)


def random_history(job: Job, order: random.Random) -> tuple[Machine, list[Failure]] | None:
    """Returns a run of `STEPS` steps with up to three failures, healed or not; None when a stage was lost."""
    machine = job.machine_type(job.ownership(), job.retain)
    failures: list[Failure] = []
    plan: Program | None = None
    while plan is not None or machine.newest() < STEPS:
        ownership, programs = _next_programs(job, machine, plan, order)
        machine.enter(programs, ownership)
        length = sum(len(line) for line in machine.program.values())
        kill = len(failures) < 3 and order.random() < 0.8
        if machine.run(order, order.randint(0, length) if kill else length):
            plan = None
            continue
        victims = order.sample(sorted(machine.bodies), min(len(machine.bodies), order.choice([0, 1, 1, 1, 2])))
        failure = fail(machine, victims, order, job=job)
        if failure is None:
            return None
        failures.append(failure)
        machine, plan = failure.machine, failure.plan.program
    return machine, failures


def _next_programs(
    job: Job, machine: Machine, plan: Program | None, order: random.Random
) -> tuple[Ownership, list[Program]]:
    """Returns the plan and perhaps a step after it, or the next step, perhaps healed."""
    ownership = machine.ownership
    if plan is not None:
        more = machine.newest() + 1 < STEPS and order.random() < 0.5
        return ownership, [plan, job.program(ownership)] if more else [plan]
    healing: list[tuple[int, Slot]] = []
    if order.random() < 0.5:
        ownership = job.healed(ownership, sorted(machine.bodies))
        healing = [
            (worker, slot)
            for slot in ownership.grid.slots()
            for worker in ownership.shadows_of(*slot)
            if slot not in machine.bodies[worker].replicas
        ]
    return ownership, [job.program(ownership, healing)]
