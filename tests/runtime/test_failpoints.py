"""Failpoints: the worker says when the moment has come, and stands still for the blow."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from engine.core.action import Action, Op
from engine.core.faults.fault import At, Fault, slot_owner
from engine.core.message_kinds import ToWorker
from engine.core.messages import FaultEffectMessage, FiredMessage, InflictMessage, StopMessage, StrikeMessage
from engine.runtime.device.device import HOST
from engine.runtime.process.clock import now_ns
from engine.runtime.process.control import Control, Fenced, Stopped
from engine.runtime.process.link import Link
from engine.runtime.worker import failpoints
from engine.runtime.worker.failpoints import Failpoints
from tests.runtime.peer_messages import Word, an_epoch

# The thread ends by an exception where it would end the process.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

ACTION = Action(2, Op.B, 3)
BEFORE = Fault("5:2:B:3", At(5, ACTION), (slot_owner(ACTION),))
DURING = Fault("5:2:B:3:during", At(5, ACTION, "during"), (slot_owner(ACTION),))


def answer(agent: Link, with_message: ToWorker) -> threading.Thread:
    """Answers the next strike; returns the thread that does."""

    def run() -> None:
        assert agent.receive() == StrikeMessage(BEFORE.id)
        agent.send(with_message)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_before_an_action_it_waits_until_the_agent_has_struck_and_never_again(pair: tuple[Control, Link]) -> None:
    control, agent = pair
    points = Failpoints(control, [BEFORE])
    assert points.is_armed
    thread = answer(agent, FiredMessage(BEFORE.id))
    points.at(5, ACTION, "before")
    thread.join(5.0)
    assert control.fired == {BEFORE.id}
    assert not points.is_armed
    points.at(5, ACTION, "before")  # nobody would answer


def test_an_heir_passes_the_moment_of_a_fault_that_has_fired(pair: tuple[Control, Link]) -> None:
    control, agent = pair
    agent.send(FiredMessage(BEFORE.id))
    control.wait_until(lambda: control.fired or None)
    Failpoints(control, [BEFORE]).at(5, ACTION, "before")  # nobody would answer


def test_during_an_action_it_goes_on_at_once(pair: tuple[Control, Link]) -> None:
    control, agent = pair
    Failpoints(control, [DURING]).at(5, ACTION, "during")
    assert agent.receive() == StrikeMessage(DURING.id)


def test_another_moment_leaves_it_armed_and_says_nothing(pair: tuple[Control, Link]) -> None:
    control, agent = pair
    points = Failpoints(control, [BEFORE])
    points.at(4, ACTION, "before")
    points.at(5, ACTION, "after")
    points.at(5, Action(1, Op.B, 3), "before")
    assert points.is_armed
    control.send(Word("nothing else"))
    assert agent.receive() == Word("nothing else")
    assert not Failpoints(control).is_armed


@pytest.mark.parametrize(("message", "error"), [(StopMessage(), Stopped), (an_epoch(1), Fenced)], ids=["stop", "epoch"])
def test_it_is_taken_out_of_the_wait(pair: tuple[Control, Link], message: ToWorker, error: type[Exception]) -> None:
    control, agent = pair
    thread = answer(agent, message)
    with pytest.raises(error):
        Failpoints(control, [BEFORE]).at(5, ACTION, "before")
    thread.join(5.0)


def test_a_blow_that_never_comes_is_not_waited_for_for_ever(
    pair: tuple[Control, Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failpoints, "_PATIENCE_NS", 20_000_000)
    control, _ = pair
    Failpoints(control, [BEFORE]).at(5, ACTION, "before")
    assert control.fired == set()


def test_who_is_slow_for_a_while_is_so_for_one_action_at_least(pair: tuple[Control, Link]) -> None:
    """On a busy machine the while may be over before the first action is, or has begun."""
    control, agent = pair
    control.at = (5, 1, True)
    replicas: Any = SimpleNamespace(device=HOST)  # the rest of which it leaves alone
    points = Failpoints(control, replicas=replicas)
    points.handle(InflictMessage("slow", "slow", {"factor": 3.0, "for_ns": 1_000_000}, None))
    time.sleep(0.005)
    points.delay(5, ACTION, now_ns())
    message = agent.receive()
    assert isinstance(message, FaultEffectMessage) and message.fault == "slow"
    assert points.is_armed
    points.delay(5, ACTION, now_ns())
    assert not points.is_armed


def test_a_slow_action_takes_its_factor_without_the_wait_for_a_core(
    pair: tuple[Control, Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pace of the worker leaves that wait out, and would else be slower than the factor says."""
    control, agent = pair
    replicas: Any = SimpleNamespace(device=HOST)
    points = Failpoints(control, replicas=replicas)
    points.handle(InflictMessage("slow", "slow", {"factor": 3.0, "for_ns": 10**9}, None))
    slept_s: list[float] = []
    monkeypatch.setattr(time, "sleep", slept_s.append)
    points.delay(5, ACTION, now_ns() - 50 * 10**9, waited_ns=40 * 10**9)
    assert slept_s == [pytest.approx(20, abs=0.5)]
    assert isinstance(agent.receive(), FaultEffectMessage)
