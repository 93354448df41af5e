"""The state of the worker machine: an immutable named tuple, because simulations copy it millions of times."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from engine.core.messages import EpochMessage, GoMessage
from engine.core.ownership import Grid, Ownership, Slot
from engine.core.recovery.plan import EpochPlan
from engine.core.worker.inputs import GroupKey, TransferFailed
from engine.core.worker.outputs import ProgramKind


class Mode(StrEnum):
    """What a worker does, or waits for."""

    __hash__ = str.__hash__  # Enum's hash is written in Python, and the table is read for every input

    JOINING = "joining"
    WAITING = "waiting"  # waits for an epoch that has it as a member
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
    """All that a worker has decided so far, at first nothing; `epoch` is the one that it has entered."""

    mode: Mode = Mode.JOINING
    worker: int = -1
    epoch: int = 0
    step: int = 0  # the open one
    ownership: Ownership = Ownership(Grid(0, 0), ())  # of the open step
    held: tuple[Slot, ...] = ()  # the slots that it owns and shadows in the open step
    members: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()  # members that had given notice when the epoch was made
    wanted: tuple[int, ...] = ()  # the owners of all slots that were wanted then; empty if none moves
    hosts: tuple[int, ...] = ()  # a number for the host of each member; empty if all are on one
    told: EpochMessage | None = None  # the message of the epoch
    plan: EpochPlan | None = None  # of the epoch
    go: GoMessage | None = None  # of the epoch
    forming: int = 0  # the epoch whose group is being formed; 0 if none is
    failure: TransferFailed | None = None  # why the group of the epoch could not be formed
    program: ProgramKind = "usual"
    opens: bool = False  # the next step has another program, because this one is of a recovery
    is_over: bool = False  # the last step is committed
    prepared: tuple[EpochPlan, ...] = ()  # of coming epochs, and of the one before them
    next_groups: Mapping[GroupKey, bool] = {}  # of coming epochs, and whether each is formed; never modified
    has_given_notice: bool = False
    validate_every: int = 0
    audit_every: int = 0
    kept: tuple[Slot, ...] = ()  # the slots whose state after the last step it has begun to write

    @property
    def awaits_group(self) -> bool:
        """Whether training goes on in the epoch, and its group is not formed: only what interrupts is taken.

        The others do not wait for a worker without a part in the step, so that commits may have come already.
        """
        return self.mode is Mode.PLANNED and self.go is not None and self.forming > 0
