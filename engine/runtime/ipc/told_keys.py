"""The keys that the members of an epoch tell each other through the agent, to find each other.

Rule: a wait ends at once when its epoch is over or this worker is told to stop. Any thread may call.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence


class ToldKeys:
    """The keys of all epochs that are not over."""

    def __init__(self) -> None:
        self._over: float = -1  # the highest epoch that is over
        self._values: dict[tuple[int, str], str] = {}
        self._changed = threading.Condition()

    def put(self, epoch: int, key: str, value: str) -> None:
        """Sets a key, which is ignored if its epoch is over."""
        with self._changed:
            if epoch > self._over:
                self._values[epoch, key] = value
                self._changed.notify_all()

    def end(self, epoch: float = math.inf) -> None:
        """Ends the waits of an epoch and of lower ones, and forgets their keys; without it those of any epoch."""
        with self._changed:
            self._over = max(epoch, self._over)
            self._values = {key: value for key, value in self._values.items() if key[0] > self._over}
            self._changed.notify_all()

    def wait(self, epoch: int, keys: Sequence[str], timeout_s: float) -> list[str]:
        """Returns the values of all keys once they are set; raises RuntimeError if `epoch` is over, or after a time."""
        wanted = {(epoch, key) for key in keys}
        with self._changed:
            is_told = self._changed.wait_for(lambda: epoch <= self._over or self._values.keys() >= wanted, timeout_s)
            if epoch <= self._over:
                raise RuntimeError(f"epoch {epoch} is over")
            if not is_told:
                raise RuntimeError(f"no worker has set {', '.join(keys)} in time")
            return [self._values[epoch, key] for key in keys]
