"""A worker's control thread: what the agent says reaches the worker, whatever its main thread is blocked in.

Rule: the main thread waits on one condition only. Arrived transfers and the agent's words both set it, so that the
control thread can always take the worker out of a wait.
"""

from __future__ import annotations

import os
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
        self.condition = threading.Condition()
        self._inbox: dict[str, list[Message]] = {}
        self._stopped = False
        threading.Thread(target=self._listen, name="control", daemon=True).start()

    def _listen(self) -> None:
        while True:
            message = self.link.receive()
            if message is None:
                # The agent is gone, and with it everyone who could tell this worker what to do.
                os._exit(ExitCode.INTERNAL)
            with self.condition:
                if message["kind"] == "stop":
                    self._stopped = True
                else:
                    self._inbox.setdefault(message["kind"], []).append(message)
                self.condition.notify_all()

    def send(self, kind: str, **fields: Any) -> None:
        """Tells the agent something."""
        self.link.send(kind, **fields)

    def wait_until(self, look: Callable[[], Found | None]) -> Found:
        """Waits until `look`, called under the condition, finds something; raises Stopped when told to stop."""
        with self.condition:
            while True:
                if self._stopped:
                    raise Stopped
                found = look()
                if found is not None:
                    return found
                self.condition.wait()

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
