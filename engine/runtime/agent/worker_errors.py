"""Exceptions that workers raise: whether the run goes on without the worker.

Rules: a worker that has raised counts as dead if other workers can take over its slots. The same error from a second
worker in the same step comes from the model: it would end one heir after the other, so it ends the run. After the last
commit no exception ends the run: every step is committed, and only results of the last step can be lost.
"""

from __future__ import annotations

from engine.core.membership.state import State
from engine.core.membership.verdicts import heirs
from engine.core.messages import RaisedMessage


class WorkerErrors:
    """The exceptions of a run so far."""

    def __init__(self) -> None:
        self._raised: set[tuple[int, str]] = set()  # step and error
        self._words: dict[int, str] = {}  # by worker

    def of(self, worker: int) -> str:
        """Returns the exception that ended a worker, as words that follow "worker N"; empty if there was none."""
        return self._words.get(worker, "")

    def is_survivable(self, worker: int, raised: RaisedMessage, state: State) -> bool:
        """Returns whether the run goes on after an exception of a worker."""
        self._words[worker] = raised.exception.in_verdict()
        error = (raised.step, raised.exception.error)
        is_known = error in self._raised
        self._raised.add(error)
        return state.is_over or (not is_known and not heirs(state, (worker,)).lost)
