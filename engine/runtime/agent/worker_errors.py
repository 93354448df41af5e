"""Exceptions that workers raise: whether the others go on without the one that did.

Rules: a worker that raised is dead like any other when somebody can take over. The same error from a second worker in
the same step is the model's own, and would end one heir after the other: it ends the run.
"""

from __future__ import annotations

from engine.core.membership.state import State
from engine.core.membership.verdicts import heirs
from engine.core.messages import RaisedMessage


class WorkerErrors:
    """What has been raised so far."""

    def __init__(self) -> None:
        self._raised: set[tuple[int, str]] = set()  # step and error

    def is_survivable(self, worker: int, raised: RaisedMessage, state: State) -> bool:
        """Says whether the run goes on after an exception of a worker."""
        error = (raised.step, raised.error)
        is_known = error in self._raised
        self._raised.add(error)
        return not is_known and not heirs(state, (worker,)).lost
