"""The rendezvous of an epoch: keys that an agent passes on to all workers, and waits that end with their epoch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest

from engine.core.errors import InvariantError, TransferFailedError
from engine.core.message_codec import MAX_BYTES, encode
from engine.core.process_messages import KeyMessage, StopMessage
from engine.runtime.ipc.control import Control
from engine.runtime.ipc.link import Link
from engine.runtime.transport.gloo_backend import GlooBackend
from engine.runtime.transport.gloo_transport import GlooJoining
from engine.runtime.transport.link_cuts import LinkCuts
from engine.runtime.transport.rendezvous import Rendezvous
from tests.runtime.peer_messages import an_epoch

SOON = timedelta(seconds=10)


class Workers:
    """The control channels of some workers in this process, and a thread that passes keys on as the agent does."""

    def __init__(self, count: int):
        pairs = [Link.pair() for _ in range(count)]
        self.agent_ends = [near for near, _ in pairs]
        self.controls = [Control(far) for _, far in pairs]
        self.most_bytes = 0
        for end in self.agent_ends:
            threading.Thread(target=self._relay, args=(end,), daemon=True).start()

    def _relay(self, end: Link) -> None:
        while (message := end.receive()) is not None:
            if isinstance(message, KeyMessage):
                self.most_bytes = max(self.most_bytes, len(encode(message)))
                for each in self.agent_ends:
                    each.send(message)

    def stores(self, epoch: int = 0) -> list[Rendezvous]:
        return [Rendezvous(control, epoch, "group") for control in self.controls]


# A control channel whose agent is gone ends its process: these stay open.
made: list[Workers] = []


@pytest.fixture
def workers() -> Workers:
    made.append(Workers(3))
    return made[-1]


def test_a_value_is_any_bytes_and_every_worker_gets_it(workers: Workers) -> None:
    first, *others = workers.stores()
    first.set("a", bytes(range(256)))
    for store in (first, *others):
        assert store.get("a") == bytes(range(256))


def test_a_wait_hears_of_every_key(workers: Workers) -> None:
    first, second, third = workers.stores()
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(store.wait, ["0", "1"], SOON) for store in (second, third)]
        for key in ("0", "1"):
            time.sleep(0.02)
            first.set(key, key.encode())
        for each in waiting:
            each.result()
    assert [second.get("0"), third.get("1")] == [b"0", b"1"]


def test_each_epoch_has_its_own_keys_also_before_this_worker_is_told_of_it(workers: Workers) -> None:
    ahead, behind = workers.stores(1)[0], workers.stores(0)[1]
    behind.set("a", b"of epoch 0")
    assert behind.get("a") == b"of epoch 0"
    ahead.set("a", b"of epoch 1")
    ahead.wait(["a"], SOON)
    later = workers.stores(1)[1]
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
        ((store,), (agent,)) = made[-1].stores(), made[-1].agent_ends
        said_s: list[float] = []

        def say(agent: Link = agent, said_s: list[float] = said_s) -> None:
            said_s.append(time.monotonic())
            agent.send(word)  # type: ignore[arg-type]

        threading.Timer(0.02, say).start()
        with pytest.raises(RuntimeError, match="epoch 0 is over"):
            store.wait(["never"], timedelta(minutes=30))
        took_s.append(time.monotonic() - said_s[0])
    assert min(took_s) < 0.001


def test_a_wait_ends_at_its_time(workers: Workers) -> None:
    with pytest.raises(RuntimeError, match="no worker has set group/a, group/b in time"):
        workers.stores()[0].wait(["a", "b"], timedelta(seconds=0.02))


def joining_of(workers: Workers, worker: int) -> GlooJoining:
    control = workers.controls[worker]
    return GlooBackend(LinkCuts(control), worker, partial(Rendezvous, control)).joining(0, (0, 1, 2))


def test_a_group_forms_and_its_keys_are_short(workers: Workers) -> None:
    joinings = [joining_of(workers, worker) for worker in range(3)]
    with ThreadPoolExecutor(3) as pool:
        forming = [pool.submit(each.join) for each in joinings]
        formed = [each.result() for each in forming]
    for each in formed:  # one that leaves at once breaks connections that the others are still making
        each.close()
    assert workers.most_bytes < MAX_BYTES / 100


def is_told_of_an_epoch(workers: Workers, joining: GlooJoining) -> None:
    workers.agent_ends[0].send(an_epoch(1, (0, 1)))


def abandons(workers: Workers, joining: GlooJoining) -> None:
    joining.abandon()


@pytest.mark.parametrize(
    ("leave", "why"), [(is_told_of_an_epoch, "epoch 0 is over"), (abandons, "group epoch-0 was given up")]
)
def test_a_group_that_never_comes_together_is_left(
    workers: Workers, leave: Callable[[Workers, GlooJoining], None], why: str
) -> None:
    with ThreadPoolExecutor(1) as pool:
        joining = joining_of(workers, 0)
        forming = pool.submit(joining.join)
        time.sleep(0.05)
        leave(workers, joining)
        with pytest.raises(TransferFailedError, match=f"joining the others failed: .*{why}"):
            forming.result(10)


def test_a_value_that_fits_no_message_is_refused(workers: Workers) -> None:
    with pytest.raises(InvariantError, match="does not fit a packet"):
        workers.stores()[0].set("a", bytes(MAX_BYTES))
