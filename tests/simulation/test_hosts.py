"""Several hosts in the simulation: hosts are lost at each moment of a coordinator, and planted bugs are caught."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import pytest

from engine.codec.documents import documents
from engine.codec.documents import resume as resumed
from engine.codec.records import decoded
from engine.core.history.run_records import CommitRecord
from engine.core.program.ballot import Ballot, VoteMessage, open_ballot
from engine.core.protocol import membership as protocol
from engine.core.protocol import orders, transitions
from engine.core.protocol.coordinator_state import CoordinatorState
from engine.core.protocol.events import LeaseExpired, Takeover
from engine.core.protocol.inputs_outputs import ProcessExit
from engine.core.protocol.state import Phase
from engine.core.protocol.succession import succession
from engine.runtime.agent.host_servers import ReplayBuffer, ReplicatedResults
from engine.runtime.agent.run_state import RunState
from tests.simulation import host_world, plans
from tests.simulation.case import HOST_KINDS, Case, HostLoss, from_text
from tests.simulation.coordinator import Coordinator
from tests.simulation.host_losses import SMALL_HOSTS, host_case, lost_at_every_moment
from tests.simulation.host_world import AGAIN, AT_ONCE, HEIR_LOST, TAKEN, HostAgent, HostWorld
from tests.simulation.planting import Bug, all_well, caught, planted_in

pytestmark = pytest.mark.timeout(300)

Patch = pytest.MonkeyPatch
HISTORIES = 60
HEIR_KNEW = 131  # a case in which only the host that takes over has heard of the last commit
BEGUN, ENDED = 30, 100  # moments of the small case: the first step begins, and the run ends

AT_THE_END = [Case(stages=4, microbatches=2, hosts=2, seed=at, losses=(HostLoss(at, 0, "agent"),)) for at in (71, 73)]


def taken_over() -> Iterator[Case]:
    """Yields the loss of the host that coordinates at some moments, and of the next one some moments later."""
    for case in lost_at_every_moment(SMALL_HOSTS, ENDED, 7, BEGUN):
        (loss,) = case.losses
        yield case
        yield replace(case, losses=(loss, HostLoss(loss.at + 5 + loss.at % 40)), spread=10)


def test_another_host_takes_over_at_every_moment() -> None:
    histories = all_well(lost_at_every_moment(SMALL_HOSTS, ENDED, 4))
    turns = Counter(turn for history in histories for turn in history.turns)
    assert turns[TAKEN] > 0.6 * len(histories), turns
    assert {f"coordinator is lost while {phase}" for phase in ("forming", "running", "draining")} <= set(turns)


def test_hosts_are_lost_one_after_the_other_and_at_once() -> None:
    histories = all_well(host_case(number) for number in (*range(HISTORIES, 2 * HISTORIES), HEIR_KNEW))
    turns = Counter(turn for history in histories for turn in history.turns)
    assert sum(history.phase is Phase.FINISHED for history in histories) > 0.6 * HISTORIES
    assert sum(history.epoch > 1 for history in histories) > 0.6 * HISTORIES
    assert turns[TAKEN] > 0.4 * HISTORIES, turns
    assert min(turns[f"host is lost: {kind}"] for kind in HOST_KINDS) > 0.1 * HISTORIES, turns
    assert min(turns[turn] for turn in (AGAIN, AT_ONCE)) > 0, turns


def test_the_host_that_takes_over_is_lost_too() -> None:
    """With two replicas of each slot beside the owner, two of four hosts may be lost at any time."""
    base = replace(SMALL_HOSTS, stages=4, hosts=4, level=2)
    histories = all_well(
        replace(base, seed=at, spread=at % 3, losses=(HostLoss(at), HostLoss(at + after, 0, HOST_KINDS[at % 3])))
        for at in range(60, 100, 9)
        for after in range(1, 8)
    )
    assert {history.phase for history in histories} == {Phase.FINISHED}
    turns = Counter(turn for history in histories for turn in history.turns)
    assert min(turns[turn] for turn in (TAKEN, AGAIN, HEIR_LOST)) > 0.2 * len(histories), turns


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(25))
def test_hosts_are_lost_in_25_000_histories(part: int) -> None:
    all_well(host_case(number) for number in range(1000 * part, 1000 * (part + 1)))


def test_cases_of_hosts_round_trip() -> None:
    assert all(from_text(host_case(number).text()) == host_case(number) for number in range(50))


# Planted bugs

PLANTED: dict[str, tuple[Bug, str]] = {}
planted = partial(planted_in, PLANTED)


def resumes(patch: Patch, change: Callable[[CoordinatorState], CoordinatorState]) -> None:
    """Plants a change of the state with which a host goes on."""
    patch.setattr(host_world, "resume", lambda *words: change(resumed(*words)))


@planted("is told with the clip factor")
def the_heir_forgets_the_clip_factor(patch: Patch) -> None:
    def forgets(state: CoordinatorState) -> CoordinatorState:
        return state if state.told is None else state._replace(told=replace(state.told, clip_factor=1.0))

    resumes(patch, forgets)


@planted("is committed without worker .'s vote|is not ready in|the loss or the clip factor of step . differs")
def the_heir_keeps_the_ballot(patch: Patch) -> None:
    """The votes that the coordinator before had heard count in the epoch of the take-over."""
    kept: list[Ballot] = []
    lose = HostWorld.lose

    def loses(world: HostWorld, *words: Any) -> None:
        kept[:] = [each for each in [world.coordinator.state.ballot] if each is not None]
        lose(world, *words)

    def opens(epoch: int, step: int, *words: Any) -> Ballot:
        new = open_ballot(epoch, step, *words)
        if not kept or kept[0].step != step:
            return new
        for (worker, slot), vote in kept[0].votes.items():
            if worker in new.ownership.replicas(*slot):
                new, _ = new.add(worker, VoteMessage(epoch, step, (vote,)))
        return new

    patch.setattr(HostWorld, "lose", loses)
    patch.setattr(orders, "open_ballot", opens)


@planted("is told with two losses|is told with another loss")
def a_commit_is_told_with_two_losses(patch: Patch) -> None:
    """The heir makes the loss up, where the one before had written it and had not told it to all."""

    def makes_up(state: CoordinatorState) -> CoordinatorState:
        return state if state.commit is None else state._replace(commit=state.commit._replace(loss=0.0))

    resumes(patch, makes_up)


@planted("lacks steps|is not kept|is lost")
def words_that_come_once_are_dropped(patch: Patch) -> None:
    patch.setattr(ReplayBuffer, "packets", property(lambda said: []))


@planted("is not kept")
def parts_of_checkpoints_are_not_said_again(patch: Patch) -> None:
    patch.setattr(ReplayBuffer, "packets", property(lambda said: [*said._once, *said._hashes]))


@planted("other losses|losses of|differs between")
def what_is_heard_is_applied_twice(patch: Patch) -> None:
    """The heir tells all that it has heard to hosts that have heard it too."""

    def takes(heard: ReplicatedResults, number: int, line: str) -> None:
        record = decoded(line)
        heard._keep(line)
        heard.hear(record)

    def books(results: RunState, record: Any) -> bool:
        if isinstance(record, CommitRecord):
            results.losses.append(record.loss)
        return True

    patch.setattr(ReplicatedResults, "take", takes)
    patch.setattr(RunState, "books", books)


@planted("lacks steps|other losses|the run ends, and step . is committed")
def other_hosts_do_not_hear_what_the_heir_has_heard(patch: Patch) -> None:
    def tells_nothing(world: HostWorld, heir: HostAgent) -> None:
        world.decisions = heir.heard.count
        for agent in world.agents.values():
            agent.heard.count = heir.heard.count

    patch.setattr(HostWorld, "_tell_results", tells_nothing)


@planted("is committed after|two different epochs|in step|is told with|changed without|commit")
def the_heir_reads_an_older_revision(patch: Patch) -> None:
    older: dict[int, CoordinatorState] = {}
    write = Coordinator._write

    def writes(self: Coordinator, *decision: Any) -> None:
        older[id(self.world)] = self.world.written
        write(self, *decision)

    def read(state: CoordinatorState) -> dict[str, str]:
        (before,) = [*older.values()][-1:]
        return documents(before)

    patch.setattr(Coordinator, "_write", writes)
    patch.setattr(host_world, "documents", read)


@planted("clock had to rule|stuck|two different epochs")
def a_take_over_makes_no_epoch(patch: Patch) -> None:
    table: dict[Any, Any] = protocol.TABLE
    for cell in [cell for cell in table if cell[1] is Takeover]:
        patch.setitem(table, cell, transitions.changes_nothing)


@planted("is . verdicts")
def each_worker_of_a_lost_host_is_a_verdict(patch: Patch) -> None:
    table: dict[Any, Any] = protocol.TABLE
    for cell in [cell for cell in table if cell[1] is LeaseExpired]:
        patch.setitem(table, cell, transitions.changes_nothing)


@planted("clock had to rule|stuck|over while")
def workers_of_the_lost_host_are_awaited(patch: Patch) -> None:
    def forgets(*words: Any) -> Any:
        return tuple(each for each in succession(*words) if each.pid)

    patch.setattr(host_world, "succession", forgets)


@planted("nothing was done to it")
def the_loss_of_a_host_is_the_loss_of_its_neighbour(patch: Patch) -> None:
    hears = HostWorld.hears_end

    def hears_end(world: HostWorld, number: int, code: int) -> None:
        hears(world, number, code)
        if world.host_of[number] in world.known_lost:
            world.coordinator.take(ProcessExit, (number + 1) % len(world.members), code)

    patch.setattr(HostWorld, "hears_end", hears_end)


@pytest.mark.parametrize("name", PLANTED)
def test_planted(name: str, monkeypatch: Patch) -> None:
    bug, words = PLANTED[name]
    bug(monkeypatch)
    plans.forget()
    caught(chain(taken_over(), AT_THE_END, map(host_case, (*range(HISTORIES), HEIR_KNEW))), words)
    plans.forget()
