"""Planted bugs in the shipped machines of worker and coordinator: the simulation must notice each, for its reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from engine.codec.documents import resume
from engine.core.errors import required
from engine.core.messages import CommitMessage, EpochMessage
from engine.core.program import ballot as commit
from engine.core.program import plan_parts
from engine.core.program import planner as recovery
from engine.core.program.ballot import VoteMessage
from engine.core.program.inventory import PlanMessage
from engine.core.protocol import coordinator as hearing
from engine.core.protocol import coordinator as machine
from engine.core.protocol import membership as protocol
from engine.core.protocol import orders, plan_orders, worker_machine
from engine.core.protocol import transitions as membership_rules
from engine.core.protocol import verdicts as membership_verdicts
from engine.core.protocol import worker_machine as recovery_rules
from engine.core.protocol import worker_state as outputs
from engine.core.protocol.events import Takeover, WorkerWord
from engine.core.protocol.worker_inputs import Inbox
from engine.core.protocol.worker_state import Mode
from tests.simulation import coordinator, plans, replica
from tests.simulation import worker as driver
from tests.simulation.case import MOVE, Case, Fault
from tests.simulation.compiled import ACTIVATION, LOGGED, REDUCED, STREAMED, key_of, parts_of
from tests.simulation.executor import Executor
from tests.simulation.links import MS
from tests.simulation.planting import SMALL, all_well, caught, kills, troubled
from tests.simulation.run import run
from tests.simulation.schedules import hand_overs, startup_deaths, take_overs
from tests.simulation.worker import Worker
from tests.simulation.world import World, first_state

Patch = pytest.MonkeyPatch
KILLED = replace(SMALL, faults=(Fault(1, "moment", 30),))
LEAVING = replace(SMALL, steps=4, faults=(Fault(0, "moment", 8, "notice", 60_000_000),))
STREAMED_CASE = Case(stages=3, microbatches=4, log_every=1)


@pytest.fixture(autouse=True)
def _fresh_answers() -> Iterator[None]:
    plans.forget()
    first_state.cache_clear()
    yield
    plans.forget()
    first_state.cache_clear()


def rule_of_worker(patch: Patch, modes: Any, kind: Any, rule: Any) -> None:
    """Plants a rule of the worker machine."""
    for mode in modes:
        patch.setitem(worker_machine.TABLE, (mode, kind), rule)


def slow(cases: Iterator[Case]) -> Iterator[Case]:
    """Yields cases with slow messages."""
    return (replace(case, spread=10, seed=seed) for seed, case in enumerate(cases))


# The worker


def test_what_was_sent_is_not_retained(monkeypatch: Patch) -> None:
    made = Worker.__init__

    def forgetful(self: Worker, *words: Any) -> None:
        made(self, *words)
        self.retains = False

    monkeypatch.setattr(Worker, "__init__", forgetful)
    caught(kills(SMALL), "no longer holds")


def test_words_of_another_epoch_are_obeyed(monkeypatch: Patch) -> None:
    """An epoch does not drop the messages in front of it, and a plan is made in whichever epoch it comes."""

    def arrived(inbox: Inbox, message: Any) -> Inbox:
        if isinstance(message, EpochMessage) and message.epoch > inbox.epoch:
            return Inbox((message, *inbox.waiting), message.epoch)
        return Inbox((*inbox.waiting, message), inbox.epoch)

    monkeypatch.setattr(driver, "arrived", arrived)
    rule_of_worker(monkeypatch, [Mode.FROZEN], PlanMessage, lambda state, told: (state, (outputs.MakePlan(told),)))
    caught(troubled(2000), "different plan|GoMessage at worker|has not made the plan|did not make the plan")


def test_part_of_a_plan_is_a_difference_to_another_base(monkeypatch: Patch) -> None:
    """Workers take the grid of an earlier epoch for the base: they notice, and get the whole plan."""
    right = plan_parts.document_of
    followed = list[bool]()

    def stale(part: Any, known: Any, *words: Any) -> Any:
        document = right(part, (replace(known[0], epoch=part.change.base),), *words)
        followed.append(document is not None)
        return document

    monkeypatch.setattr(recovery_rules, "document_of", stale)
    again = (
        replace(case, stages=4, steps=3, faults=(*case.faults, Fault(worker, "moment", at)), seed=at)
        for case in kills(SMALL)
        for worker in (0, 2)
        for at in (60, 75)
    )
    all_well(islice(again, 40))
    assert {*followed} == {True, False}


def test_zombie_is_listened_to_by_its_peers(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Worker, "accepts", lambda self, group: True)
    caught(troubled(2000), "took what group")


def test_commit_is_accepted_after_the_inventory(monkeypatch: Patch) -> None:
    def arrived(inbox: Inbox, message: Any) -> Inbox:
        if isinstance(message, EpochMessage) and message.epoch > inbox.epoch:
            commits = tuple(each for each in inbox.waiting if isinstance(each, CommitMessage))
            return Inbox((message, *commits), message.epoch)
        return Inbox((*inbox.waiting, message), inbox.epoch)

    def takes(state: Any, told: CommitMessage) -> Any:
        return (state, (outputs.TakeStep(told),)) if told.step == state.step else (state, ())

    monkeypatch.setattr(driver, "arrived", arrived)
    rule_of_worker(monkeypatch, [Mode.FROZEN], CommitMessage, takes)
    caught(
        troubled(2000), "has changed after its inventory|StepTaken at|another inventory|a plan is made|commit of step"
    )


def test_inventory_claims_what_is_not_held(monkeypatch: Patch) -> None:
    told = replica.inventory_of

    def boast(worker: Executor, *, offers: bool = False) -> str:
        if worker.number:
            return told(worker)
        values = worker.values
        made = [key_of(kind, 0, stage, each) for kind in (0, 1) for stage in range(3) for each in range(2)]
        worker.values = {**dict.fromkeys(made, 0), **values}
        text = told(worker)
        worker.values = values
        return text

    monkeypatch.setattr(driver, "inventory_of", boast)
    caught(kills(SMALL), "lacks")


def test_catch_up_is_skipped(monkeypatch: Patch) -> None:
    follows = recovery_rules._follows

    def skips(state: Any, told: CommitMessage | None, before: Any) -> Any:
        return follows(state, None, before)

    monkeypatch.setattr(recovery_rules, "_follows", skips)
    skewed = (
        replace(case, faults=(Fault(worker, "stepped", 2),), seed=case.seed, spread=10)
        for case in troubled(300)
        for worker in range(2)
    )
    caught(skewed, "no whole replica|cannot adopt|differ|commit of step|after . have been counted|no worker moved")


def test_plan_follows_the_order_of_a_set(monkeypatch: Patch) -> None:
    made = Worker.plan_made

    def plan_made(self: Worker, told: PlanMessage) -> None:
        right = plans.planned

        def turned(grid: Any, schedule: str, told: PlanMessage) -> Any:
            found = right(grid, schedule, told)
            order = dict(sorted(found.plan.plan.program.items(), reverse=self.number == 1))
            digested = recovery._digested(replace(found.plan.plan, program=order))
            return found._replace(plan=found.plan._replace(plan=digested))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(driver, "planned", turned)
            made(self, told)

    monkeypatch.setattr(Worker, "plan_made", plan_made)
    caught(kills(SMALL), "made different plans")


def test_epoch_is_skipped(monkeypatch: Patch) -> None:
    """A worker waits for the epoch after its own, and does not obey one that comes in its place."""
    enters = recovery_rules.enters

    def one_by_one(state: Any, epoch: EpochMessage) -> Any:
        return enters(state, epoch) if epoch.epoch == state.epoch + 1 else (state, ())

    rule_of_worker(monkeypatch, list(Mode)[1:-1], EpochMessage, one_by_one)
    caught(troubled(2000), "did not report its inventory|stuck|is in group")


def test_plan_is_accepted_while_running(monkeypatch: Patch) -> None:
    """An epoch does not freeze its worker: it counts, and goes on."""
    enters = recovery_rules.enters

    def runs_on(state: Any, epoch: EpochMessage) -> Any:
        new, found = enters(state, epoch)
        return (new._replace(mode=Mode.RUNNING), found) if new.mode is Mode.FROZEN else (new, found)

    rule_of_worker(monkeypatch, [Mode.RUNNING], EpochMessage, runs_on)
    caught(kills(SMALL), "Counted at worker . while running|PlanMessage at worker . while running")


def test_group_of_an_older_epoch_is_taken_for_the_new_one(monkeypatch: Patch) -> None:
    goes = recovery_rules._goes_now
    monkeypatch.setattr(recovery_rules, "_goes_now", lambda state: goes(state._replace(forming=0)))
    caught(slow(kills(SMALL)), "before its group is formed")


def test_prepared_plan_is_made_from_another_inventory(monkeypatch: Patch) -> None:
    held = orders.held_at_boundary

    def less(*words: Any) -> Any:
        found = held(*words)
        return replace(found, whole=found.whole[:1]) if found.worker == 1 else found

    monkeypatch.setattr(orders, "held_at_boundary", less)
    caught([LEAVING], "another inventory than in epoch|lost")


def test_member_skips_the_first_action_of_a_prepared_step(monkeypatch: Patch) -> None:
    right = plan_orders.repair_at_boundary

    def stale(source: Any) -> Any:
        repair = required(right(source), "no stage is lost")
        *others, last = repair.rests
        return replace(repair, rests=(*others, replace(last, first=1)))

    monkeypatch.setattr(plan_orders, "repair_at_boundary", stale)
    monkeypatch.setattr(plans, "repair_at_boundary", stale)
    caught([LEAVING], "the plan is wrong|the plan computes|the order of what is held")


def test_member_is_not_told_of_the_wanted_owners_in_its_part_of_a_plan(monkeypatch: Patch) -> None:
    right = plan_parts.document_of

    def forgetful(part: Any, known: Any, worker: int, grid: Any) -> Any:
        return right(replace(part, wanted=()) if worker == 1 else part, known, worker, grid)

    monkeypatch.setattr(recovery_rules, "document_of", forgetful)
    moved = (Fault(0, "moment", 8, MOVE, length) for length in range(1, 30))
    caught((replace(SMALL, steps=4, faults=(fault,)) for fault in moved), "different plans|has prepared")


def test_heal_of_a_leaving_worker(monkeypatch: Patch) -> None:
    """The workers forget which members leave, and the coordinator does not: they add other shadows."""
    next_step = Worker.plan_next_step

    def forgetful(self: Worker, output: Any) -> None:
        next_step(self, replace(output, leaving=()))

    monkeypatch.setitem(driver._DO, outputs.PlanNextStep, forgetful)
    caught(hand_overs(replace(SMALL, steps=4), 29), "has no replica of|stuck|has no whole|clock had to rule")


# Messages between workers


def test_message_aside_is_taken_for_one_in_order(monkeypatch: Patch) -> None:
    def slot_of(self: Executor, key: int) -> int:
        kind, pipeline, stage, index = parts_of(key)
        return key_of(LOGGED, pipeline, stage) if kind == STREAMED and index else key

    monkeypatch.setattr(Executor, "slot_of", slot_of)
    caught(kills(STREAMED_CASE), "took .* for |no worker moved")


def test_untagged_swap(monkeypatch: Patch) -> None:
    """Two sends of equal size change places, and each receive takes what comes."""

    def slot_of(self: Executor, key: int) -> int:
        kind, pipeline, stage, index = parts_of(key)
        return key_of(kind, pipeline, stage, 1 - index) if kind == ACTIVATION and index < 2 else key

    monkeypatch.setattr(Executor, "slot_of", slot_of)
    caught([SMALL], "took .* for ")


def test_gradient_of_a_tie_is_taken_for_a_log(monkeypatch: Patch) -> None:
    def slot_of(self: Executor, key: int) -> int:
        kind, pipeline, stage, _ = parts_of(key)
        return key_of(REDUCED, pipeline, stage) if kind == LOGGED else key

    monkeypatch.setattr(Executor, "slot_of", slot_of)
    caught([replace(SMALL, ties=((0, 2),))], "stuck|clock had to rule|took .* for ")


# The coordinator


def test_vote_of_a_worker_that_is_out_counts(monkeypatch: Patch) -> None:
    hears = machine._hears
    add = commit.Ballot.add

    def deaf(state: Any, heard: Any) -> Any:
        if isinstance(heard.message, VoteMessage):
            return hearing.RULES[VoteMessage](state, heard, heard.message)
        return hears(state, heard)

    monkeypatch.setitem(machine._TABLE, WorkerWord, deaf)
    monkeypatch.setattr(
        commit.Ballot, "add", lambda self, worker, vote: add(self, worker, replace(vote, epoch=self.epoch))
    )
    say = World.say

    def late(self: World, number: int, message: Any) -> None:
        """Sends the votes of worker 0 so late that it may be out by then."""
        if number == 0 and isinstance(message, VoteMessage):
            self.push(30 * MS, say, self, number, message)
        else:
            say(self, number, message)

    monkeypatch.setattr(World, "say", late)
    zombies = [Fault(0, "COMMIT", at, "zombie", 60_000) for at in range(1, 5)]
    cases = (Case(3, 2, seed=seed, spread=3, faults=(zombies[seed % 4],)) for seed in range(20))
    caught(cases, "a vote of worker . in epoch . counts in epoch|has no replica of|vote for step")


def test_vote_of_an_old_epoch_counts(monkeypatch: Patch) -> None:
    """The ballot stays open while the workers gather."""
    publish = orders._publish_epoch
    add = commit.Ballot.add

    def keeps(state: Any) -> Any:
        new, found = publish(state)
        return new._replace(ballot=state.ballot), found

    monkeypatch.setattr(orders, "_publish_epoch", keeps)
    monkeypatch.setattr(
        commit.Ballot, "add", lambda self, worker, vote: add(self, worker, replace(vote, epoch=self.epoch))
    )
    caught(slow(kills(SMALL)), "a vote of worker . in epoch . counts in epoch")


def test_commit_does_not_wait_for_shadows(monkeypatch: Patch) -> None:
    def owners_only(ownership: Any) -> Any:
        return frozenset((ownership.owner(*slot), slot) for slot in ownership.grid.slots())

    monkeypatch.setattr(commit, "_voters", owners_only)
    caught(troubled(300), "without worker .'s vote")


def test_verdict_that_nobody_died_is_never_given(monkeypatch: Patch) -> None:
    monkeypatch.setattr(membership_rules, "nobody_died", lambda state, *words: state._replace(look=()))
    caught(troubled(300, ("link", "suspect")), "stuck while")


def test_heir_that_holds_nothing(monkeypatch: Patch) -> None:
    found = membership_verdicts.heirs

    def heirs(state: Any, dead: Any, hand_over: bool = False) -> Any:
        inherited = found(state, dead, hand_over)
        low = min(worker for worker in state.members if worker not in dead)
        owners = [low if owner in dead else heir for owner, heir in zip(state.owners, inherited.owners, strict=True)]
        return inherited._replace(owners=tuple(owners))

    monkeypatch.setattr(membership_verdicts, "heirs", heirs)
    caught(kills(replace(SMALL, stages=4)), "halted with 80")


def test_a_healed_replica_counts_for_nothing_before_a_commit(monkeypatch: Patch) -> None:
    """The protocol knows only the shadows of the last commit, and calls a stage with a live copy lost."""
    monkeypatch.setattr(
        membership_rules,
        "all_inventoried",
        lambda state: membership_verdicts.all_inventoried(state._replace(copies={})),
    )
    faults = (Fault(1, "moment", 33), Fault(2, "COMMIT", 3))
    caught((replace(SMALL, seed=seed, spread=3, faults=faults) for seed in range(40)), r"lost \(\(\) indeed\)")


def test_ballot_is_lost_at_a_take_over(monkeypatch: Patch) -> None:
    """The next coordinator goes on in the same epoch, in which no worker votes again."""
    table: dict[Any, Any] = protocol.TABLE
    for cell in [cell for cell in table if cell[1] is Takeover]:
        monkeypatch.setitem(table, cell, membership_rules.changes_nothing)
    caught(take_overs(SMALL, 3), "clock had to rule|stuck")


def test_commit_is_lost_at_a_take_over(monkeypatch: Patch) -> None:
    monkeypatch.setattr(coordinator, "resume", lambda *words: resume(*words)._replace(commit=None, told=None))
    caught(take_overs(SMALL), "is committed|in step|no commit|the votes decide")


def test_commit_is_told_before_it_is_written(monkeypatch: Patch) -> None:
    kept = machine.is_to_be_kept
    monkeypatch.setattr(
        coordinator,
        "is_to_be_kept",
        lambda old, new, *words: new.commit is old.commit and kept(old, new, *words),
    )
    caught(take_overs(SMALL), "which is not committed|finished after")


def test_verdict_is_told_before_it_is_written(monkeypatch: Patch) -> None:
    """Two coordinators make two different epochs with one number."""
    kept = machine.is_to_be_kept
    monkeypatch.setattr(
        coordinator,
        "is_to_be_kept",
        lambda old, new, *words: old.membership.epoch in (0, new.membership.epoch) and kept(old, new, *words),
    )
    caught(take_overs(KILLED), "two different epochs")


def test_replaced_coordinator_writes(monkeypatch: Patch) -> None:
    def write(self: coordinator.Coordinator, new: Any, given: Any, found: Any) -> None:
        self.world.written = self.kept
        written(self, new, given, found)

    written = coordinator.Coordinator._write
    monkeypatch.setattr(coordinator.Coordinator, "_write", write)
    caught(take_overs(KILLED), "is committed after|stuck|clock had to rule|which is not|two different epochs")


def test_commit_is_told_twice(monkeypatch: Patch) -> None:
    """An order that is repeated is told again, and opens the ballot of the step after it."""
    send = orders._send_commit
    monkeypatch.setattr(orders, "_send_commit", lambda state: send(state._replace(told=None)))
    caught(troubled(2000, ("pause", "link", "suspect")), "vote for step|stuck|clock had to rule|is committed, and")


def test_witness_is_evicted(monkeypatch: Patch) -> None:
    """A worker that is no end of the broken link is given up."""
    died = membership_verdicts.nobody_died

    def nobody_died(state: Any, now_ns: int, suspects: Any, symptom: str) -> Any:
        return died(state, now_ns, tuple(set(state.members) - {*suspects}) or suspects, symptom)

    monkeypatch.setattr(membership_rules, "nobody_died", nobody_died)
    cut = (Case(stages=4, microbatches=2, faults=(Fault(0, "moment", at, "link", 60_000_000),)) for at in range(9, 30))
    caught(cut, "is given up: .* but nothing was done to it")


def test_startup_death_is_not_retried(monkeypatch: Patch) -> None:
    monkeypatch.setattr("tests.simulation.world.MOST_RESTARTS", 0)
    caught(startup_deaths(SMALL), "over while")


def test_answer_to_an_older_preparation_counts(monkeypatch: Patch) -> None:
    answered = orders.answered

    def any_number(state: Any, worker: int, told: Any) -> Any:
        epoch = told.epoch if state.document is None else state.document.epoch
        return answered(state, worker, replace(told, epoch=epoch, number=state.number))

    monkeypatch.setattr(hearing, "answered", any_number)
    two = (Fault(0, "moment", 8, "notice", 60_000_000), Fault(1, "moment", 20, "notice", 60_000_000))
    leaving = Case(stages=4, microbatches=4, steps=4, faults=two)
    caught(
        (replace(leaving, seed=seed, spread=10) for seed in range(400)),
        "different plans|has prepared|the clock had to rule",
    )


def test_hand_over_that_not_all_have_prepared(monkeypatch: Patch) -> None:
    at_commit = orders.at_commit

    def hasty(state: Any, *words: Any) -> Any:
        digests = dict.fromkeys(range(3), next(iter(state.digests.values()), None)) if state.digests else {}
        return at_commit(state._replace(digests=digests), *words)

    monkeypatch.setattr(hearing, "at_commit", hasty)
    caught((replace(LEAVING, seed=seed, spread=10) for seed in range(200)), "has prepared None")


def test_cases_pass_where_nothing_is_planted() -> None:
    cases = [*take_overs(KILLED, 5), *startup_deaths(SMALL), LEAVING, *hand_overs(replace(SMALL, steps=4), 29)]
    for case in cases:
        assert run(case).problem == "", case.text()


# Checkpoints


def test_a_share_of_a_dead_worker_is_written_by_no_other(monkeypatch: Patch) -> None:
    monkeypatch.setattr(recovery_rules, "keeps", lambda state, before: (state, before))
    caught((replace(SMALL, faults=(Fault(each, "stepped", SMALL.steps),)) for each in range(3)), "is not kept")


def test_a_step_is_taken_before_it_is_copied(monkeypatch: Patch) -> None:
    kept = Worker.keep

    def late(self: Worker, output: outputs.Keep) -> None:
        def keep() -> None:
            kept(self, output)

        self.world.push(30_000_000, keep)

    monkeypatch.setitem(driver._DO, outputs.Keep, late)
    caught([replace(SMALL, keep_every=1)], "which it does not hold")


def test_the_next_coordinator_forgets_that_a_commit_is_kept(monkeypatch: Patch) -> None:
    monkeypatch.setattr(coordinator, "resume", lambda *words: resume(*words)._replace(kept=-1))
    monkeypatch.setattr(orders, "_go", lambda of, go=orders._go: replace(go(of), keep=False))
    caught((replace(SMALL, deaths=(at,)) for at in range(1, 60)), "is not kept")


def test_a_worker_is_done_before_its_share_is_on_disk(monkeypatch: Patch) -> None:
    monkeypatch.setitem(driver._DO, outputs.ReportDone, lambda worker, output: worker.reports())
    caught(troubled(60), "is not kept")
