"""Planted bugs in the protocol and in messages of workers: the simulation must notice each, for its reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from engine.core.membership import transitions as membership_rules
from engine.core.membership import verdicts as membership_verdicts
from engine.core.ownership import Ownership
from engine.core.recovery import ballot as commit
from engine.core.recovery import planner as recovery
from tests.simulation import plans
from tests.simulation.agent import Agent
from tests.simulation.case import Fault
from tests.simulation.compiled import key_of
from tests.simulation.plans import Document, Planned
from tests.simulation.planting import SMALL, caught, kills, troubled
from tests.simulation.worker import Worker


@pytest.fixture(autouse=True)
def _fresh_answers() -> Iterator[None]:
    plans.forget()
    yield
    plans.forget()


def test_what_was_sent_is_not_retained(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Worker.__init__

    def forgetful(self: Worker, *words: Any) -> None:
        made(self, *words)
        self.retains = False

    monkeypatch.setattr(Worker, "__init__", forgetful)
    caught(kills(SMALL), "no longer holds")


def test_words_of_another_epoch_are_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "fits", lambda self, epoch: True)
    caught(troubled(2000), "makes a plan of epoch . in epoch")


def test_zombie_is_listened_to_by_its_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "accepts", lambda self, epoch: True)
    caught(troubled(2000), "took what epoch")


def test_zombie_votes(monkeypatch: pytest.MonkeyPatch) -> None:
    add = commit.Ballot.add
    monkeypatch.setattr(Agent, "counts", lambda self, epoch, worker: True)
    monkeypatch.setattr(
        commit.Ballot, "add", lambda self, worker, vote: add(self, worker, replace(vote, epoch=self.epoch))
    )
    caught(troubled(2000), "a vote of epoch . counts in epoch")


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
        order = dict(sorted(found.plan.program.items(), reverse=self.number == 1))
        return Planned(recovery._digested(replace(found.plan, program=order)), found.shares)

    monkeypatch.setattr(Worker, "plan_of", plan_of)
    caught(kills(SMALL), "made different plans")


def test_commit_does_not_wait_for_shadows(monkeypatch: pytest.MonkeyPatch) -> None:
    def owners_only(ownership: Ownership) -> frozenset[commit.Voter]:
        return frozenset((ownership.owner(*slot), slot) for slot in ownership.grid.slots())

    monkeypatch.setattr(commit, "_voters", owners_only)
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


def test_a_healed_replica_counts_for_nothing_before_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The protocol knows only the shadows of the last commit, and calls a stage with a live copy lost."""
    monkeypatch.setattr(
        membership_rules,
        "all_inventoried",
        lambda state: membership_verdicts.all_inventoried(state._replace(copies={})),
    )
    faults = (Fault(1, "moment", 30), Fault(2, "COMMIT", 3))
    caught((replace(SMALL, seed=seed, spread=3, faults=faults) for seed in range(40)), r"lost \(\(\) indeed\)")
