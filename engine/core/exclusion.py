"""Verdicts as data: the workers that are out with an epoch, each with the cause and the place where it was last seen.

Rule: decisions go by the cause and the place; the sentence is only for people.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple


class Cause(StrEnum):
    """Why a worker is out."""

    DEATH = "death"  # its process ended before it was done, by a signal or with an exit code
    NODE_LOST = "node lost"  # the lease of its host has expired
    SILENCE = "silence"  # no heartbeat
    HANG = "hang"  # inside one action for too long
    NO_ANSWER = "no answer"  # it owes the epoch an answer
    GIVEN_UP = "given up"  # a transfer failed again and again, and one of the two ends has to go
    FINISHED = "finished"  # it was done, and left before the job was over
    LEFT = "left"  # it had given notice, and no slot needs it any more


class Position(NamedTuple):
    """The place in a step that a worker's last heartbeat told: the count of actions begun, and whether it waited."""

    step: int
    number: int
    waiting: bool

    def __str__(self) -> str:
        return f"{'after' if self.waiting else 'inside'} action {self.number} of step {self.step}"


class Exclusion(NamedTuple):
    """One worker of a verdict; `why` is a sentence that follows "worker N", and names `seen` at its end."""

    worker: int
    why: str
    cause: Cause
    seen: Position | None = None

    @property
    def how(self) -> str:
        """The sentence without the place."""
        return self.why.removesuffix(f", {self.seen}")


Verdict = tuple[Exclusion, ...]


def excluded(worker: int, cause: Cause, how: str, seen: Position | None = None) -> Exclusion:
    """Returns the entry of a verdict; its sentence is made of `how` and the place."""
    return Exclusion(worker, f"{how}, {seen}" if seen else how, cause, seen)


def in_words(out: Iterable[Exclusion]) -> str:
    """Returns the sentences about all of the workers."""
    return "; ".join(f"worker {each.worker} {each.why}" for each in out)


def verdict_of(event: Mapping[str, Any]) -> Verdict:
    """Returns the verdict of an epoch's record."""
    return tuple(map(exclusion_of, event["verdict"]))


def exclusion_of(entry: Sequence[Any]) -> Exclusion:
    """Returns an entry of a verdict from its form in JSON; an entry without a cause, as of old, tells of a death."""
    worker, why, cause, seen = (*entry, Cause.DEATH, None)[:4]
    return Exclusion(worker, why, Cause(cause), Position(*seen) if seen else None)
