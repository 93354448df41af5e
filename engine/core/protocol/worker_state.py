"""The state of the worker machine: an immutable named tuple, because simulations copy it millions of times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

from engine.core.checkpoint_rules import StateShare
from engine.core.message_kinds import ToAgent
from engine.core.messages import CommitMessage, EpochMessage, GoMessage, NextGroupMessage, OwnPhase
from engine.core.ownership import Grid, Ownership, Slot
from engine.core.program.inventory import PlanMessage, PrepareMessage
from engine.core.program.planner import EpochPlan
from engine.core.protocol.worker_inputs import GroupKey, TransferFailed

# The outputs of the worker machine, for its driver to carry out in order.
#
# Rules: an output that takes time is the last of a step, and the driver answers it with an input. An output that fails
# ends the step: the driver drops the outputs behind it, and the failure is the input. While the main thread is at work,
# the inbox waits. A message that interrupts is an input between two actions of a `Run` or a `Validate`, and ends that
# work without an answer. The answers of all other outputs come from another thread, or there are none.

ProgramKind = Literal["usual", "plan", "heal"]  # heal: a whole step in which new shadows get their state


@dataclass(frozen=True, slots=True)
class Output:
    """One output."""


@dataclass(frozen=True, slots=True)
class SendMessage(Output):
    """Sends a message to the agent."""

    message: ToAgent


@dataclass(frozen=True, slots=True)
class MarkPhase(Output):
    """Records that this worker has reached a phase of a recovery, and tells the agent if a fault waits for it."""

    phase: OwnPhase
    adopted: tuple[Slot, ...] | None = None


@dataclass(frozen=True, slots=True)
class BeginAt(Output):
    """Moves on to an open step: this worker held no replica, so that steps were committed without it."""

    step: int


@dataclass(frozen=True, slots=True)
class CountHeld(Output):
    """Takes in the streams that have arrived, and lists all that this worker holds: `InventoryCounted`."""


@dataclass(frozen=True, slots=True)
class LeaveGroup(Output):
    """Aborts all transfers in the group of an earlier epoch, or the attempt to form it."""


@dataclass(frozen=True, slots=True)
class CloseGroup(Output):
    """Leaves the group when no transfer is under way at any member."""


@dataclass(frozen=True, slots=True)
class FormGroup(Output):
    """Begins to form the group of an epoch, in a thread: `GroupFormed`."""

    epoch: EpochMessage


@dataclass(frozen=True, slots=True)
class FormNextGroup(Output):
    """Begins to form the group of a coming epoch, in a thread, while training continues: `NextGroupFormed`."""

    order: NextGroupMessage


@dataclass(frozen=True, slots=True)
class LeaveNextGroups(Output):
    """Gives up groups of coming epochs, and the attempts to form them."""

    keys: tuple[GroupKey, ...]


@dataclass(frozen=True, slots=True)
class EnterNextGroup(Output):
    """Leaves the present group, in which no transfer is needed any more, for one that was formed meanwhile."""

    key: GroupKey


@dataclass(frozen=True, slots=True)
class MakePlan(Output):
    """Makes the plan of this epoch: `PlanMade`."""

    document: PlanMessage


@dataclass(frozen=True, slots=True)
class PreparePlan(Output):
    """Makes the plan of a coming epoch in the planner thread: `PlanPrepared`."""

    order: PrepareMessage


@dataclass(frozen=True, slots=True)
class LoadPlan(Output):
    """Makes this worker's part of the program of a plan ready to run."""

    plan: EpochPlan


@dataclass(frozen=True, slots=True)
class PlanNextStep(Output):
    """Begins to make the program of the step after one of a recovery, in the planner thread.

    `ownership` is that of `step`, about to begin; then members that stay, on other `hosts` first, and `wanted` owners
    become shadows. An empty `schedule` is the job's own.
    """

    step: int
    ownership: Ownership
    members: tuple[int, ...]
    leaving: tuple[int, ...]
    wanted: tuple[int, ...] = ()
    hosts: tuple[int, ...] = ()
    schedule: str = ""


@dataclass(frozen=True, slots=True)
class TakeNextStep(Output):
    """Makes the result of the last `PlanNextStep` ready to run: `NextStepMade`."""


@dataclass(frozen=True, slots=True)
class Enter(Output):
    """Enters the program that was made ready last, or else that of a whole step, in the group of the epoch."""

    ownership: Ownership
    schedule: str = ""  # of the epoch; empty: the job's own


@dataclass(frozen=True, slots=True)
class Run(Output):
    """Runs the program up to its optimizer steps: `ProgramEnded` or `TransferFailed`; can be interrupted."""

    program: ProgramKind


@dataclass(frozen=True, slots=True)
class TakeStep(Output):
    """Takes the optimizer step of every replica in the program: `StepTaken`."""

    commit: CommitMessage


@dataclass(frozen=True, slots=True)
class CatchUp(Output):
    """Takes the optimizer step of every replica that has its log, after a fence before the commit: `StepTaken`."""

    commit: CommitMessage


@dataclass(frozen=True, slots=True)
class Adopt(Output):
    """Builds slots from the replicas of the same stages in another pipeline."""

    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class Drop(Output):
    """Drops the replicas of all slots but `kept`."""

    kept: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class Audit(Output):
    """Sends the hashes of the whole replicas among `slots` after a step; can fail and be interrupted."""

    step: int
    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class Keep(Output):
    """Begins to write a checkpoint of some slots after a step; the next step is taken only when there is a copy."""

    step: int
    shares: tuple[StateShare, ...]


@dataclass(frozen=True, slots=True)
class KeepLast(Output):
    """Writes a checkpoint of some slots after the last committed step, and waits: the process is about to end."""

    step: int
    shares: tuple[StateShare, ...]


@dataclass(frozen=True, slots=True)
class ReleaseSends(Output):
    """Releases the tensors that were sent in a committed step; can fail."""


@dataclass(frozen=True, slots=True)
class Validate(Output):
    """Runs this worker's part of the validation pass after a step: `PassEnded`; can fail and be interrupted."""

    step: int
    ownership: Ownership


@dataclass(frozen=True, slots=True)
class ReportDone(Output):
    """Tells the agent that all of the last step is done, with the peaks of these slots."""

    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class End(Output):
    """Ends the process with an exit code."""

    code: int


class Mode(StrEnum):
    """The activity of a worker, or its wait."""

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
    schedule: str = ""  # of the epoch; empty: the job's own
    message: EpochMessage | None = None  # of the epoch
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
    known: tuple[PlanMessage, ...] = ()  # the grids of the last plans: parts of the next one are differences to one
    kept: tuple[Slot, ...] = ()  # the slots whose state after the last step it has begun to write

    @property
    def awaits_group(self) -> bool:
        """Whether training continues in the epoch and its group is not formed: only what interrupts is taken.

        The others do not wait for a worker without a part in the step, so commits may have come already.
        """
        return self.mode is Mode.PLANNED and self.go is not None and self.forming > 0
