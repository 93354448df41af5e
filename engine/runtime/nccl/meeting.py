"""The meeting of the members of a group: they tell each other values over their links to the agent.

    worker                     agent                        every worker
    KeyMessage(epoch, key) --> passes it on to each worker  keeps the keys of its newest epoch

Rule: no wait outlasts its epoch or its group, so that a worker leaves a group that never comes together.
"""

from __future__ import annotations

import base64

from engine.core.process_messages import KeyMessage
from engine.runtime.ipc.control import Control

_TIMEOUT_S = 1800.0


class AgentMeeting:
    """The meeting of one `group` of an epoch."""

    def __init__(self, control: Control, epoch: int, group: str):
        self._control, self._epoch, self._group = control, epoch, group

    def set(self, key: str, value: bytes) -> None:
        """Tells a value to all workers."""
        self._control.send(KeyMessage(self._epoch, f"{self._group}/{key}", base64.b64encode(value).decode()))

    def get(self, key: str) -> bytes:
        """Waits for a value; raises RuntimeError as soon as the epoch is over or the group is given up."""
        (value,) = self._control.keys.wait(self._epoch, self._group, [key], _TIMEOUT_S)
        return base64.b64decode(value)

    def give_up(self) -> None:
        """Ends the present wait and every later one; any thread may call."""
        self._control.keys.give_up(self._epoch, self._group)
