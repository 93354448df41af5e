"""The rendezvous of an epoch: its members tell each other keys over their links to the agent.

    worker                     agent                        every worker
    KeyMessage(epoch, key) --> passes it on to each worker  keeps the keys of its newest epoch

Rule: no wait outlasts its epoch or its group, so that a worker leaves a group that never comes together.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import Store

from engine.core.process_messages import KeyMessage
from engine.runtime.ipc.control import Control

_TIMEOUT = timedelta(minutes=30)


class Rendezvous(Store):
    """The keys of one `group` of an epoch; for gloo, which sets, waits and gets."""

    def __init__(self, control: Control, epoch: int, group: str):
        super().__init__()
        self._control = control
        self._epoch = epoch
        self._group = group

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # torch's stub has text
        """Sets a key, for all workers."""
        self._control.send(KeyMessage(self._epoch, f"{self._group}/{key}", base64.b64encode(value).decode()))

    def get(self, key: str) -> bytes:
        """Returns the value of a key; waits, and raises, as `wait` does."""
        (value,) = self._wait([key], _TIMEOUT)
        return base64.b64decode(value)

    def wait(self, keys: Sequence[str], timeout: timedelta = _TIMEOUT) -> None:
        """Waits until all keys are set; raises RuntimeError after `timeout`, or as soon as the epoch is over."""
        self._wait(keys, timeout)

    def give_up(self) -> None:
        """Ends the present wait and every later one; any thread may call."""
        self._control.keys.give_up(self._epoch, self._group)

    def _wait(self, keys: Sequence[str], timeout: timedelta) -> list[str]:
        return self._control.keys.wait(self._epoch, self._group, keys, timeout.total_seconds())
