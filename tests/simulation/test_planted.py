"""Planted bugs: each takes one rule out of a worker or of the engine, and the simulation must notice, for its reason."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from engine.core import commit, membership_rules, membership_verdicts, recovery
from engine.core.action import Action, Op
from engine.core.ownership import Ownership
from tests.simulation import actions, plans, provenance
from tests.simulation import replica as replicas
from tests.simulation.agent import Agent
from tests.simulation.case import Case, Fault, Violation
from tests.simulation.compiled import BACKWARD, FORWARD, INPUT, REDO, key_of
from tests.simulation.plans import Document, Planned
from tests.simulation.replica import Replica
from tests.simulation.run import run
from tests.simulation.schedules import random_case
from tests.simulation.worker import Worker

SMALL = Case(stages=3, microbatches=2)
GROWN = Case(stages=2, microbatches=2, pipelines=3, redundancy="reroute")


@pytest.fixture(autouse=True)
def _fresh_answers() -> Iterator[None]:
    plans.forget()
    yield
    plans.forget()


def kills(case: Case, step: int = 1) -> Iterator[Case]:
    """Yields a kill at every third moment of a step, of every worker in turn."""
    moments = run(replace(case, faults=())).moments
    for place in range(0, min(moments) // case.steps, 3):
        for worker, count in enumerate(moments):
            at = count // case.steps * step + 1 + place
            yield replace(case, seed=place, faults=(Fault(worker, "moment", at),))


def redone() -> Iterator[Case]:
    """Yields cases in which nobody dies and nothing is retained: what was sent must be made again without a trace."""
    case = Case(stages=3, microbatches=3, redundancy="none", steps=2)
    for worker in range(3):
        for at in range(2, 40, 3):
            yield replace(case, seed=at, faults=(Fault(worker, "moment", at, "suspect"),))


def troubled(count: int, kinds: tuple[str, ...] = ()) -> Iterator[Case]:
    """Yields random cases with slow messages, those with some kinds of faults only."""
    found = (replace(random_case(number), spread=10) for number in range(100_000))
    wanted = (case for case in found if not kinds or any(fault.kind in kinds for fault in case.faults))
    return islice((case for case in wanted if case.stages > 1), count)


def caught(cases: Iterable[Case], words: str) -> None:
    """Asserts that some case fails, and that the first one does so for the reason that `words` match."""
    problems = (history.problem for history in map(run, cases))
    first = next((problem for problem in problems if problem), None)
    assert first is not None, "nobody noticed"
    assert re.search(words, first), first


def test_cases_pass_where_nothing_is_planted() -> None:
    for case in (*kills(SMALL), *kills(GROWN), *redone(), *troubled(60)):
        assert run(case).problem == "", case.text()


def test_shadow_that_does_not_apply_what_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    def take_step(self: Worker, clip: float) -> None:
        for slot in self.steps_now():
            replica = self.replicas[slot]
            before = replica.state()
            replica.take_step(clip)
            if self.ownership.owner(*slot) != self.number:
                replica.weights, replica.optimizer, replica.buffers = before
        self.step += 1
        self.values, self.made, self.reduced = {}, set(), {}
        self.inbox, self.ahead = self.ahead, {}

    monkeypatch.setattr(Worker, "take_step", take_step)
    caught(kills(SMALL), "loss or the clip factor of step 1 differs")


def test_what_was_sent_is_not_retained(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Worker.__init__

    def forgetful(self: Worker, *words: Any) -> None:
        made(self, *words)
        self.retains = False

    monkeypatch.setattr(Worker, "__init__", forgetful)
    caught(kills(SMALL), "no longer holds")


def test_backward_that_counted_already_is_added_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def add(self: Replica, microbatch: int, kept: int, given: int) -> None:
        self.added += 1
        self.backwards.append(microbatch)
        self.sums = provenance.added(self.sums, kept, given)

    done = actions.perform

    def perform(worker: Worker, action: tuple[Any, ...]) -> bool:
        counts = action[0] == INPUT
        return done(worker, (BACKWARD, *action[1:]) if counts else action)

    monkeypatch.setattr(Replica, "add_backward", add)
    monkeypatch.setattr("tests.simulation.worker.perform", perform)
    caught(redone(), "has counted .* and added")


def test_redone_forward_updates_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    done = actions.perform

    def perform(worker: Worker, action: tuple[Any, ...]) -> bool:
        return done(worker, (FORWARD, *action[1:]) if action[0] == REDO else action)

    monkeypatch.setattr("tests.simulation.worker.perform", perform)
    caught(redone(), "forward . of slot .* after . have been counted")


def test_planner_redoes_what_counted_already(monkeypatch: pytest.MonkeyPatch) -> None:
    left = recovery.tasks_left

    def tasks_left(*words: Any) -> Any:
        tasks = left(*words)
        return {task._replace(op=Op.B) if task.op is Op.I else task: given for task, given in tasks.items()}

    monkeypatch.setattr(recovery, "tasks_left", tasks_left)
    caught(redone(), "the plan computes")


def test_planner_recomputes_what_survivors_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    held = recovery._held

    def less(*words: Any) -> Any:
        return [one for one in held(*words) if one[1].kind != "gradient"]

    monkeypatch.setattr(recovery, "_held", less)
    caught(kills(SMALL), "the plan computes .* more")


def test_words_of_another_epoch_are_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "fits", lambda self, epoch: True)
    caught(troubled(2000), "makes a plan of epoch . in epoch")


def test_zombie_is_listened_to_by_its_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "accepts", lambda self, epoch: True)
    caught(troubled(2000), "took what epoch")


def test_zombie_votes(monkeypatch: pytest.MonkeyPatch) -> None:
    add = commit.Ballot.add
    monkeypatch.setattr(Agent, "counts", lambda self, epoch, worker: True)
    monkeypatch.setattr(commit.Ballot, "add", lambda self, vote: add(self, replace(vote, epoch=self.epoch)))
    caught(troubled(2000), "a vote of epoch . counts in epoch")


def test_heal_without_optimizer_state(monkeypatch: pytest.MonkeyPatch) -> None:
    def healing(replica: Replica) -> Any:
        return replica.version, (replica.weights, 0, replica.buffers)

    monkeypatch.setattr(actions, "healing", healing)
    caught(kills(replace(SMALL, steps=4)), "optimizer state of slot .* differ")


def test_commit_is_accepted_after_the_inventory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "obeys_commit", lambda self, epoch: self.epoch - epoch in (0, 1))
    caught(troubled(2000), "takes a commit after its inventory")


def test_inventory_claims_what_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Worker.inventory

    def boast(self: Worker) -> str:
        if self.number:
            return told(self)
        values = self.values
        made = [key_of(kind, 0, stage, each) for kind in (0, 1) for stage in range(3) for each in range(2)]
        self.values = {**dict.fromkeys(made, 0), **values}
        text = told(self)
        self.values = values
        return text

    monkeypatch.setattr(Worker, "inventory", boast)
    caught(kills(SMALL), "sends .* which it lacks")


def test_shadow_votes_before_it_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def heal(worker: Worker, action: tuple[Any, ...]) -> bool:
        slot = action[1]
        worker.replicas[slot] = replicas.first_replica(slot, worker.case.pipelines)
        worker.replicas[slot].version = worker.step
        return True

    table = (*actions._DO[:7], heal, *actions._DO[8:])
    monkeypatch.setattr(actions, "_DO", table)
    caught(kills(replace(SMALL, steps=4)), "of slot .* differ")


def test_catch_up_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def catch_up(self: Worker, document: Document) -> None:
        self.step = document.committed + 1

    monkeypatch.setattr(Worker, "catch_up", catch_up)
    skewed = (
        replace(case, faults=(Fault(worker, "stepped", 2),), seed=case.seed, spread=10)
        for case in troubled(300)
        for worker in range(2)
    )
    caught(skewed, "no whole replica|cannot adopt|differ")


def test_plan_follows_the_order_of_a_set(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Worker.plan_of

    def plan_of(self: Worker, document: Document) -> Planned:
        found = made(self, document)
        order = {worker: actions for worker, actions in sorted(found.plan.program.items(), reverse=self.number == 1)}
        return Planned(recovery._digested(replace(found.plan, program=order)), found.shares)

    monkeypatch.setattr(Worker, "plan_of", plan_of)
    caught(kills(SMALL), "made different plans")


def test_adopted_replica_with_buffers_of_another_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    adopt = replicas.adopted

    def adopted(worker: Worker, slots: Any, ownership: Ownership) -> None:
        adopt(worker, slots, ownership)
        for slot in slots:
            if ownership.owner(*slot) == worker.number:
                replica = worker.replicas[slot]
                replica.running = replica.buffers[(slot[0] + 1) % worker.case.pipelines]

    monkeypatch.setattr("tests.simulation.worker.adopted", adopted)
    caught(kills(GROWN), "buffers of slot .* differ")


def test_reduction_adds_in_the_order_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    add = actions.reduction

    def reduction(parts: list[Any], owners: tuple[int, ...]) -> Any:
        in_order = sorted(range(len(parts)), key=lambda place: owners[place])
        total = add([parts[place] for place in in_order], owners)[0]
        return total, *add(parts, owners)[1:]

    monkeypatch.setattr(actions, "reduction", reduction)
    caught(kills(GROWN), "clip factor of step . differs")


def test_commit_does_not_wait_for_shadows(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = commit.Ballot.__post_init__

    def owners_only(self: commit.Ballot) -> None:
        begun(self)
        self.missing = {one for one in self.missing if self.ownership.owner(*one[1]) == one[0]}

    monkeypatch.setattr(commit.Ballot, "__post_init__", owners_only)
    caught(troubled(300), "committed before worker . has voted|without its log|vote for step . while step")


def test_verdict_that_nobody_died_is_never_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership_rules, "nobody_died", lambda state, *words: state._replace(look=()))
    caught(troubled(300, ("link", "suspect")), "stuck while")


def test_heir_that_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = membership_verdicts.heirs

    def heirs(state: Any, dead: Any, hand_over: bool = False) -> Any:
        inherited = found(state, dead, hand_over)
        low = min(worker for worker in state.members if worker not in dead)
        owners = [low if owner in dead else heir for owner, heir in zip(state.owners, inherited.owners, strict=True)]
        return inherited._replace(owners=tuple(owners))

    monkeypatch.setattr(membership_verdicts, "heirs", heirs)
    caught(kills(replace(SMALL, stages=4)), "halted with 80")


def test_log_without_the_buffers_of_other_pipelines(monkeypatch: pytest.MonkeyPatch) -> None:
    add = actions.reduction

    def reduction(parts: list[Any], owners: tuple[int, ...]) -> Any:
        final, buffers, losses = add(parts, owners)
        return final, (buffers[0],) * len(buffers), losses

    monkeypatch.setattr(actions, "reduction", reduction)
    caught(kills(GROWN), "buffers of slot .* differ")


def test_send_that_the_program_forgot(monkeypatch: pytest.MonkeyPatch) -> None:
    built = plans.build_program

    def build(*words: Any) -> Any:
        whole = dict(built(*words))
        whole[0] = tuple(each for each in whole[0] if each != Action(0, Op.SEND_F, 1))
        return whole

    monkeypatch.setattr(plans, "build_program", build)
    with pytest.raises(Violation, match="nobody sends"):
        run(SMALL)
