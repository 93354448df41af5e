"""The state of the worker machine: an immutable named tuple, because simulations copy it millions of times."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from engine.core.messages import EpochMessage, GoMessage
from engine.core.ownership import Grid, Ownership, Slot
from engine.core.recovery.plan import EpochPlan
from engine.core.worker.inputs import TransferFailed
from engine.core.worker.outputs import ProgramKind


class Mode(StrEnum):
    """What a worker does, or waits for."""

    __hash__ = str.__hash__  # Enum's hash is written in Python, and the table is read for every input

    JOINING = "joining"
    BOUNDARY = "at a boundary"  # waits for an epoch
    FROZEN = "frozen"  # counts its inventory, waits for the plan, makes it
    PLANNED = "planned"  # waits for the start, and for its group
    RUNNING = "running"
    VOTED = "voted"  # waits for the commit, takes the step, makes the next one ready
    VALIDATING = "validating"  # runs the pass, waits for its result
    SUSPECTING = "suspecting"  # waits for the epoch that has the verdict
    DONE = "done"  # waits for the other workers
    OUT = "out"


class WorkerState(NamedTuple):
    """All that a worker has decided so far; `epoch` is the one that it has entered."""

    mode: Mode
    worker: int
    epoch: int
    step: int  # the open one
    ownership: Ownership  # of the open step
    held: tuple[Slot, ...]  # the slots that it owns and shadows in the open step
    members: tuple[int, ...]
    leaving: tuple[int, ...]  # members that had given notice when the epoch was made
    told: EpochMessage | None  # the message of the epoch
    plan: EpochPlan | None  # of the epoch
    go: GoMessage | None  # of the epoch
    forming: int  # the epoch whose group is being formed; 0 if none is
    failure: TransferFailed | None  # why the group of the epoch could not be formed
    program: ProgramKind
    opens: bool  # the next step has another program, because this one is of a recovery
    is_over: bool  # the last step is committed
    prepared: tuple[EpochPlan, ...]  # of coming epochs, and of the one before them
    has_given_notice: bool
    validate_every: int
    audit_every: int


def begin() -> WorkerState:
    """Returns the state of a process that has just been started."""
    ownership = Ownership(Grid(0, 0), ())
    return WorkerState(
        mode=Mode.JOINING,
        worker=-1,
        epoch=0,
        step=0,
        ownership=ownership,
        held=(),
        members=(),
        leaving=(),
        told=None,
        plan=None,
        go=None,
        forming=0,
        failure=None,
        program="usual",
        opens=False,
        is_over=False,
        prepared=(),
        has_given_notice=False,
        validate_every=0,
        audit_every=0,
    )
