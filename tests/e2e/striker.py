"""Strikes processes of a session from outside, each at a moment that the events of the run show."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from engine.codec.records import encoded
from engine.core.history.step_files import ENTRY_BYTES, actions_in

Event = dict[str, Any]
Moment = Callable[[Event], bool]

SERVER = -2  # the fork server

_POLL_S = 0.001


class Strike(NamedTuple):
    """One signal to a worker or SERVER, when `moment` holds for an event after the previous strike's."""

    moment: Moment
    worker: int
    number: signal.Signals = signal.SIGKILL


def committed(step: int) -> Moment:
    """Returns the moment at which a step is committed."""
    return lambda event: event["event"] == "commit" and event["step"] == step


def computed(step: int, action: str) -> Moment:
    """Returns the moment at which a worker has finished an action of a step."""
    return lambda event: event["event"] == "action" and event["step"] == step and event["action"] == action


def marked(phase: str, epoch: int) -> Moment:
    """Returns the moment at which the first worker has ended a phase of recovery."""
    return lambda event: event["event"] == "mark" and event["phase"] == phase and event["epoch"] == epoch


def told(kind: str, epoch: int) -> Moment:
    """Returns the moment at which the agent has told the workers an epoch, a plan or a go."""
    return lambda event: event["event"] == kind and event.get("epoch") == epoch


def healing(event: Event) -> bool:
    """Whether a worker has sent or received the state of a slot."""
    return bool(event["event"] == "action" and "HEAL" in event["action"])


class Striker:
    """A thread that makes strikes in their order, as a context around the run; `left` has the strikes not made."""

    def __init__(self, events: Path, strikes: Sequence[Strike]):
        self.left = list(strikes)
        self._events = events
        self._is_over = threading.Event()
        self._pidfds: dict[int, int] = {}
        self._read: dict[str, int] = {}  # file of actions -> bytes
        self._thread = threading.Thread(target=self._strike)

    def __enter__(self) -> Striker:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()
        for pidfd in self._pidfds.values():
            os.close(pidfd)

    def _strike(self) -> None:
        for event in self._follow():
            if event["event"] in ("started", "fork_server"):
                who = event.get("of", SERVER)
                if who in self._pidfds:
                    os.close(self._pidfds[who])
                self._pidfds[who] = os.pidfd_open(event["child"])
            # Several strikes may have the same moment.
            while self.left and self.left[0].moment(event):
                strike = self.left.pop(0)
                signal.pidfd_send_signal(self._pidfds[strike.worker], strike.number)
            if not self.left:
                return

    def _follow(self) -> Iterator[Event]:
        while not self._events.exists() and not self._is_over.wait(_POLL_S):
            pass
        with self._events.open() as file:
            rest = ""
            while not self._is_over.wait(_POLL_S):
                *lines, rest = (rest + file.read()).split("\n")
                yield from map(json.loads, lines)
                yield from self._new_actions()

    def _new_actions(self) -> Iterator[Event]:
        for path in sorted(self._events.parent.glob("steps/actions-*.bin")):
            worker, _ = map(int, path.stem.split("-")[1:])
            data = path.read_bytes()[self._read.get(path.name, 0) :]
            data = data[: len(data) // ENTRY_BYTES * ENTRY_BYTES]
            self._read[path.name] = self._read.get(path.name, 0) + len(data)
            yield from (json.loads(encoded(each)) for each in actions_in(data, worker))
