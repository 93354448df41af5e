"""The keys that the members of an epoch tell each other through the agent, to find each other.

Rule: a wait ends at once when its epoch is over, its group is given up, or this worker is told to stop. Any thread may
call.
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
        self._given_up: set[tuple[int, str]] = set()  # groups of epochs that are not over
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
            self._given_up = {each for each in self._given_up if each[0] > self._over}
            self._changed.notify_all()

    def give_up(self, epoch: int, group: str) -> None:
        """Ends every wait for keys of one group of an epoch."""
        with self._changed:
            self._given_up.add((epoch, group))
            self._changed.notify_all()

    def wait(self, epoch: int, group: str, names: Sequence[str], timeout_s: float) -> list[str]:
        """Returns the values of all keys of a group once they are set.

        Raises RuntimeError if `epoch` is over, if the group is given up, or after a time.
        """
        keys = [f"{group}/{name}" for name in names]
        wanted = {(epoch, key) for key in keys}

        def is_over() -> bool:
            return epoch <= self._over or (epoch, group) in self._given_up

        with self._changed:
            is_told = self._changed.wait_for(lambda: is_over() or self._values.keys() >= wanted, timeout_s)
            if is_over():
                raise RuntimeError(f"epoch {epoch} is over" if epoch <= self._over else f"group {group} was given up")
            if not is_told:
                raise RuntimeError(f"no worker has set {', '.join(keys)} in time")
            return [self._values[epoch, key] for key in keys]
