"""Simulated histories of the membership protocol: 100,000 that keep every promise, and planted bugs that do not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.core.errors import ExitCode
from engine.core.exclusion import Cause, excluded
from engine.core.membership import events
from engine.core.membership import pending_effects as membership_orders
from engine.core.membership import protocol as membership
from engine.core.membership import state as membership_state
from engine.core.membership import transitions as membership_rules
from engine.core.membership import verdicts as membership_verdicts
from engine.core.membership.effects import Effect
from engine.core.membership.protocol import TABLE
from engine.core.membership.state import GATHERING, Phase, State
from engine.core.membership.transitions import Rule
from tests.core import membership_world
from tests.core.membership_histories import History, run

ROOT = Path(__file__).resolve().parents[2]
NUM_HISTORIES = 100_000
PARTS = 4
ENOUGH = 4_000  # histories in which a planted bug must show

Patch = pytest.MonkeyPatch


def replay(history: History) -> str:
    """Returns what to read when a history went wrong."""
    return f"{history.problem}\nreplay: python -m tests.core.membership_histories {history.seed}"


def declared() -> set[tuple[Phase, type, Phase]]:
    """Returns every change of phase that the table allows."""
    return {
        (phase, event, target)
        for (phase, event), rule in TABLE.items()
        if isinstance(rule, Rule)
        for target in rule.leads_to
        if target is not phase
    }


@pytest.mark.timeout(300)  # some 10 s of the processor
@pytest.mark.parametrize("part", range(PARTS))
def test_every_promise_is_kept_in_every_history(part: int) -> None:
    seen: set[tuple[Phase, type, Phase]] = set()
    for seed in range(part * NUM_HISTORIES // PARTS, (part + 1) * NUM_HISTORIES // PARTS):
        history = run(seed)
        assert not history.problem, replay(history)
        seen |= history.arrows
    assert seen <= declared()
    assert {(old, new) for old, _, new in seen} == {(old, new) for old, _, new in declared()}


def test_a_seed_is_a_history_whatever_the_order_of_sets() -> None:
    command = [sys.executable, "-m", "tests.core.membership_histories", "77"]
    for hash_seed in ("1", "2"):
        child = subprocess.run(
            command, cwd=ROOT, env={"PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, check=True
        )
        assert f"seed 77, trace {run(77).trace}: every promise was kept" in child.stdout
    assert len({run(seed).trace for seed in range(300)}) > 250


PLANTED: dict[str, tuple[Callable[[Patch], None], str]] = {}


def planted(symptom: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Registers a bug under the name of its function, with words of the problem that it must come to."""

    def register(bug: Callable[[Patch], None]) -> Callable[[Patch], None]:
        PLANTED[bug.__name__] = (bug, symptom)
        return bug

    return register


def patch_rule(patch: Patch, event: type[events.Event], decide: Callable[[State, Any], State]) -> None:
    """Plants a rule for an event wherever there is one that does something."""
    for (phase, kind), rule in list(TABLE.items()):
        if kind is event and isinstance(rule, Rule) and rule is not membership_rules.changes_nothing:
            patch.setitem(TABLE, (phase, kind), Rule(decide, rule.leads_to))


@planted("counts in epoch")
def answers_of_a_lower_epoch_count(patch: Patch) -> None:
    def step(state: State, event: Any) -> Any:
        if isinstance(event, (events.Answer, events.StepCommitted)) and event.epoch < state.epoch:
            event = replace(event, epoch=state.epoch)
        return membership.step(state, event)

    patch.setattr("tests.core.membership_world.step", step)


@planted("was suspected, but nothing was done to it")
def a_suspicion_is_a_verdict(patch: Patch) -> None:
    def decide(state: State, event: events.Suspicion) -> State:
        blamed = event.worker if event.peer not in state.members else event.peer
        return membership_verdicts.new_epoch(state, event.now_ns, [excluded(blamed, Cause.GIVEN_UP, "was suspected")])

    patch_rule(patch, events.Suspicion, decide)


@planted("two different PublishEpoch")
def a_verdict_makes_no_epoch(patch: Patch) -> None:
    real = membership_verdicts.new_epoch
    patch.setattr(
        membership_rules, "new_epoch", lambda state, *rest: real(state, *rest)._replace(epoch=max(state.epoch, 1))
    )


@planted("two different PublishEpoch")
def a_hand_over_makes_no_epoch(patch: Patch) -> None:
    def decide(state: State, event: events.StepCommitted) -> State:
        new = membership_rules.commits.decide(state, event)
        return new._replace(epoch=state.epoch) if new.phase is Phase.RECONFIGURING else new

    patch_rule(patch, events.StepCommitted, decide)


@planted("owns what it does not hold")
def slots_stay_with_the_dead(patch: Patch) -> None:
    real = membership_verdicts.heirs
    patch.setattr(
        membership_verdicts,
        "heirs",
        lambda state, *rest, **more: real(state, *rest, **more)._replace(owners=state.owners, lost=()),
    )


@planted("owns what it does not hold")
def slots_go_to_whoever_comes_next(patch: Patch) -> None:
    real = membership_verdicts.heirs

    def heirs(state: State, dead: Any, hand_over: bool = False) -> Any:
        found = real(state, dead, hand_over)
        live = [worker for worker in state.members if worker not in dead] or [0]
        owners = tuple(live[-1] if owner in dead else owner for owner in state.owners)
        return found._replace(owners=owners, lost=())

    patch.setattr(membership_verdicts, "heirs", heirs)


@planted("but nothing was done to it")
def orders_are_told_once(patch: Patch) -> None:
    patch.setattr("engine.core.membership.protocol._is_quiet", lambda state, now_ns: False)


@planted("stuck while failing over")
def nobody_is_waited_for_in_vain(patch: Patch) -> None:
    patch.setattr(membership_rules, "unresponsive", lambda state, now_ns: ())
    patch.setattr(membership_rules, "_owed", lambda state: (10**9, [], ""))


@planted("hangs for")
def a_waiting_worker_hangs(patch: Patch) -> None:
    patch.setattr(membership_state.Sighting, "is_inside", True)


@planted("has been silent")
def a_coordinator_that_slept_judges(patch: Patch) -> None:
    patch.setattr(membership_rules, "ticked", lambda state, now_ns: state._replace(ticked_ns=now_ns))


@planted("has ended and stays a member")
def exit_code_0_is_no_death(patch: Patch) -> None:
    def decide(state: State, event: events.ExitSeen) -> State:
        return state if event.code == 0 else membership_rules.ends.decide(state, event)

    patch_rule(patch, events.ExitSeen, decide)


@planted("has not made the plan")
def training_starts_with_the_first_plan(patch: Patch) -> None:
    def decide(state: State, event: events.PlanAcknowledged) -> State:
        new = membership_rules.agrees.decide(state, event)
        return new._replace(phase=Phase.RUNNING) if new.digests and new.committed < new.last_step else new

    patch_rule(patch, events.PlanAcknowledged, decide)


@planted("two different PublishPlanInput")
def the_plan_is_made_from_some_inventories(patch: Patch) -> None:
    real = membership_orders._gathering
    patch.setattr(
        membership_orders,
        "_gathering",
        lambda state: real(state._replace(members=state.members[: max(1, len(state.inventories))])),
    )


@planted("is committed after step")
def a_frozen_worker_commits(patch: Patch) -> None:
    def step(state: State, event: Any) -> Any:
        if isinstance(event, events.StepCommitted) and state.phase in GATHERING:
            event = replace(event, epoch=state.epoch)
        return membership.step(state, event)

    patch.setattr("tests.core.membership_world.step", step)
    frozen: tuple[Phase, type[events.Event]] = (Phase.FAILING_OVER, events.StepCommitted)
    patch.setitem(TABLE, frozen, membership_rules.commits)


@planted("is committed after step")
def a_step_is_committed_twice(patch: Patch) -> None:
    def decide(state: State, event: events.StepCommitted) -> State:
        return membership_rules.commits.decide(state._replace(committed=event.step - 1), event)

    patch_rule(patch, events.StepCommitted, decide)


@planted("has left, but nothing was done to it")
def a_leaver_goes_at_once(patch: Patch) -> None:
    def decide(state: State, event: events.Notice) -> State:
        return membership_verdicts.new_epoch(state, event.now_ns, [excluded(event.worker or 0, Cause.LEFT, "has left")])

    patch_rule(patch, events.Notice, decide)


@planted("has left after step")
def a_leaver_goes_before_the_heal(patch: Patch) -> None:
    patch.setattr(membership_verdicts, "_is_needed", lambda state, worker: worker in state.owners)


@planted("stuck while")
def a_broken_pair_is_kept_for_ever(patch: Patch) -> None:
    real = membership_verdicts.nobody_died
    patch.setattr(membership_rules, "nobody_died", lambda state, *rest: real(state._replace(repeats={}), *rest))


@planted("is given up")
def a_broken_pair_is_not_repeated(patch: Patch) -> None:
    real = membership_verdicts.nobody_died
    patch.setattr(
        membership_rules,
        "nobody_died",
        lambda state, now_ns, suspects, symptom: real(state._replace(repeats={symptom: 99}), now_ns, suspects, symptom),
    )


@planted("not done")
def the_first_who_is_done_ends_the_job(patch: Patch) -> None:
    patch_rule(patch, events.Done, lambda state, event: state._replace(phase=Phase.FINISHED))


@planted("when every step was committed")
def the_end_must_be_whole(patch: Patch) -> None:
    patch.setattr(membership_verdicts, "cannot_go_on", membership_verdicts.halted)


@planted("finished after step")
def whoever_is_past_help_has_finished(patch: Patch) -> None:
    def cannot_go_on(state: State, exit_code: ExitCode, reason: str) -> State:
        return state._replace(phase=Phase.FINISHED, reason=reason)

    patch.setattr(membership_verdicts, "cannot_go_on", cannot_go_on)


@planted("forgets step")
def another_coordinator_forgets_the_commits(patch: Patch) -> None:
    patch.setattr(
        "tests.core.membership_world.resume",
        lambda text, now_ns: membership_state.resume(text, now_ns)._replace(committed=-1),
    )


@planted("two different PublishEpoch")
def another_coordinator_begins_no_epoch(patch: Patch) -> None:
    """Its predecessor may have told the epoch that it makes of other answers."""
    patch_rule(patch, events.TakenOver, lambda state, event: state._replace(inventories={}, digests={}, verdict=()))


@planted("had finished and left, but nothing was done to it")
def another_coordinator_forgets_the_verdicts(patch: Patch) -> None:
    def resume(text: str, now_ns: int) -> State:
        state = membership_state.resume(text, now_ns)
        return state._replace(members=tuple(sorted(set(state.members) | set(state.out))))

    patch.setattr("tests.core.membership_world.resume", resume)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_shows(name: str, monkeypatch: Patch) -> None:
    plant, symptom = PLANTED[name]
    plant(monkeypatch)
    assert any(symptom in run(seed).problem for seed in range(ENOUGH))


def test_no_state_comes_back(monkeypatch: Patch) -> None:
    """The coordinator writes by compare-and-swap: a write that arrives late finds another state than its own."""
    written: list[str] = []
    step = membership.step

    def noting(state: State, event: events.Event) -> tuple[State, tuple[Effect, ...]]:
        new, found = step(state, event)
        if new.decided() != state.decided():
            written.append(membership_state.to_json(new))
        return new, found

    monkeypatch.setattr(membership_world, "step", noting)
    for seed in range(300):
        written.clear()
        run(seed)
        assert written and len(set(written)) == len(written), seed
