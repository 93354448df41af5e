"""A worker's control thread: what the agent says reaches the worker, whatever its main thread is blocked in.

Rule: the main thread waits in one place only. Arrived transfers and the agent's words both wake it there, so that the
control thread can always take the worker out of a wait.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from engine.core.errors import ExitCode
from engine.runtime.link import Link, Message

Found = TypeVar("Found")


class Stopped(Exception):
    """The agent has told this worker to stop; raised out of any wait."""


class Control:
    """The worker's end of its link to the agent."""

    def __init__(self, link: Link):
        self.link = link
        # A token for each piece of news: a queue written in C wakes the main thread sooner than a condition does.
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._inbox: dict[str, list[Message]] = {}
        self._stopped = False
        self.epoch = 0
        self.at = (0, 0, False)  # step, actions begun in it, whether inside the last of them; the main thread writes it
        threading.Thread(target=self._listen, name="control", daemon=True).start()

    def _listen(self) -> None:
        while True:
            message = self.link.receive()
            if message is None:
                # The agent is gone, and with it everyone who could tell this worker what to do.
                os._exit(ExitCode.INTERNAL)
            if message["kind"] == "ping":
                step, index, inside = self.at
                self.send("heartbeat", step=step, index=index, inside=inside)
                continue
            if message["kind"] == "stop":
                self._stopped = True
            elif message["kind"] == "epoch":
                self.epoch = message["epoch"]
            else:
                self._inbox.setdefault(message["kind"], []).append(message)
            self.wake()

    def send(self, kind: str, **fields: Any) -> None:
        """Tells the agent something, in the epoch that this worker knows of."""
        self.link.send(kind, epoch=self.epoch, **fields)

    def wake(self) -> None:
        """Has the main thread look again, from any thread, after what it looks for has been put in place."""
        self._news.put(None)

    def wait_until(self, look: Callable[[], Found | None]) -> Found:
        """Waits until `look`, called again after each piece of news, finds something; raises Stopped when told to."""
        while True:
            if self._stopped:
                raise Stopped
            found = look()
            if found is not None:
                return found
            self._news.get()

    def take(self, kind: str) -> Message:
        """Waits for the next message of a kind and returns it; raises Stopped when told to stop."""

        def look() -> Message | None:
            waiting = self._inbox.get(kind)
            return waiting.pop(0) if waiting else None

        return self.wait_until(look)

    def check(self) -> None:
        """Raises Stopped if this worker has been told to stop."""
        if self._stopped:
            raise Stopped
