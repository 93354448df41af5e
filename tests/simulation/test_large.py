"""Large jobs on hosts of eight workers: deaths and lost hosts, with counts of all messages."""

from __future__ import annotations

from functools import partial

from engine.core.message_kinds import MAX_BYTES
from engine.core.ownership import Ownership
from engine.core.protocol.state import Phase
from tests.simulation.beginning import begun
from tests.simulation.case import Case, Fault
from tests.simulation.large import LOSS, LargeWorld, figures, large_case, outcome, ran, usage
from tests.simulation.run import history_of

WORKERS = 32
LOST_HOST = Case(stages=WORKERS, microbatches=2, steps=2, faults=(Fault(11, "moment", 9, LOSS),))


class BesideWorld(LargeWorld):
    """A planted bug: shadows stand on the host of the owner."""

    def placed(self, ownership: Ownership, case: Case) -> Ownership:
        """Returns the ownership as it is."""
        return ownership


class OneHost(LargeWorld):
    """The same on one host."""

    def node_of(self, number: int) -> str:
        """Returns its name."""
        return "host"


def test_deaths_and_lost_hosts_keep_every_promise() -> None:
    histories = [ran(large_case(WORKERS, number))[1] for number in range(12)]
    assert {history.problem for history in histories} == {""}
    assert {history.phase for history in histories} == {Phase.FINISHED}
    assert {history.struck[0].kind for history in histories} == {"kill", LOSS}


def test_a_lost_host_is_one_epoch_and_its_shadows_beside_it_would_lose_the_state() -> None:
    _, history = ran(LOST_HOST)
    assert (history.problem, history.phase, history.epoch) == ("", Phase.FINISHED, 2)
    history = history_of(begun(LOST_HOST, BesideWorld))
    assert history.phase is Phase.HALTED


def test_a_failure_costs_each_worker_an_order_an_answer_a_plan_a_digest_and_a_start() -> None:
    usual, _ = ran(Case(stages=WORKERS, microbatches=2, steps=2))
    world, history = ran(LOST_HOST)
    survivors = WORKERS - 8
    assert history.epoch == 2
    more = world.counts - usual.counts
    for name in ("InventoryMessage", "PlanPartMessage", "PlannedMessage", "GoMessage"):
        assert survivors <= more[name] <= WORKERS, name
    assert more["PlanMessage"] == 0


def test_the_bytes_of_a_failure_grow_no_faster_than_the_job() -> None:
    sizes = []
    for workers in (WORKERS, 4 * WORKERS):
        usual, _ = ran(Case(stages=workers, microbatches=2, steps=2))
        world, _ = ran(Case(stages=workers, microbatches=2, steps=2, faults=(Fault(11, "moment", 9),)))
        sizes.append(world.sizes.total() - usual.sizes.total())
    assert sizes[1] < 4**1.1 * sizes[0]


def test_figures_are_for_each_kind_of_failure() -> None:
    first, second, last = figures(WORKERS, map(partial(outcome, usage(WORKERS)), range(12)))
    assert first.startswith("    32 workers, death: ") and second.startswith("    32 workers, loss of a host: ")
    assert "s of a processor; most bytes: PlanPartMessage" in last and "a real one at most 160,000" in last


def test_a_hundred_waiting_workers_make_no_message_long_and_hear_nothing_of_a_failure() -> None:
    def failed(waiting: int) -> OneHost:
        """Returns the world of eight members, of which one dies, and of waiting workers, of which one takes over."""
        case = Case(stages=8, microbatches=2, steps=2, waiting=waiting, faults=(Fault(3, "moment", 9),))
        world = begun(case, OneHost)
        history = history_of(world)
        assert (history.problem, history.phase, history.epoch) == ("", Phase.FINISHED, 2)
        return world

    few, many = failed(1), failed(100)
    assert many.membership.waiting and many.counts["PlanMessage"] == 1
    assert many.largest == few.largest < MAX_BYTES / 50
    at_start_and_end = {"WelcomeMessage", "PartitionMessage", "BordersMessage", "WaitingMessage", "ByeMessage"}
    more = many.counts - few.counts
    assert set(more) <= at_start_and_end and max(more.values()) <= 100


def test_a_hundred_workers_that_join_at_once_make_no_message_too_long() -> None:
    world, history = ran(Case(stages=8, microbatches=2, steps=4, waiting=100, joining=100))
    assert (history.problem, history.phase) == ("", Phase.FINISHED)
    assert len(world.membership.members) == 108
    assert world.largest < MAX_BYTES / 4
