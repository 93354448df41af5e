"""The control messages of a worker about the parts of a checkpoint that it writes."""

from __future__ import annotations

from engine.core.checkpoints.manifest import Part
from engine.core.message_codec import TextsToAgent, ToAgent, message


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
