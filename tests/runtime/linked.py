"""Workers without an agent, in one process: each has the desk that its links need, and real links to the others."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from engine.core.message_kinds import Message
from engine.core.messages import LinkMessage, LinkWantedMessage
from engine.runtime.process.control import Wakeups
from engine.runtime.process.link import LinkPairs
from engine.runtime.transport.direct_transport import DirectBackend, DirectTransport, LinkCuts
from engine.runtime.transport.links import Links
from engine.runtime.worker.thread_worker import Turn

WAIT_S = 20.0  # the longest wait


class Desk:
    """The place of one worker: its wait, and its way to the agent, which is a list of all desks."""

    def __init__(self, desks: Desks, worker: int, is_near: bool):
        self.worker, self._desks = worker, desks
        self.wakeups = Wakeups()
        self.given_links: queue.SimpleQueue[tuple[LinkMessage, list[int]]] = queue.SimpleQueue()
        self.turn = Turn()
        self.child = SimpleNamespace(pid=worker)
        self.link: Any = SimpleNamespace(send=self._given, takes_fds=is_near)

    def send(self, message: Message) -> None:
        """Has the agent make a link."""
        if isinstance(message, LinkWantedMessage):
            self._desks.pairs.link(self, message)

    def _given(self, message: LinkMessage, fds: Sequence[int] = ()) -> None:
        self.given_links.put((message, [os.dup(fd) for fd in fds]))
        self.wakeups.wake()

    def wait_until(self, look: Callable[[], Any]) -> Any:
        """Waits as a control does, for some seconds."""
        until_s = time.monotonic() + WAIT_S
        while (found := look()) is None:
            assert time.monotonic() < until_s, "this would wait for ever"
            if not self._desks.look():
                time.sleep(0.0005)
        return found

    def wake(self) -> None:
        """Ends the wait."""
        self.wakeups.wake()

    def kill(self) -> None:
        """Does nothing: no thread waits here."""


class Desks:
    """The desks of some workers; `is_near`: all are on one host."""

    def __init__(self, *workers: int, is_near: bool = True):
        self.by_worker = {worker: Desk(self, worker, is_near) for worker in workers}
        self.pairs = LinkPairs(self.by_worker.get)
        self._looking = threading.Lock()

    def look(self) -> bool:
        """Lets each worker handle what has come, one at a time; returns whether there was something."""
        with self._looking:
            found = [desk.wakeups.look() for desk in self.by_worker.values()]
            return any(found)


class Linked:
    """Workers with links, and their ends in one group after the other."""

    def __init__(self, *workers: int, network: dict[str, str] | None = None, kind: type[Links] = Links):
        self.workers = workers
        self.desks = Desks(*workers, is_near=network is None)
        given = self.desks.by_worker.items()
        self.links = {
            worker: kind(desk, address="127.0.0.1", network=network)  # type: ignore[arg-type]
            for worker, desk in given
        }
        self.cuts = {worker: LinkCuts(desk) for worker, desk in given}
        self.ends: dict[int, DirectTransport] = {}
        self._gone: list[Links] = []

    def enter(self, epoch: int) -> list[DirectTransport]:
        """Returns the ends of all workers in the group of an epoch."""
        for worker in self.workers:
            if worker in self.ends:
                self.ends[worker].abandon()
            self.enter_one(worker, epoch)
        return [*self.ends.values()]

    def enter_one(self, worker: int, epoch: int) -> DirectTransport:
        """Returns the end of one worker in the group of an epoch, which the others have not entered yet."""
        joining = DirectBackend(self.cuts[worker], self.links[worker]).joining(epoch, self.workers)
        self.ends[worker] = joining.join()
        return self.ends[worker]

    def replace(self, worker: int, links: Links) -> None:
        """Gives the number of a worker to another one; that before keeps its ends, and reads no more."""
        self._gone.append(self.links[worker])
        self.links[worker] = links
        self.cuts[worker] = LinkCuts(self.desks.by_worker[worker])

    def close(self) -> None:
        """Closes all links."""
        for each in (*self.links.values(), *self._gone):
            each.close()
