"""Keys of messages between workers, equal at sender and receiver; the type of a key says in which channel it goes.

Messages in program order: for each pair of workers, the receiver posts them in the order in which the sender sends
them, by the program that both run. Messages aside: they may come late, or never, and no other message waits for them.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from engine.core.action import Action
from engine.core.errors import ensure
from engine.core.ownership import Grid
from engine.core.program.dependencies import carried
from engine.core.value import Kind, Value
from engine.runtime.transport.tensor_spec import Border

_MAX_TIES = 64


class ProgramPurpose(IntEnum):
    """The content of a message in program order."""

    ACTIVATION = 0
    GRADIENT = 1
    SCATTER = 3
    GATHER = 4
    TIE = 5
    ENDING = 6  # buffers and losses of a pipeline
    LOG = 7


class AsidePurpose(IntEnum):
    """The content of a message aside."""

    VALIDATION = 2
    HEAL = 8
    STREAM = 9
    SHARD = 10


class ProgramKey(NamedTuple):
    """A message in program order; `item` is a microbatch, a tie, a part, or 0, and `number` stands for all fields."""

    purpose: ProgramPurpose
    pipeline: int
    stage: int
    item: int
    number: int


class AsideKey(NamedTuple):
    """A message aside, with the fields of a ProgramKey."""

    purpose: AsidePurpose
    pipeline: int
    stage: int
    item: int
    number: int


class Issued(NamedTuple):
    """One end of a transfer of a program, in the order in which a worker issues them on a backend without tags."""

    is_send: bool
    peer: int
    key: ProgramKey
    border: Border


def program_key(grid: Grid, purpose: ProgramPurpose, pipeline: int, stage: int, item: int = 0) -> ProgramKey:
    """Returns the key of a message in program order for a slot."""
    return ProgramKey(purpose, pipeline, stage, item, _number(grid, purpose, pipeline, stage, item))


def aside_key(grid: Grid, purpose: AsidePurpose, pipeline: int, stage: int, item: int = 0) -> AsideKey:
    """Returns the key of a message aside for a slot."""
    return AsideKey(purpose, pipeline, stage, item, _number(grid, purpose, pipeline, stage, item))


def _number(grid: Grid, purpose: int, pipeline: int, stage: int, index: int) -> int:
    num_indexes = grid.microbatches + _MAX_TIES
    ensure(index < num_indexes, f"index {index} of a transfer, where {num_indexes} are numbered")
    return ((purpose * grid.pipelines + pipeline) * grid.stages + stage) * num_indexes + index


def carrier_key(grid: Grid, transfer: Action) -> ProgramKey:
    """Returns the key of a SEND or RECV of a step."""
    return value_key(grid, carried(transfer))


def value_key(grid: Grid, value: Value) -> ProgramKey:
    """Returns the key of an activation or a gradient."""
    kind, pipeline, stage, microbatch = value
    purpose = ProgramPurpose.GRADIENT if kind is Kind.GRADIENT else ProgramPurpose.ACTIVATION
    return program_key(grid, purpose, pipeline, stage, microbatch)


def validation_key(grid: Grid, transfer: Action) -> AsideKey:
    """Returns the key of a SEND or RECV of a validation pass."""
    _, pipeline, stage, microbatch = carried(transfer)
    return aside_key(grid, AsidePurpose.VALIDATION, pipeline, stage, microbatch)
