"""The records of a run about the paces of its workers, the answers of the policy, and workers that were added."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.history.record import StampedRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceRecord(StampedRecord):
    """Worker `of` has become slow, slower or less slow: `slowness` times its usual time; 1: it is as usual again."""

    of: int
    step: int
    slowness: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRecord(StampedRecord):
    """The policy was asked after a step: why blocks move or not, and the wanted `owners`; empty: the present ones."""

    step: int
    why: str
    owners: tuple[int, ...]

    @property
    def asked(self) -> str:
        """The moment of the question, in words."""
        return f"asked after step {self.step}" if self.step >= 0 else "asked before step 0"


@dataclass(frozen=True, slots=True, kw_only=True)
class CrampedRecord(StampedRecord):
    """Waiting worker `of` has too little memory for a slot and waits on; `why` follows "worker N".

    Without `why` it has enough again.
    """

    of: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedRecord(StampedRecord):
    """The launcher has taken a `request`, a file in the run folder, and starts worker `of`, which will wait.

    `joins`: it becomes a member without a failure, too.
    """

    request: str
    of: int
    joins: bool
