"""The control thread: what the agent says reaches the main thread, whatever that waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from engine.core.messages import (
    BusyMessage,
    CommitMessage,
    GoMessage,
    HeartbeatMessage,
    MarkMessage,
    PingMessage,
    StopMessage,
    ValidatedMessage,
)
from engine.core.ownership import Grid, fresh
from engine.core.program.ballot import SlotVote, VoteMessage
from engine.core.program.inventory import PlanMessage, PreparedMessage, PrepareMessage
from engine.core.program.planner import EpochPlan, Plan
from engine.core.protocol.worker_inputs import PlanPrepared, ProtocolMessage, StagesBuilt
from engine.core.protocol.worker_state import PreparePlan
from engine.runtime.process.control import Control, ControlHandler, Fenced, Stopped
from engine.runtime.process.link import Link
from engine.runtime.worker.training import WorkerProtocol
from tests.runtime.peer_messages import Word, an_epoch

# The thread ends by an exception where it would end the process.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


class Heard(ControlHandler):
    """A worker that handles some of what its control tells it, as it is given."""

    def __init__(self, **given: Callable[..., Any]):
        self.__dict__ |= given


def commit(step: int) -> CommitMessage:
    return CommitMessage(step, 1.0, "step")


def later(act: Callable[[], object]) -> None:
    threading.Timer(0.02, act).start()


def test_messages_wait_by_kind_until_they_are_taken(pair: tuple[Control, Link]) -> None:
    control, agent = pair
    for number in range(3):
        agent.send(commit(number))
        agent.send(ValidatedMessage(number))
    assert [control.take(ValidatedMessage).step for _ in range(3)] == [0, 1, 2]
    assert [control.take(CommitMessage).step for _ in range(3)] == [0, 1, 2]


def test_take_waits_for_a_message_of_its_kind(pair: tuple[Control, Link]) -> None:
    control, agent = pair
    agent.send(Word())
    later(lambda: agent.send(GoMessage(True, False)))
    assert control.take(GoMessage).end


def test_what_it_says_reaches_the_agent(pair: tuple[Control, Link]) -> None:
    control, agent = pair
    vote = VoteMessage(1, 3, (SlotVote(0, 2, (0, 1), (0.5, 0.25), 2.5),))
    control.send(vote)
    assert agent.receive() == vote


def test_stop_ends_a_wait_and_every_later_one(pair: tuple[Control, Link]) -> None:
    control, agent = pair
    control.check()
    later(lambda: agent.send(StopMessage()))
    with pytest.raises(Stopped):
        control.take(GoMessage)
    with pytest.raises(Stopped):
        control.check()
    agent.send(GoMessage(False, False))
    with pytest.raises(Stopped):
        control.take(GoMessage)


def test_a_wait_ends_when_what_it_looks_for_is_found(pair: tuple[Control, Link]) -> None:
    control, _ = pair
    found: list[str] = []

    def arrive() -> None:
        found.append("transfer")
        control.wake()

    later(arrive)
    assert control.wait_until(lambda: found[0] if found else None) == "transfer"


def test_what_a_look_raises_comes_through(pair: tuple[Control, Link]) -> None:
    control, _ = pair

    def look() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        control.wait_until(look)
    assert control.wait_until(lambda: 1) == 1


def test_a_new_epoch_ends_a_wait_and_every_later_one_until_it_is_accepted(pair: tuple[Control, Link]) -> None:
    control, agent = pair
    later(lambda: agent.send(an_epoch(2)))
    with pytest.raises(Fenced):
        control.take(GoMessage)
    with pytest.raises(Fenced):
        control.check()
    with pytest.raises(Fenced):
        control.wait_until(lambda: "found")
    assert control.hear() == an_epoch(2)
    control.check()


def test_what_was_said_before_an_epoch_is_dropped_and_what_came_after_is_kept(pair: tuple[Control, Link]) -> None:
    control, agent = pair
    agent.send(commit(1))
    agent.send(an_epoch(2))
    agent.send(commit(2))
    until_s = time.monotonic() + 10
    while commit(2) not in control.inbox.waiting:  # else the first one would be heard before the epoch comes
        assert time.monotonic() < until_s
        time.sleep(0.001)
    assert [control.hear(), control.hear()] == [an_epoch(2), commit(2)]


def test_what_is_looked_for_is_heard_when_no_message_waits(pair: tuple[Control, Link]) -> None:
    control, agent = pair
    assert control.hear(lambda: "found") == "found"
    agent.send(an_epoch(1))
    agent.send(Word())
    with pytest.raises(Fenced):
        control.take(Word)
    assert control.hear(lambda: "found") == an_epoch(1)
    assert control.take(Word)


def test_it_speaks_in_the_epoch_that_it_has_entered(pair: tuple[Control, Link]) -> None:
    control, agent = pair
    protocol = WorkerProtocol(control, lambda output: None)
    control.tells_marks = True
    protocol.feed(StagesBuilt(0, fresh(Grid(1, 1)), 0, 0))
    agent.send(an_epoch(2))
    with pytest.raises(Fenced):
        control.take(GoMessage)
    control.mark("fence")
    assert protocol.feed(ProtocolMessage(control.hear()))
    control.mark("plan")
    assert [agent.receive(), agent.receive()] == [MarkMessage(0, "fence"), MarkMessage(2, "plan")]
    control.handler = Heard(pinged=lambda: control.send(BusyMessage("opens the data")))
    agent.send(PingMessage())
    assert [agent.receive(), agent.receive()] == [HeartbeatMessage(2, *control.at), BusyMessage("opens the data")]


def test_a_plan_is_prepared_while_the_main_thread_is_inside_an_action(pair: tuple[Control, Link]) -> None:
    control, agent = pair

    def carry_out(output: Any) -> None:
        if isinstance(output, PreparePlan):
            protocol.feed_aside(PlanPrepared(output.order.number, plan))
        else:
            control.send(output.message)

    protocol = WorkerProtocol(control, carry_out)
    protocol.feed(StagesBuilt(0, fresh(Grid(1, 1)), 0, 0))
    told = PrepareMessage(3, PlanMessage(2, 1, (0,), (), (0,), (), ()))
    plan = EpochPlan(told.plan, fresh(Grid(1, 1)), Plan(2, {}, (), (), "the digest"))
    control.handler = Heard(prepare=lambda order: protocol.feed_aside(ProtocolMessage(order)))
    agent.send(told)
    assert agent.receive() == PreparedMessage(2, 3, "the digest")  # this thread, the main one, has done nothing
    assert protocol.state.prepared == (plan,)


@pytest.mark.parametrize(
    "data", [b"{", b"[" * 100_000, b'{"kind":"gossip"}', b'{"kind":"go","end":1,"validate":false}', b'{"kind":"go"}']
)
def test_a_malformed_message_ends_the_worker(
    pair: tuple[Control, Link], data: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fixture checks the exit code."""
    _, agent = pair
    *_, thread = (each for each in threading.enumerate() if each.name == "control")  # the newest one
    agent.send_packet(data)
    thread.join(5.0)
    assert not thread.is_alive()
    assert "Error" in capsys.readouterr().err


def test_a_heartbeat_from_inside_an_action_names_the_gpu_that_has_not_ended_its_work(
    pair: tuple[Control, Link],
) -> None:
    control, agent = pair
    control.handler = Heard(unfinished=lambda: "GPU 0")
    for inside in (True, False):
        control.at = (3, 5, inside)
        agent.send(PingMessage())
        assert agent.receive() == HeartbeatMessage(0, 3, 5, inside, device="GPU 0" * inside)


def test_a_wait_for_no_other_worker_is_told_as_an_action_is(pair: tuple[Control, Link]) -> None:
    """Its number goes up: the agent ignores what goes back, and would think that the wait goes on."""
    control, _ = pair
    control.at = (3, 5, False)
    seen = []
    control.handler = Heard(moved=lambda epoch, *at: seen.append(at))
    with control.busy():
        with control.busy():
            pass
        assert control.at == (3, 6, True)
    with pytest.raises(ValueError, match="planted"), control.busy():
        raise ValueError("planted")
    assert seen == [(3, 6, True), (3, 6, False), (3, 7, True), (3, 7, False)]
