"""Planted bugs: each takes one rule out of a worker or the engine, and the simulation must notice, for its reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.core.action import Action, Op
from engine.core.ownership import Ownership
from engine.core.program import build as program
from engine.core.program import plan_repair
from engine.core.program import planner as recovery
from engine.core.program import remaining_tasks as lineage
from engine.core.protocol import plan_orders
from tests.simulation import actions, plans, provenance
from tests.simulation import replica as replicas
from tests.simulation.case import Case, Fault
from tests.simulation.compiled import BACKWARD, FORWARD, HEAL, INPUT, REDO, REDUCE
from tests.simulation.executor import Executor
from tests.simulation.planting import GROWN, GROWN_MORE, SMALL, caught, kills, redone, troubled
from tests.simulation.replica import Replica
from tests.simulation.run import run
from tests.soaked import soaked

pytestmark = pytest.mark.usefixtures("fresh_answers")


@pytest.mark.parametrize("count", [20, soaked(60)])
def test_cases_pass_where_nothing_is_planted(count: int) -> None:
    for case in (*kills(SMALL), *kills(GROWN), *kills(GROWN_MORE), *redone(), *troubled(count)):
        assert run(case).problem == "", case.text()


def test_untouched_worker_keeps_a_stale_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on one action too late: what stands there is a transfer that its neighbour waits for."""
    right = plan_repair._without
    monkeypatch.setattr(plan_repair, "_without", lambda actions, first, dropped: right(actions, first + 1, dropped))
    caught(kills(SMALL), "the plan is wrong|the plan computes")


def test_value_that_was_under_way_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_repair._Repair, "_send_again", lambda *given: None)
    caught(kills(SMALL), "the plan is wrong|which nobody makes|waits for")


def test_shadow_that_does_not_apply_what_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    stepped = Executor.take_step

    def take_step(self: Executor, clip: float, slots: Any) -> None:
        before = {slot: self.replicas[slot].state() for slot in slots}
        stepped(self, clip, slots)
        for slot in slots:
            if self.ownership.owner(*slot) != self.number:
                replica = self.replicas[slot]
                replica.weights, replica.optimizer, replica.buffers = before[slot]

    monkeypatch.setattr(Executor, "take_step", take_step)
    caught(kills(SMALL), "worker .: weights .* of slot .* differ")


def test_backward_that_counted_already_is_added_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def add(self: Replica, microbatch: int, kept: int, given: int) -> None:
        self.added += 1
        self.backwards.append(microbatch)
        self.sums = provenance.added(self.sums, kept, given)

    done = actions.perform

    def perform(worker: Executor, action: tuple[Any, ...]) -> bool:
        counts = action[0] == INPUT
        return done(worker, (BACKWARD, *action[1:]) if counts else action)

    monkeypatch.setattr(Replica, "add_backward", add)
    monkeypatch.setattr("tests.simulation.executor.perform", perform)
    caught(redone(), "has counted .* and added")


def test_redone_forward_updates_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    done = actions.perform

    def perform(worker: Executor, action: tuple[Any, ...]) -> bool:
        return done(worker, (FORWARD, *action[1:]) if action[0] == REDO else action)

    monkeypatch.setattr("tests.simulation.executor.perform", perform)
    caught(redone(), "forward . of slot .* after . have been counted")


def test_redone_forward_reads_the_buffers_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replica, "buffers_before", lambda replica, microbatch: replica.running)
    caught(redone(), "worker .: weights .* of slot .* differ|the loss or the clip factor of step . differs|another")


def test_planner_redoes_forwards_that_an_heir_has_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The heir of a logged stage has not run its forwards: it has only the buffers of the boundary."""
    left = lineage.tasks_left

    def tasks_left(ownership: Ownership, held: Any, done: Any) -> Any:
        def redone(task: Action) -> Action:
            is_redone = task.op is Op.F and (task.pipeline, task.stage) in done
            return task._replace(op=Op.REDO_F) if is_redone else task

        tasks = left(ownership, held, done)
        return {redone(task): [*map(redone, before)] for task, before in tasks.items()}

    monkeypatch.setattr(recovery, "tasks_left", tasks_left)
    monkeypatch.setattr(plans, "check_plan", lambda given, plan: None)
    turned = Case(stages=4, microbatches=2, stages_per_worker=2, schedule="zbv", spread=3)
    between_two_logs = (replace(turned, seed=seed, faults=(Fault(1, "LOG", 2),)) for seed in range(50))
    caught(between_two_logs, "has not counted|where . have been counted")


def test_planner_redoes_what_counted_already(monkeypatch: pytest.MonkeyPatch) -> None:
    left = lineage.tasks_left

    def tasks_left(*words: Any) -> Any:
        def whole(task: Action) -> Action:
            return task._replace(op=Op.B) if task.op is Op.I else task

        return {whole(task): [*map(whole, before)] for task, before in left(*words).items()}

    monkeypatch.setattr(recovery, "tasks_left", tasks_left)
    caught(redone(), "the plan computes")


def test_planner_recomputes_what_survivors_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    held = recovery.held_at_start

    def less(*words: Any) -> Any:
        return [one for one in held(*words) if one[1].kind != "gradient"]

    monkeypatch.setattr(recovery, "held_at_start", less)
    monkeypatch.setattr(plan_orders, "baseline", lambda *given: None)
    caught(kills(SMALL), "the plan computes .* more")


def test_heal_without_optimizer_state(monkeypatch: pytest.MonkeyPatch) -> None:
    def healing(replica: Replica) -> Any:
        return replica.version, (replica.weights, 0, replica.buffers)

    monkeypatch.setattr(actions, "healing", healing)
    caught(kills(replace(SMALL, steps=4)), "optimizer state of slot .* differ")


def test_shadow_votes_before_it_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def heal(worker: Executor, action: tuple[Any, ...]) -> bool:
        slot = action[1]
        worker.replicas[slot] = replicas.first_replica(slot, worker.case.pipelines)
        worker.replicas[slot].version = worker.step
        return True

    table = (*actions._DO[:HEAL], heal, *actions._DO[HEAL + 1 :])
    monkeypatch.setattr(actions, "_DO", table)
    caught(kills(replace(SMALL, steps=4)), "of slot .* differ")


def test_adopted_replica_with_buffers_of_another_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    adopt = replicas.adopted

    def adopted(worker: Executor, slots: Any) -> None:
        adopt(worker, slots)
        for slot in slots:
            replica = worker.replicas[slot]
            replica.running = replica.buffers[(slot[0] + 1) % worker.case.pipelines]

    monkeypatch.setattr("tests.simulation.worker.adopted", adopted)
    caught(kills(GROWN), "buffers of slot .* differ|the loss or the clip factor of step . differs")


def test_reduction_adds_in_the_order_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    add = actions.reduction

    def reduction(parts: list[Any], owners: tuple[int, ...]) -> Any:
        in_order = sorted(range(len(parts)), key=lambda place: owners[place])
        total = add([parts[place] for place in in_order], owners)[0]
        return total, *add(parts, owners)[1:]

    monkeypatch.setattr(actions, "reduction", reduction)
    caught(kills(GROWN), "clip factor of step . differs")


@pytest.mark.parametrize("case", [GROWN, GROWN_MORE], ids=["three pipelines", "four"])
def test_a_worker_with_parts_of_two_pipelines_adds_from_the_last(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    reduce, add, own = actions._DO[REDUCE], actions.reduction, [0]

    def perform(worker: Executor, action: tuple[Any, ...]) -> bool:
        own[0] = len(action[2])
        return reduce(worker, action)

    def reduction(parts: list[Any], owners: tuple[int, ...]) -> Any:
        total, *rest = add(parts, owners)
        return add(parts[::-1], owners)[0] if own[0] > 1 else total, *rest

    monkeypatch.setattr(actions, "_DO", (*actions._DO[:REDUCE], perform, *actions._DO[REDUCE + 1 :]))
    monkeypatch.setattr(actions, "reduction", reduction)
    caught(kills(case), "clip factor of step . differs")


def test_reduction_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    reduce = actions._DO[REDUCE]

    def in_place(worker: Executor, action: tuple[Any, ...]) -> bool:
        is_done = reduce(worker, action)
        _, stage, mine, *_ = action
        for pipeline in mine if is_done else ():
            worker.replicas[pipeline, stage].sums = worker.reduced[stage][0]
        return is_done

    monkeypatch.setattr(actions, "_DO", (*actions._DO[:REDUCE], in_place, *actions._DO[REDUCE + 1 :]))
    caught(kills(GROWN), "clip factor of step . differs")


def test_redone_forward_draws_with_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = actions._DO[REDO]

    def redo(worker: Executor, action: tuple[Any, ...]) -> bool:
        replica = worker.replicas[action[1]]
        weights, replica.weights = replica.weights, hash((replica.weights, worker.number))
        is_done = forward(worker, action)
        replica.weights = weights
        return is_done

    monkeypatch.setattr(actions, "_DO", (*actions._DO[:REDO], redo, *actions._DO[REDO + 1 :]))
    caught(redone(), "clip factor of step . differs")


def test_log_without_the_buffers_of_other_pipelines(monkeypatch: pytest.MonkeyPatch) -> None:
    add = actions.reduction

    def reduction(parts: list[Any], owners: tuple[int, ...]) -> Any:
        final, buffers, losses = add(parts, owners)
        return final, (buffers[0],) * len(buffers), losses

    monkeypatch.setattr(actions, "reduction", reduction)
    caught(kills(GROWN), "buffers of slot .* differ")


def test_send_that_the_program_forgot(monkeypatch: pytest.MonkeyPatch) -> None:
    built = program.build_program

    def build(*words: Any) -> Any:
        whole = dict(built(*words))
        whole[0] = tuple(each for each in whole[0] if each != Action(0, Op.SEND_F, 1))
        return whole

    monkeypatch.setattr(plans, "build_program", build)
    caught([SMALL], "nobody sends")


STREAMED = Case(stages=3, microbatches=4, log_every=1)


def test_cases_that_stream_pass_where_nothing_is_planted() -> None:
    for redundancy in ("lazy", "eager"):
        for case in kills(replace(STREAMED, redundancy=redundancy)):
            assert run(case).problem == "", case.text()


def test_older_stream_takes_the_place_of_a_newer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    first: dict[Any, Any] = {}
    take = Replica.take_stream

    def take_stream(self: Replica, stream: Any) -> None:
        added, sums, befores = stream
        sums = first.setdefault((self.version, self.slot), sums)
        take(self, (added, sums, befores))

    monkeypatch.setattr(Replica, "take_stream", take_stream)
    caught(kills(STREAMED), "clip factor of step . differs")


def test_accumulator_that_is_taken_without_its_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Replica.take_stream

    def take_stream(self: Replica, stream: Any) -> None:
        take(self, stream)
        self.added, self.backwards = 0, []

    monkeypatch.setattr(Replica, "take_stream", take_stream)
    caught(kills(STREAMED), "clip factor of step . differs")


def test_stream_with_the_buffers_of_all_that_its_owner_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    send = Replica.stream

    def stream(self: Replica, microbatch: int) -> Any:
        added, sums, befores = send(self, microbatch)
        return added, sums, (*befores[:-1], (self.running, self.losses))

    monkeypatch.setattr(Replica, "stream", stream)
    caught(kills(STREAMED), "loss or the clip factor of step . differs|buffers of slot .* differ")


def test_stream_that_is_taken_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    built = program.build_program

    def build(*words: Any) -> Any:
        return {worker: _exchanged(worker, line, words[1]) for worker, line in built(*words).items()}

    monkeypatch.setattr(plans, "build_program", build)
    caught(kills(STREAMED), "has added . and takes a stream of .")


def _exchanged(worker: int, line: tuple[Action, ...], ownership: Ownership) -> tuple[Action, ...]:
    """Returns a worker's actions with its first two receipts of a slot exchanged."""
    places = [at for at, each in enumerate(line) if each.op is Op.STREAM and ownership.owner(0, each.stage) != worker][
        :2
    ]
    swapped = list(line)
    for one, other in zip(places, reversed(places), strict=True):
        swapped[one] = line[other]
    return tuple(swapped)
