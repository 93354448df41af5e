"""An elastic job asks the policy once for each set of members, and only while it trains."""

from __future__ import annotations

from engine.core.job.job import Job
from engine.core.messages import WaitingMessage
from engine.core.protocol.events import ExitSeen, Notice, WantedOwners, WorkerWord
from engine.core.protocol.membership import plan_document
from engine.core.protocol.rebalancing import Rebalancing, wish
from engine.core.protocol.state import Options, Phase, State, begin
from engine.core.protocol.worker_times import WorkerTimes
from tests.core.membership_cases import told

JOB = Job(stages=3, blocks=4, elastic=True)
THIRDS = (0,) * 4 + (1,) * 4 + (2,) * 4
ASKED = Rebalancing((0, 1, 2))
SETTLED = WorkerTimes(stages=dict.fromkeys(range(12), ((0.008, 0.016),) * 32))


def trains(owners: tuple[int, ...] = THIRDS, shadows: tuple[tuple[int, ...], ...] = ((0, 1, 2),) * 12) -> State:
    """Returns a job of twelve blocks that trains."""
    lines = tuple(tuple(each for each in line if each != owner) for owner, line in zip(owners, shadows, strict=True))
    return begin(Options(stages=12, redundant=True, workers=3), owners, lines, 99, 0)._replace(phase=Phase.RUNNING)


def test_the_first_owners_stay_and_are_asked_about_once() -> None:
    asked, why, wanted = wish(Rebalancing(()), JOB, trains(), 7)
    assert (asked, wanted) == (ASKED, None)
    assert why.startswith("nothing moves: ")
    assert wish(asked, JOB, trains(), 8) == (ASKED, "", None)


def test_merged_blocks_are_shared_out_by_the_workers_that_are_left() -> None:
    merged = trains((0,) * 4 + (0,) * 4 + (2,) * 4, ((0, 2),) * 12)
    asked, why, wanted = wish(ASKED, JOB, merged, 7)
    assert asked.workers == (0, 2)
    assert wanted is not None and (wanted.owners, wanted.why) == ((0,) * 6 + (2,) * 6, why)
    new = told(merged, wanted)
    assert (new.wanted, new.wanted_why) == (wanted.owners, wanted.why)
    assert wish(asked, JOB, new, 8) == (asked, "", None)


def test_a_leaver_is_not_wanted() -> None:
    leaving = told(trains(), Notice(5, 1, 60_000_000_000))
    wanted = wish(ASKED, JOB, leaving, 7).wanted
    assert isinstance(wanted, WantedOwners) and wanted.owners == (0,) * 6 + (2,) * 6


def test_nothing_is_wanted_in_a_recovery() -> None:
    assert wish(ASKED, JOB, trains()._replace(phase=Phase.FAILING_OVER, members=(0, 2)), 7) == (ASKED, "", None)


def test_a_verdict_that_takes_a_worker_in_names_its_slots_in_its_plan() -> None:
    """So the joiner becomes a shadow in the next step, and no epoch of its own is needed for the wish."""
    waiting = told(trains(), WorkerWord(1, 3, WaitingMessage(), "host"))
    verdict = told(waiting, ExitSeen(2, 1, -9))
    assert (verdict.phase, verdict.members, verdict.awaits_inventories) == (Phase.FAILING_OVER, (0, 2, 3), True)
    found = wish(ASKED, JOB, verdict, 7, takes_in=True)
    assert found.wanted is not None and sorted(found.wanted.owners) == [0] * 4 + [2] * 4 + [3] * 4
    new = told(verdict, found.wanted)
    assert new.wanted_at_start == found.wanted.owners
    assert plan_document(new).wanted == found.wanted.owners
    assert wish(found.asked, JOB, new, 8, takes_in=True).why == ""
    whole = new._replace(inventories=dict.fromkeys(new.members, "{}"))
    assert wish(ASKED, JOB, whole, 7, takes_in=True).why == "", "its plan is made"


def test_a_wish_in_training_waits_for_an_epoch() -> None:
    merged = trains((0,) * 8 + (2,) * 4, ((0, 2),) * 12)
    wanted = wish(ASKED, JOB, merged, 7).wanted
    assert wanted is not None and told(merged, wanted).wanted_at_start == ()


def test_times_that_become_known_withdraw_no_wish_that_is_carried_out() -> None:
    """A leaver that kept its blocks would not go with them, and a joiner would get none."""
    leaving = told(trains(), Notice(5, 1, 60_000_000_000))
    asked, _, wanted = wish(ASKED, JOB, leaving, 7)
    assert wanted is not None
    again = wish(asked, JOB, told(leaving, wanted), 8, SETTLED)
    assert again.wanted is None
    assert again.why.startswith("4 blocks of 12 move")
    assert again.asked == Rebalancing((0, 2), knew_times=True), "no move of its own will, so the next need not wait"


def test_a_leaver_loses_its_blocks_though_times_alone_would_not_move_them() -> None:
    """Its notice came, and then no wish: the wanted owners were those that there were, with the leaver among them."""
    leaving = told(trains(), Notice(5, 1, 60_000_000_000))
    found = wish(Rebalancing((0, 2)), JOB, leaving, 8, SETTLED).wanted
    assert found is not None and found.owners == (0,) * 6 + (2,) * 6


def test_the_policy_is_asked_once_about_another_schedule() -> None:
    asked = wish(Rebalancing(()), JOB, trains(), 7).asked
    changed = trains()._replace(schedule="zb1p")
    again = wish(asked, JOB, changed, 8)
    assert (again.why != "", again.asked.schedule) == (True, "zb1p")
    assert wish(again.asked, JOB, changed, 9).why == ""
