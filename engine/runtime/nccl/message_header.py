"""The header of a message under audit: its key as numbers, which the taker compares with the one that it wants."""

from __future__ import annotations

from typing import Final, NamedTuple

from engine.runtime.transport.transfer_key import ProgramKey, ProgramPurpose

NUM_FIELDS: Final = 6
_LETTERS = {ProgramPurpose.ACTIVATION: "F", ProgramPurpose.GRADIENT: "B"}


class Header(NamedTuple):
    """The key of a message, with the epoch and the step in which it is sent."""

    epoch: int
    step: int
    purpose: int
    pipeline: int
    stage: int
    microbatch: int

    @classmethod
    def of(cls, epoch: int, step: int, key: ProgramKey) -> Header:
        """Returns the header of a message."""
        return cls(epoch, step, int(key.purpose), key.pipeline, key.stage, key.item)

    def __str__(self) -> str:
        names = {int(each): f"SEND_{letter}" for each, letter in _LETTERS.items()}
        if self.purpose not in names:
            return f"a message that is none {tuple(self)}"
        what = f"{self.stage}{names[self.purpose]}{self.microbatch}"
        return f"{what} of pipeline {self.pipeline}, step {self.step}, epoch {self.epoch}"
