"""The checkpoint with which a run begins, or goes on after the loss of a state."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Resumption:
    """A checkpoint to begin after: its step, its place (a folder or a URL), its manifest there, and its run.

    `is_named`: the user named its step, and no other step stands in for it. `init` is the hash of the weights that the
    run was once given, empty without them. `other_bits`: the job may have others than the run of the checkpoint.
    """

    step: int
    place: str
    file: str
    run: str = ""
    is_named: bool = False
    init: str = ""
    other_bits: bool = False


def begun_with(origin: Resumption | None) -> int:
    """Returns the last step before training begins: of the checkpoint, -1 without one."""
    return -1 if origin is None else origin.step
