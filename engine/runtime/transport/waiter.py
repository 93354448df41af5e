"""The place where the main thread of a worker waits, as the data plane needs it; the control thread provides it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

Found = TypeVar("Found")


class Waiter(Protocol):
    """Waits in the main thread, and is woken from any thread."""

    def wait_until(self, look: Callable[[], Found | None]) -> Found:
        """Waits until `look`, called again after each `wake`, finds something; may raise to end the wait."""

    def wake(self) -> None:
        """Has the main thread look again."""
