"""The meeting of a group of NCCL: values that an agent passes on, and waits that end with their epoch."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.core.errors import InvariantError
from engine.core.message_kinds import MAX_BYTES
from engine.core.messages import KeyMessage, StopMessage
from engine.runtime.process.control import Control
from engine.runtime.process.link import Link
from engine.runtime.transport.nccl_transport import AgentMeeting
from tests.runtime.peer_messages import an_epoch


class Workers:
    """The control channels of some workers in this process, and a thread that passes keys on as the agent does."""

    def __init__(self, count: int):
        pairs = [Link.pair() for _ in range(count)]
        self.agent_ends = [near for near, _ in pairs]
        self.controls = [Control(far) for _, far in pairs]
        for end in self.agent_ends:
            threading.Thread(target=self._relay, args=(end,), daemon=True).start()

    def _relay(self, end: Link) -> None:
        while (message := end.receive()) is not None:
            if isinstance(message, KeyMessage):
                for each in self.agent_ends:
                    each.send(message)

    def meetings(self, epoch: int = 0) -> list[AgentMeeting]:
        return [AgentMeeting(control, epoch, "group") for control in self.controls]


# A control channel whose agent is gone ends its process: these stay open.
made: list[Workers] = []


@pytest.fixture
def workers() -> Workers:
    made.append(Workers(3))
    return made[-1]


def test_a_value_is_any_bytes_and_every_worker_gets_it(workers: Workers) -> None:
    first, *others = workers.meetings()
    first.set("a", bytes(range(256)))
    for meeting in (first, *others):
        assert meeting.get("a") == bytes(range(256))


def test_a_wait_ends_with_the_value(workers: Workers) -> None:
    first, second, third = workers.meetings()
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(meeting.get, "1") for meeting in (second, third)]
        for key in ("0", "1"):
            time.sleep(0.02)
            first.set(key, key.encode())
        assert [each.result(10) for each in waiting] == [b"1", b"1"]


def test_each_epoch_has_its_own_keys_also_before_this_worker_is_told_of_it(workers: Workers) -> None:
    ahead, behind = workers.meetings(1)[0], workers.meetings(0)[1]
    behind.set("a", b"of epoch 0")
    assert behind.get("a") == b"of epoch 0"
    ahead.set("a", b"of epoch 1")
    assert ahead.get("a") == b"of epoch 1"
    later = workers.meetings(1)[1]
    workers.agent_ends[1].send(an_epoch(1, (0, 1, 2)))
    workers.controls[1].hear()
    assert later.get("a") == b"of epoch 1"
    behind.set("a", b"late")
    with pytest.raises(RuntimeError, match="epoch 0 is over"):
        behind.get("a")
    assert later.get("a") == b"of epoch 1"


@pytest.mark.parametrize("word", [an_epoch(1, (0, 1)), StopMessage()])
def test_a_wait_ends_with_its_epoch_and_with_the_run(word: object) -> None:
    """The quickest of several: a busy machine only makes it longer."""
    took_s = []
    for _ in range(5):
        made.append(Workers(1))
        ((meeting,), (agent,)) = made[-1].meetings(), made[-1].agent_ends
        said_s: list[float] = []

        def say(agent: Link = agent, said_s: list[float] = said_s) -> None:
            said_s.append(time.monotonic())
            agent.send(word)  # type: ignore[arg-type]

        threading.Timer(0.02, say).start()
        with pytest.raises(RuntimeError, match="epoch 0 is over"):
            meeting.get("never")
        took_s.append(time.monotonic() - said_s[0])
    assert min(took_s) < 0.001


def test_a_wait_ends_at_its_time(workers: Workers) -> None:
    with pytest.raises(RuntimeError, match="no worker has set group/a, group/b in time"):
        workers.controls[0].keys.wait(0, "group", ["a", "b"], 0.02)


def test_a_wait_ends_when_its_group_is_given_up_and_no_other_one_does(workers: Workers) -> None:
    first, second, _ = workers.meetings()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.get, "never")
        time.sleep(0.05)
        first.give_up()
        with pytest.raises(RuntimeError, match="group group was given up"):
            waiting.result(10)
    second.set("a", b"still here")
    assert AgentMeeting(workers.controls[1], 0, "group").get("a") == b"still here"
    with pytest.raises(RuntimeError, match="was given up"):
        first.get("a")


def test_a_value_that_fits_no_message_is_refused(workers: Workers) -> None:
    with pytest.raises(InvariantError, match="does not fit a packet"):
        workers.meetings()[0].set("a", os.urandom(MAX_BYTES))
