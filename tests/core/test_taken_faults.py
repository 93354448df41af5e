"""Faults at a take-over: none strikes twice, none is told as struck that did not, and those that wait go on."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core.faults import injection
from engine.core.faults.fault import Fault, Sign
from engine.core.faults.injection import (
    AnnounceFault,
    InheritedFaults,
    LookAtVictim,
    MomentReport,
    RecordFault,
    SendSignal,
    taken_over,
)
from engine.core.history.process_records import RequestRecord
from engine.core.history.run_records import ConfirmedRecord, EpochRecord, FaultRecord, UnconfirmedRecord
from engine.core.messages import FiredMessage
from tests.core.test_injection import CONTINUE, KILL, STOP, Injected, after, kill

ALL = (0, 1, 2)


def first_epoch() -> EpochRecord:
    shadows = ((2,), (0,), (1,))
    return EpochRecord(epoch=1, members=ALL, verdict=(), reason="", planned=False, owners=(0, 1, 2), shadows=shadows)


def strike(name: str = "first", of: int = 1, do: str = "kill") -> FaultRecord:
    return FaultRecord(fault=name, do=do, step=3, of=of, slot=(0, 1), action="1B2", when="before")


def heir(*faults: Fault, heard: tuple[Any, ...] = (), present: tuple[int, ...] = ALL) -> Injected:
    """Returns the injection of a host that takes over, after its first outputs."""
    run, told = Injected(*faults), InheritedFaults()
    for record in (first_epoch(), *heard):
        told.hear(record)
    run.give(taken_over, told, "a", present)
    return run


def told_unconfirmed(run: Injected) -> dict[str, str]:
    records = (each.record for each in run.told if isinstance(each, RecordFault))
    return {each.fault: each.how for each in records if isinstance(each, UnconfirmedRecord)}


def test_a_fault_that_waits_for_its_moment_is_carried_on() -> None:
    run = heir(kill())
    assert run.told == []
    run.give(injection.strike, "first")
    run.dies(1)
    assert (run.struck(), run.confirmed(), run.unconfirmed()) == ([("first", 1)], ["first"], {})


def test_one_that_has_struck_strikes_nobody_else_and_lets_go_who_comes_to_its_moment() -> None:
    run = heir(kill(), heard=(strike(), ConfirmedRecord(fault="first", how="exit: -9")), present=(0, 2))
    assert run.told == []
    answer = run.give(injection.strike, "first", MomentReport(2, 3, "1B1"))
    assert answer == (AnnounceFault(FiredMessage("first"), 2),)
    assert run.unconfirmed() == {}
    assert run.injection.has_struck(1)


def test_a_fault_of_which_this_host_knows_nothing_holds_up_no_worker() -> None:
    answer = heir(kill()).give(injection.strike, "requested", MomentReport(2, 3, "1B1"))
    assert answer == (AnnounceFault(FiredMessage("requested"), 2),)


def test_a_kill_without_its_sign_is_sent_again_to_the_same_worker() -> None:
    run = heir(kill(), heard=(strike(),))
    assert run.told == [SendSignal(1, KILL), LookAtVictim(1)]
    run.dies(1)
    assert run.confirmed() == ["first"]


@pytest.mark.parametrize("heard", [(strike(),), (RequestRecord(request="r", faults=("first",)), strike())])
def test_a_victim_that_was_lost_with_its_host_gives_no_sign(heard: tuple[Any, ...]) -> None:
    run = heir(kill(), heard=heard, present=(0, 2))
    assert not any(isinstance(each, SendSignal) for each in run.told)
    assert "first" in {*told_unconfirmed(run), *run.unconfirmed()}
    assert run.confirmed() == []


def test_a_stop_is_not_sent_twice_but_its_end_is_sent() -> None:
    stop = kill(do="stop", parameters={"for_ns": 100})
    run = heir(stop, heard=(strike(do="stop"), ConfirmedRecord(fault="first", how="state: T")))
    assert run.told == []
    assert run.passes(100) == (SendSignal(1, CONTINUE),)
    unseen = heir(stop, heard=(strike(do="stop"),))
    assert unseen.told == [LookAtVictim(1)]
    assert unseen.give(injection.see_state, 1, "S") == ()
    assert SendSignal(1, STOP) not in unseen.told
    sign: Sign = "state"
    unseen.give(injection.see_sign, 1, sign, "T")
    assert unseen.confirmed() == ["first"]


def test_what_was_requested_or_delayed_there_is_told_as_unconfirmed_and_never_strikes() -> None:
    heard = (RequestRecord(request="r", faults=("x", "y", "z")), strike("y"), strike("z", 2))
    confirmed = (ConfirmedRecord(fault="z", how="exit: -9"), strike(), ConfirmedRecord(fault="first", how="exit: -9"))
    run = heir(kill(), after("first", None, delay_ns=9), heard=heard + confirmed)
    assert told_unconfirmed(run) == {
        "x": "it waited with host a, which was lost",
        "y": "host a, which had struck it, was lost before its sign",
        "second": "it waited with host a, which was lost",
    }
    assert run.passes(10**12) == ()
    again = InheritedFaults()
    for record in (*heard, *confirmed, *(each.record for each in run.told if isinstance(each, RecordFault))):
        again.hear(record)
    assert [each for each in again.requested if each not in again.confirmed | again.unconfirmed] == []


def test_a_phase_of_the_recovery_that_goes_on_is_still_a_moment() -> None:
    heard = (strike(), ConfirmedRecord(fault="first", how="exit: -9"))
    run = heir(kill(), after("first", "plan"), heard=heard, present=(0, 2))
    run.moves_on(1)
    run.give(injection.reach, "plan", run.state.epoch)
    assert run.struck()[-1] == ("second", 0)
    late = Injected(kill(), after("first", "plan", delay_ns=5))
    late.moves_on(1)  # the recovery has begun, and perhaps the delay
    told = InheritedFaults()
    for record in (first_epoch(), *heard):
        told.hear(record)
    late.give(taken_over, told, "a", (0, 2))
    assert [*told_unconfirmed(late)] == ["second"]
