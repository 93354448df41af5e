"""The control messages of a worker about the parts of a checkpoint that it writes, and those that order one."""

from __future__ import annotations

from engine.core.checkpoints.manifest import Part
from engine.core.message_codec import TextsToAgent, ToAgent, ToWorker, message
from engine.core.messages import CommitMessage, EpochMessage, GoMessage


def keeps(told: ToWorker | None) -> bool:
    """Returns whether a message to the workers orders a checkpoint of the last committed step."""
    if isinstance(told, EpochMessage):
        return keeps(told.commit) or keeps(told.go)
    return isinstance(told, CommitMessage | GoMessage) and told.keep


@message
class KeptMessage(ToAgent):
    """A part of the checkpoint of a step is on disk. The times are those of its write and of its sync.

    `copy_ns` is the time of the copy of all that the worker writes of this step, with its first part, else 0.
    """

    step: int
    part: Part
    copy_ns: int
    write_ns: int
    sync_ns: int


@message
class UnkeptMessage(TextsToAgent):
    """The worker cannot write its share of the checkpoint of a step; training goes on."""

    step: int
    why: str
