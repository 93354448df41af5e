"""Fault injection as a machine: the victims and moments of faults, their records, and the signs that confirm them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.core.action import Action, Op
from engine.core.faults import injection
from engine.core.faults.expansion import catch_up_points
from engine.core.faults.fault import (
    After,
    At,
    Fault,
    FaultKind,
    Owner,
    Parameter,
    Parameters,
    Role,
    Sign,
    TimedSignal,
    Victim,
    Worker,
    slot_owner,
)
from engine.core.faults.injection import (
    AnnounceFault,
    Injection,
    InjectionOutput,
    LookAtVictim,
    Moved,
    Now,
    RecordFault,
    SendSignal,
)
from engine.core.history.run_records import ConfirmedRecord, FaultRecord, UnconfirmedRecord
from engine.core.job.job import Job
from engine.core.messages import ArmMessage, FiredMessage, InflictMessage
from engine.core.ownership import Slot
from engine.core.protocol.events import RecoveryPhase
from engine.core.protocol.state import Options, Phase, begin
from tests.looped import looped

JOB = Job(stages=3, microbatches=4, steps=8)
ACTION = Action(1, Op.B, 2)
KILL, TERM, STOP, CONTINUE = 9, 15, 19, 18


def ends_by_signal(sign: Sign, value: Any, parameters: Parameters) -> bool:
    return sign == "exit" and value == -KILL


def stands_still(sign: Sign, value: Any, parameters: Parameters) -> bool:
    return sign == "state" and value == "T"


def stops(parameters: Parameters) -> tuple[TimedSignal, ...]:
    return TimedSignal(0, STOP), TimedSignal(int(parameters["for_ns"]), CONTINUE)


def warns(parameters: Parameters) -> tuple[TimedSignal, ...]:
    return TimedSignal(0, TERM), TimedSignal(int(parameters["grace_ns"]), KILL)


KINDS = {
    each.name: each
    for each in (
        FaultKind("kill", "", "agent", True, (), ends_by_signal, lambda parameters: (TimedSignal(0, KILL),)),
        FaultKind("stop", "", "agent", False, (Parameter("for", "duration", "", 50),), stands_still, stops),
        FaultKind("warn", "", "agent", True, (Parameter("grace", "duration", "", 90),), ends_by_signal, warns),
        FaultKind("noop", "", "worker", False),
    )
}


def kill(name: str = "first", **fields: Any) -> Fault:
    return Fault(name, At(3, ACTION), (slot_owner(ACTION),), **fields)


def after(cause: str, phase: Any, *victims: Victim, delay_ns: int = 0, **fields: Any) -> Fault:
    return Fault("second", After(cause, phase, delay_ns), victims or (Role("recoverer"),), **fields)


class Injected:
    """A job of three workers with a shadow each, and all outputs of its machine since the last look at them."""

    def __init__(self, *faults: Fault):
        first = begin(Options(stages=3, redundant=True), (0, 1, 2), ((2,), (0,), (1,)), 7, 0)
        self.state = first._replace(phase=Phase.RUNNING, epoch=1, committed=2)
        self.now_ns = 0
        self.injection = Injection(JOB, KINDS, catch_up_points, faults)
        self.told: list[InjectionOutput] = []

    def give(self, rule: Callable[..., Moved], *given: Any) -> tuple[InjectionOutput, ...]:
        self.injection, outputs = rule(self.injection, Now(self.now_ns, self.state), *given)
        self.told += outputs
        return outputs

    def passes(self, duration_ns: int) -> tuple[InjectionOutput, ...]:
        self.now_ns += duration_ns
        return self.give(injection.do_late_work)

    def dies(self, worker: int) -> None:
        self.give(injection.see_end, worker, -KILL)

    def moves_on(self, out: int) -> None:
        """Makes the next epoch, in which the shadow of a worker owns its slot."""
        state = self.state
        owners = tuple(state.shadows[slot][0] if each == out else each for slot, each in enumerate(state.owners))
        members = tuple(each for each in state.members if each != out)
        self.state = state._replace(epoch=state.epoch + 1, owners=owners, members=members)

    def struck(self) -> list[tuple[str, int]]:
        """Returns (fault, victim) of each record of a strike."""
        return [(each.fault, each.of) for each in self._records(FaultRecord)]

    def confirmed(self) -> list[str]:
        return [each.fault for each in self._records(ConfirmedRecord)]

    def unconfirmed(self) -> dict[str, str]:
        self.give(injection.close)
        return {each.fault: each.how for each in self._records(UnconfirmedRecord)}

    def _records(self, kind: type[Any]) -> list[Any]:
        records = (each.record for each in self.told if isinstance(each, RecordFault))
        return [each for each in records if isinstance(each, kind)]


def test_a_fault_is_recorded_before_it_strikes_once_and_is_confirmed_by_the_end() -> None:
    run = Injected(kill())
    record = FaultRecord(fault="first", do="kill", step=3, of=1, slot=(0, 1), action="1B2", when="before")
    hit = (RecordFault(record), SendSignal(1, KILL), LookAtVictim(1), AnnounceFault(FiredMessage("first")))
    assert run.give(injection.strike, "first") == hit
    assert run.confirmed() == []
    run.dies(1)
    assert run.confirmed() == ["first"]
    assert run.give(injection.strike, "first") == ()  # the heir comes to the same moment
    assert run.unconfirmed() == {}
    assert run.injection.has_struck(1)
    assert not run.injection.has_struck(0)


def test_another_end_than_the_wanted_one_confirms_nothing() -> None:
    run = Injected(kill())
    run.give(injection.strike, "first")
    run.give(injection.see_end, 1, 1)
    assert run.unconfirmed() == {"first": "no sign of it was seen at worker 1"}


def test_all_victims_are_struck_and_each_must_show_it() -> None:
    run = Injected(Fault("first", At(3, ACTION), (Owner(0, 1), Worker(2))))
    run.give(injection.strike, "first")
    assert run.struck() == [("first", 1), ("first", 2)]
    run.dies(1)
    assert run.confirmed() == []
    run.dies(2)
    assert run.confirmed() == ["first"]


def test_a_fault_whose_moment_never_comes_is_unconfirmed() -> None:
    assert Injected(kill(), after("first", "plan")).unconfirmed() == {
        "first": "it did not strike",
        "second": "it did not strike",
    }


@looped(
    ("victim", "action", "worker", "slot"),
    [
        (Owner(0, 2), ACTION, 2, (0, 2)),
        (Worker(0), ACTION, 0, (0, 0)),
        (Role("shadow"), ACTION, 0, (0, 1)),
        (Role("neighbour"), ACTION, 2, (0, 2)),
        (Role("neighbour"), Action(2, Op.F, 0), 0, (0, 0)),  # after the last stage: the first
        (Role("recoverer"), ACTION, 1, (0, 1)),  # no worker is dead: the owner
        (Owner(0, 1), Action(1, Op.CHECKPOINT), 0, (0, 1)),  # the shadow writes it
    ],
)
def test_victims_of_a_moment_are_those_of_its_slot(victim: Victim, action: Action, worker: int, slot: Slot) -> None:
    run = Injected(Fault("first", At(3, action), (victim,), "noop"))
    assert AnnounceFault(InflictMessage("first", "noop", {}, slot), worker) in run.give(injection.strike, "first")
    assert run.struck() == [("first", worker)]


def test_a_role_that_no_worker_plays_has_no_victim() -> None:
    run = Injected(Fault("first", At(3, ACTION), (Role("shadow"),)))
    run.state = run.state._replace(shadows=((), (), ()))
    assert run.give(injection.strike, "first") == (
        AnnounceFault(FiredMessage("first")),
    )  # the worker at the moment goes on
    assert run.unconfirmed() == {"first": "there was no victim"}


@pytest.mark.parametrize("phase", ["agree", "inventory", "plan", "replay", "heal"])
def test_a_phase_is_that_of_the_recovery_from_the_cause(phase: RecoveryPhase) -> None:
    run = Injected(kill(), after("first", phase))
    run.give(injection.reach, phase, 1)  # before the cause has struck
    run.give(injection.strike, "first")
    run.give(injection.reach, phase, 1)  # of the epoch in which it struck
    assert run.struck() == [("first", 1)]
    run.dies(1)
    run.moves_on(1)
    for _ in range(2):
        run.give(injection.reach, phase, 2)
        assert run.struck() == [("first", 1), ("second", 0)]


def test_before_the_verdict_the_recoverer_is_the_coming_heir() -> None:
    run = Injected(kill(), after("first", "detect"))
    run.give(injection.strike, "first")
    run.dies(1)
    assert run.struck() == [("first", 1), ("second", 0)]


def test_a_worker_that_is_out_while_it_lives_is_detected_with_the_verdict() -> None:
    run = Injected(kill(do="noop"), after("first", "detect"))
    run.give(injection.strike, "first")
    run.moves_on(1)
    run.give(injection.reach, "agree", 2)
    assert run.struck() == [("first", 1), ("second", 0)]


@pytest.mark.parametrize("phase", ["fence", "regroup"])
def test_workers_report_the_phases_that_only_they_know_of(phase: RecoveryPhase) -> None:
    run = Injected(kill(), after("first", phase))
    run.give(injection.strike, "first")
    run.moves_on(1)
    run.give(injection.reach, "plan", 2)
    assert run.struck() == [("first", 1)]
    run.give(injection.reach, phase, 2)
    assert run.struck() == [("first", 1), ("second", 0)]


def test_a_delay_counts_from_the_strike() -> None:
    run = Injected(kill(do="noop"), after("first", None, Worker(2), delay_ns=30))
    run.give(injection.strike, "first")
    assert run.injection.due_ns == 30
    run.passes(29)
    assert run.struck() == [("first", 1)]
    run.passes(1)
    assert run.struck() == [("first", 1), ("second", 2)]


def test_a_stopped_process_is_looked_at_until_it_shows_it_and_then_continued() -> None:
    run = Injected(kill(do="stop", parameters={"for_ns": 7_000_000}))
    assert run.give(injection.strike, "first")[1:3] == (SendSignal(1, STOP), LookAtVictim(1))
    run.give(injection.see_state, 1, "S")
    assert run.confirmed() == []
    assert run.passes(5_000_000) == (LookAtVictim(1),)
    run.give(injection.see_state, 1, "T")
    assert run.confirmed() == ["first"]
    assert run.passes(5_000_000) == (SendSignal(1, CONTINUE),)


def test_a_process_that_has_not_stood_still_yet_is_not_woken() -> None:
    """On a busy machine a stop ended before the look for it, or before the process had run into it."""
    run = Injected(kill(do="stop", parameters={"for_ns": 7_000_000}))
    run.give(injection.strike, "first")
    run.give(injection.see_state, 1, "S")
    for _ in range(3):
        assert run.passes(60_000_000) == (LookAtVictim(1),)
        run.give(injection.see_state, 1, "R")
    assert run.passes(5_000_000) == (LookAtVictim(1),)
    run.give(injection.see_state, 1, "T")
    assert run.passes(5_000_000) == (SendSignal(1, CONTINUE),)
    assert run.unconfirmed() == {}


def test_a_worker_that_has_ended_gets_no_signal() -> None:
    run = Injected(kill(do="warn", parameters={"grace_ns": 100}), Fault("late", At(4, ACTION), (Worker(1),)))
    run.give(injection.strike, "first")
    assert run.injection.grace_ns(1) == 100
    assert run.injection.grace_ns(0) is None
    run.dies(1)
    assert run.passes(200) == ()
    assert run.give(injection.strike, "late")[1:] == (AnnounceFault(FiredMessage("late")),)
    assert run.unconfirmed() == {"late": "no sign of it was seen at worker 1"}


def test_merged_is_the_moment_at_which_the_heir_has_redone_the_lost_work() -> None:
    run = Injected(kill(), after("first", "merged"))
    run.give(injection.strike, "first")
    run.dies(1)
    run.moves_on(1)
    (order,) = run.give(injection.arm_merged, {1: (3, "1B2")})
    assert isinstance(order, AnnounceFault) and isinstance(order.message, ArmMessage)
    assert order.worker == 0
    assert [(each["id"], each["moment"]) for each in order.message.faults] == [
        ("second", {"step": 3, "action": "1B2", "when": "after"}),
        ("second", {"step": 3, "action": "1COMMIT", "when": "before"}),
    ]
    run.give(injection.strike, "second")
    assert run.struck() == [("first", 1), ("second", 0)]


def test_where_no_work_was_lost_merged_is_at_once() -> None:
    run = Injected(kill(), after("first", "merged"))
    run.give(injection.strike, "first")
    run.dies(1)
    run.moves_on(1)
    run.give(injection.arm_merged, {1: (2, "1STEP")})
    assert run.struck() == [("first", 1), ("second", 0)]


def test_faults_that_are_requested_later_are_told_to_every_worker() -> None:
    run = Injected()
    (order,) = run.give(injection.add, (kill(),))
    assert isinstance(order, AnnounceFault) and isinstance(order.message, ArmMessage)
    assert (order.worker, [each["id"] for each in order.message.faults]) == (None, ["first"])
    assert run.injection.known == {"first"}
    run.give(injection.strike, "first")
    assert run.injection.known == {"first"}


def test_a_sign_that_names_a_fault_confirms_no_other() -> None:
    run = Injected(kill(do="noop"), Fault("other", At(3, ACTION), (Worker(1),), "noop"))
    run.give(injection.strike, "first")
    run.give(injection.strike, "other")
    run.give(injection.see_sign, 1, "suffered", "nothing was done", "other")
    assert run.confirmed() == ["other"]


def test_a_worker_that_is_started_again_gets_no_late_signal_of_the_one_before() -> None:
    late = after("first", None, Worker(2), delay_ns=300)
    run = Injected(kill(do="warn", parameters={"grace_ns": 100}), late)
    run.give(injection.strike, "first")
    run.dies(1)
    run.give(injection.restart)
    assert run.passes(200) == ()
    run.passes(100)
    assert run.struck() == [("first", 1), ("second", 2)]


def test_the_grace_of_a_worker_is_that_of_its_latest_notice() -> None:
    other = Fault("other", At(4, ACTION), (Worker(1),), "warn", {"grace_ns": 40})
    run = Injected(kill(do="warn", parameters={"grace_ns": 100}), other, Fault("last", At(5, ACTION), (Worker(1),)))
    for fault, grace_ns in (("first", 100), ("other", 40), ("last", 40)):
        run.give(injection.strike, fault)
        assert run.injection.grace_ns(1) == grace_ns
