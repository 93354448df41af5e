"""Verdicts as data: the workers that are out with an epoch, each with its cause and its last known position.

Rule: decisions use the cause and the position; the sentence is only for people.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple


class Cause(StrEnum):
    """The cause for which a worker is out."""

    DEATH = "death"  # its process ended before it was done, by a signal or with an exit code
    RAISED = "raised"  # an exception ended it
    NODE_LOST = "node lost"  # the lease of its host has expired
    SILENCE = "silence"  # no heartbeat
    HANG = "hang"  # inside one action for too long
    NO_ANSWER = "no answer"  # it did not answer in time
    GIVEN_UP = "given up"  # a transfer failed repeatedly, and this end of it was chosen
    FINISHED = "finished"  # it was done, and left before the job was over
    LEFT = "left"  # it had given notice, and no slot needs it any more


class Position(NamedTuple):
    """The position in a worker's last heartbeat: step, number of actions begun, and whether it was waiting."""

    step: int
    number: int
    waiting: bool

    def __str__(self) -> str:
        if not self.number:
            return f"before its first action of step {self.step}"
        return f"while it waited in step {self.step}" if self.waiting else f"in an action of step {self.step}"


class Exclusion(NamedTuple):
    """One worker of a verdict; `why` is a sentence that follows "worker N", and names `seen` at its end.

    `alive_ns` is the last sign of life of a worker that is silent or hangs, on the clock of the coordinator: reports
    use it, decisions do not.
    """

    worker: int
    why: str
    cause: Cause = Cause.DEATH  # of old, an entry had no cause
    seen: Position | None = None
    alive_ns: int | None = None

    @property
    def is_loss(self) -> bool:
        """Whether the job lost the worker; else it had finished, or had left with notice."""
        return self.cause not in (Cause.FINISHED, Cause.LEFT)

    @property
    def how(self) -> str:
        """The sentence without the position."""
        return self.why.removesuffix(f", {self.seen}")


Verdict = tuple[Exclusion, ...]


def excluded(
    worker: int, cause: Cause, how: str, position: Position | None = None, alive_ns: int | None = None
) -> Exclusion:
    """Returns the entry of a verdict; its sentence consists of `how` and the position."""
    return Exclusion(worker, f"{how}, {position}" if position else how, cause, position, alive_ns)


def in_words(out: Iterable[Exclusion]) -> str:
    """Returns the sentences about all of the workers."""
    return "; ".join(f"worker {each.worker} {each.why}" for each in out)
