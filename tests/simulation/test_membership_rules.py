"""Planted bugs in the rules of membership: the simulation must notice each, for its reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from engine.codec import documents
from engine.core import messages
from engine.core.errors import ExitCode
from engine.core.exclusion import Cause, excluded
from engine.core.message_kinds import Message
from engine.core.program.inventory import PlannedMessage
from engine.core.protocol import events, failure_detector, orders, transitions, verdicts
from engine.core.protocol import membership as protocol
from engine.core.protocol import worker_machine as machine
from engine.core.protocol.state import Phase, Rule, State
from engine.core.protocol.worker_machine import Stepped
from engine.core.protocol.worker_state import WorkerState
from tests.core.membership_cases import kind_of
from tests.simulation.case import FOR_EVER_US, HEALS_IN_TIME_US, Case, Fault
from tests.simulation.planting import SMALL, Bug, caught, kills, troubled
from tests.simulation.run import run
from tests.simulation.schedules import leavings, moving_case, random_case, take_overs

Patch = pytest.MonkeyPatch
PLANTED: dict[str, tuple[Bug, Callable[[], Iterator[Case]], str]] = {}
KILLED = replace(SMALL, faults=(Fault(1, "moment", 30),))


def planted(cases: Callable[[], Iterator[Case]], words: str) -> Callable[[Bug], Bug]:
    """Registers a bug under the name of its function, with cases that reach it and words of the problem."""

    def register(bug: Bug) -> Bug:
        PLANTED[bug.__name__] = (bug, cases, words)
        return bug

    return register


def patch_rule(patch: Patch, event: type[events.Event | Message], decide: Callable[[State, Any], State]) -> None:
    """Plants a rule for an event wherever there is one that does something."""
    for (phase, kind), rule in list(protocol.TABLE.items()):
        if kind is event and isinstance(rule, Rule) and rule is not transitions.changes_nothing:
            patch.setitem(protocol.TABLE, (phase, kind), Rule(decide, rule.leads_to))


def killed() -> Iterator[Case]:
    return kills(SMALL)


def suspected() -> Iterator[Case]:
    return troubled(300, ("suspect",))


def left() -> Iterator[Case]:
    return leavings(600)


def struck(kind: str, length: int = 0, case: Case = SMALL) -> Callable[[], Iterator[Case]]:
    """Returns cases with a fault of some length at moments of the first step."""
    return lambda: (replace(case, faults=(Fault(1, "moment", at, kind, length),)) for at in range(8, 40, 3))


def taken() -> Iterator[Case]:
    return take_overs(KILLED)


@planted(suspected, "was suspected, but nothing was done to it")
def a_suspicion_is_a_verdict(patch: Patch) -> None:
    def decide(state: State, event: events.WorkerWord[messages.SuspicionMessage]) -> State:
        peer = event.message.peer
        blamed = event.worker if peer not in state.members else peer
        return verdicts.new_epoch(state, event.now_ns, [excluded(blamed, Cause.GIVEN_UP, "was suspected")])

    patch_rule(patch, messages.SuspicionMessage, decide)


@planted(killed, "changed without an epoch")
def a_verdict_makes_no_epoch(patch: Patch) -> None:
    real = verdicts.new_epoch
    patch.setattr(transitions, "new_epoch", lambda state, *rest: real(state, *rest)._replace(epoch=state.epoch))


def moving() -> Iterator[Case]:
    return map(moving_case, range(600))


@planted(moving, "in an open step|stands twice")
def a_slot_moves_in_an_open_step(patch: Patch) -> None:
    real = verdicts.heirs
    patch.setattr(verdicts, "heirs", lambda state, dead, hand_over=False: real(state, dead, True))


@planted(moving, "without a whole replica|no whole replica|cannot adopt")
def a_half_healed_replica_inherits(patch: Patch) -> None:
    real = verdicts.handed_over

    def hasty(state: State, now_ns: int, joins: tuple[int, ...] = ()) -> State:
        wanted = state.wanted_moves
        lines = [
            (*line, *({wanted[slot]} - {*line} if slot in wanted else ())) for slot, line in enumerate(state.shadows)
        ]
        return real(state._replace(shadows=tuple(lines)), now_ns, joins)

    patch.setattr(transitions, "handed_over", hasty)


@planted(moving, "stuck|clock had to rule|has no replica of|is not ready")
def workers_do_not_know_the_wanted_owners(patch: Patch) -> None:
    real = machine._follows

    def deaf(state: WorkerState, *rest: Any) -> Stepped:
        new, outputs = real(state, *rest)
        return new._replace(wanted=()), outputs

    patch.setattr(machine, "_follows", deaf)


@planted(left, "did not report its inventory")
def a_hand_over_makes_no_epoch(patch: Patch) -> None:
    def decide(state: State, event: events.StepCommitted) -> State:
        new = transitions.commits.decide(state, event)
        return new._replace(epoch=state.epoch) if new.phase is Phase.RECONFIGURING else new

    patch_rule(patch, events.StepCommitted, decide)


@planted(killed, "own or shadow a slot, and there is no inventory")
def slots_stay_with_the_dead(patch: Patch) -> None:
    real = verdicts.heirs
    patch.setattr(
        verdicts,
        "heirs",
        lambda state, *rest, **more: real(state, *rest, **more)._replace(owners=state.owners, lost=()),
    )


@planted(struck("pause", FOR_EVER_US), "stuck while")
def no_worker_is_waited_for_in_vain(patch: Patch) -> None:
    patch.setattr(transitions, "unresponsive", lambda state, now_ns: ())
    patch.setattr(transitions, "_owed", lambda state: (10**18, [], ""))


@planted(killed, "the clock had to rule")
def exit_code_0_is_no_death(patch: Patch) -> None:
    def decide(state: State, event: events.ExitSeen) -> State:
        return state if event.code == 0 else transitions.ends.decide(state, event)

    patch_rule(patch, events.ExitSeen, decide)


@planted(lambda: troubled(300), "has not made the plan")
def training_starts_with_the_first_plan(patch: Patch) -> None:
    def decide(state: State, event: events.WorkerWord[PlannedMessage]) -> State:
        new = transitions.agrees.decide(state, event)
        return new._replace(phase=Phase.RUNNING) if new.digests and new.committed < new.last_step else new

    patch_rule(patch, PlannedMessage, decide)


@planted(killed, "own or shadow a slot, and there is no inventory")
def the_plan_is_made_from_some_inventories(patch: Patch) -> None:
    real = orders._send_plan

    def sends(state: Any) -> Any:
        known = state.membership
        some = known._replace(members=known.members[: max(1, len(known.inventories))])
        new, outputs = real(state._replace(membership=some))
        return new._replace(membership=known), outputs

    patch.setattr(orders, "_send_plan", sends)


@planted(left, "has left, but nothing was done to it")
def a_leaver_goes_at_once(patch: Patch) -> None:
    def decide(state: State, event: events.Notice) -> State:
        return verdicts.new_epoch(state, event.now_ns, [excluded(event.worker or 0, Cause.LEFT, "has left")])

    patch_rule(patch, events.Notice, decide)


@planted(left, "has left after step")
def a_leaver_goes_before_the_heal(patch: Patch) -> None:
    patch.setattr(verdicts, "_is_needed", lambda state, worker: worker in state.owners)


@planted(struck("suspect"), "is given up")
def a_broken_pair_is_not_repeated(patch: Patch) -> None:
    real = verdicts.nobody_died
    patch.setattr(
        transitions,
        "nobody_died",
        lambda state, now_ns, suspects, symptom: real(state._replace(repeats={symptom: 99}), now_ns, suspects, symptom),
    )


@planted(struck("link", FOR_EVER_US), "stuck while")
def a_broken_pair_is_kept_for_ever(patch: Patch) -> None:
    real = verdicts.nobody_died
    patch.setattr(transitions, "nobody_died", lambda state, *rest: real(state._replace(repeats={}), *rest))


@planted(struck("silent", FOR_EVER_US), "nothing was done to it|as a mere witness")
def a_witness_of_dark_edges_is_given_up(patch: Patch) -> None:
    def gone_dark(state: State, now_ns: int, suspects: tuple[int, ...], symptom: str) -> State:
        return verdicts.gone_dark(state, now_ns, tuple({*state.members} - {*suspects}) or suspects, symptom)

    patch.setattr(transitions, "gone_dark", gone_dark)


@planted(struck("network", FOR_EVER_US), "nothing was done to it")
def the_reporter_of_a_broken_transfer_is_given_up(patch: Patch) -> None:
    patch.setattr(transitions, "by_suspicion", lambda edges: tuple(dict.fromkeys(edge.worker for edge in edges)))


@planted(struck("flap", HEALS_IN_TIME_US), "nothing was done to it|clock had to rule")
def a_flapping_link_evicts(patch: Patch) -> None:
    """An edge is dark as soon as it is silent, without a deadline that begins again with each piece of news."""
    patch.setattr(failure_detector, "deadline_ns", lambda steps_ns: 0)


@planted(struck("silent there", FOR_EVER_US), "a dark edge was not seen")
def dark_edges_are_not_looked_for(patch: Patch) -> None:
    patch.setattr(transitions, "dark", lambda state, now_ns: ())


@planted(struck("silent back", FOR_EVER_US, replace(SMALL, redundancy="none")), "nobody else holds")
def a_worker_is_given_up_that_nobody_can_replace(patch: Patch) -> None:
    patch.setattr(verdicts, "_replaceable", lambda state, suspects: next(iter(suspects), None))


@planted(killed, "has not been told that all have finished")
def the_first_that_is_done_ends_the_job(patch: Patch) -> None:
    patch_rule(patch, messages.FinishedMessage, lambda state, event: state._replace(phase=Phase.FINISHED))


@planted(lambda: troubled(1000), "when every step was committed")
def the_end_must_be_whole(patch: Patch) -> None:
    patch.setattr(verdicts, "cannot_go_on", verdicts.halted)


@planted(lambda: troubled(1000), "finished after|finished with")
def a_job_that_cannot_go_on_has_finished(patch: Patch) -> None:
    def cannot_go_on(state: State, exit_code: ExitCode, reason: str) -> State:
        return state._replace(phase=Phase.FINISHED, reason=reason)

    patch.setattr(verdicts, "cannot_go_on", cannot_go_on)


@planted(taken, "without its reduced gradient|is committed")
def another_coordinator_forgets_the_commits(patch: Patch) -> None:
    real = documents.state_of
    patch.setattr(documents, "state_of", lambda *words: real(*words)._replace(committed=-1))


@planted(taken, "had finished and left, but nothing was done to it")
def another_coordinator_forgets_the_verdicts(patch: Patch) -> None:
    real = documents.state_of

    def resume(text: str, now_ns: int) -> State:
        state = real(text, now_ns)
        return state._replace(members=tuple(sorted(set(state.members) | set(state.out))))

    patch.setattr(documents, "state_of", resume)


@planted(taken, "did not report its inventory|clock had to rule")
def another_coordinator_begins_no_epoch(patch: Patch) -> None:
    """Its predecessor may have told the epoch that it makes of other answers."""
    patch_rule(patch, events.Takeover, lambda state, event: state._replace(inventories={}, digests={}, verdict=()))


@planted(lambda: troubled(1500), "FinishedMessage while failing over|different plans|own or shadow a slot")
def answers_of_a_lower_epoch_count(patch: Patch) -> None:
    real = protocol.step

    def step(state: State, event: Any) -> Any:
        about = event.message if isinstance(event, events.WorkerWord) else event
        if isinstance(about, events.Answer | events.StepCommitted) and about.epoch < state.epoch:
            about = replace(about, epoch=state.epoch)
        return real(state, replace(event, message=about) if isinstance(event, events.WorkerWord) else about)

    patch.setattr("engine.core.protocol.orders.step", step)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_shows(name: str, monkeypatch: Patch) -> None:
    plant, cases, words = PLANTED[name]
    plant(monkeypatch)
    caught(cases(), words)


UNTAKEN = {  # by these cases; test_membership.py takes them
    (Phase.FORMING, Phase.FAILING_OVER),
    (Phase.RESTARTING, Phase.FORMING),
    (Phase.RESTARTING, Phase.HALTED),
    (Phase.RECONFIGURING, Phase.HALTED),
    (Phase.RECONFIGURING, Phase.FINISHED),
}


def test_every_change_of_phase_is_one_of_the_table(monkeypatch: Patch) -> None:
    """Nearly all of them are taken; and no written state comes back, because it is written by compare-and-swap."""
    taken: set[tuple[Phase, Phase]] = set()
    written: list[str] = []

    def noting(state: State, event: events.Event) -> Any:
        new = protocol.step(state, event)
        if new.phase is not state.phase:
            rule = protocol.TABLE[state.phase, kind_of(event)]
            assert isinstance(rule, Rule) and new.phase in rule.leads_to, (state.phase, event, new.phase)
            taken.add((state.phase, new.phase))
        if new.decided() != state.decided():
            written.append(documents.state_text(new))
        return new

    foresees = orders.prepare_epoch

    def unnoted(*words: Any, **more: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(orders, "step", protocol.step)
            return foresees(*words, **more)

    monkeypatch.setattr(orders, "step", noting)
    monkeypatch.setattr(orders, "prepare_epoch", unnoted)  # what it foresees is not written
    early = (
        replace(SMALL, faults=(Fault(1, point, 1, kind),))
        for point in ("welcome", "ready")
        for kind in ("kill", "stop")
    )
    for case in (*early, *leavings(150), *(random_case(number) for number in range(100))):
        written.clear()
        assert run(case).problem == "", case.text()
        assert case.deaths or len(set(written)) == len(written), case.text()
    declared = {
        (phase, target)
        for (phase, _), rule in protocol.TABLE.items()
        if isinstance(rule, Rule)
        for target in rule.leads_to
        if target is not phase
    }
    assert declared - taken <= UNTAKEN
