"""Values: the tensors and counters of a step that one action makes and another needs.

An action needs values, not actions: a value is the same whether its maker ran before or after a failure. A value is
held by a worker, or it is on the wire. A tensor that is updated in place has a counter: `COUNTED` or `ADDED` with
index m says that microbatches 0 to m are in.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple


class Kind(StrEnum):
    """The kind of a value that actions need and make."""

    __hash__ = str.__hash__  # Enum's hash is written in Python and took a quarter of a dry run

    ACTIVATION = "activation"  # output of a forward
    RESIDUAL = "residual"  # tensors that a forward saves for its backward; only one who leaves may send them
    HOSTED = "hosted"  # a residual in memory of the host
    GRADIENT = "gradient"  # of the loss by the input of a stage: output of a backward
    CARRY = "carry"  # of the loss by the state over the sequence behind the slice before: output of a backward
    PENDING = "pending"  # tensors that a backward for the input saves for the one for the weights
    HOSTED_PENDING = "hosted pending"  # likewise, in memory of the host
    COUNTED = "counted"  # counter: the forwards that have updated the buffers
    ADDED = "added"  # counter: the backwards in the gradient accumulator
    STREAMED = "streamed"  # an accumulator with its counters, and the buffers as of the same microbatch
    STATE = "state"  # weights, optimizer state and buffers as of the step boundary
    REDUCED = "reduced"  # the gradient of a stage over all pipelines, with their buffers and losses
    LOGGED = "logged"  # the inputs of the optimizer step of a slot
    VOTED = "voted"  # the vote of one replica, which holds its LOGGED; the index is the worker


class Value(NamedTuple):
    """A value of one step; `index` is a microbatch, a worker if the kind is `VOTED`, or -1 on a whole stage."""

    kind: Kind
    pipeline: int
    stage: int
    index: int = -1  # type: ignore[assignment] # hides tuple's method of that name

    def __str__(self) -> str:
        numbered = "worker" if self.kind is Kind.VOTED else "microbatch"
        index = "" if self.index == -1 else f" {numbered} {self.index}"
        pipeline = f" pipeline {self.pipeline}" if self.pipeline else ""
        return f"{self.kind} of stage {self.stage}{index}{pipeline}"


WIRE: Final = -1
Held = tuple[int, Value]  # (worker, or WIRE, value)
