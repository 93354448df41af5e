"""The inputs of the worker machine: messages of the agent, and the answers of the driver to outputs.

Rules: a message that waits in an `Inbox` is an input when the main thread waits, or between two of its actions if it
interrupts. `PlanPrepared`, `NextGroupFormed`, `NoticeReceived` and a message that asks for a prepared plan or for the
next group are inputs at any time. No rule of a worker reads a clock, so no input has a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from engine.core.message_kinds import ToWorker
from engine.core.messages import CommitMessage, EpochMessage, Evaluation, StopMessage
from engine.core.ownership import Grid, Ownership
from engine.core.program.handoff import Ship
from engine.core.program.inventory import PlanMessage, from_json
from engine.core.program.owners import owners_program
from engine.core.program.plan_parts import both_digests, ownership_of
from engine.core.program.planner import EpochPlan, PlanInput, ends_tied_stages_together, make_plan, plan_of


class GroupKey(NamedTuple):
    """A group that is formed before its epoch: the epoch, and the number of the attempt."""

    epoch: int
    number: int


@dataclass(frozen=True, slots=True)
class Input:
    """One input."""


@dataclass(frozen=True, slots=True)
class ProtocolMessage(Input):
    """The agent has sent a message of the protocol."""

    message: ToWorker


@dataclass(frozen=True, slots=True)
class NoticeReceived(Input):
    """The worker got SIGTERM: its sender is going to end it soon."""


@dataclass(frozen=True, slots=True)
class StagesBuilt(Input):
    """The worker has joined: its stages are built, and the first group is formed; or it `waits` without either.

    `validate_every` and `audit_every` are in steps; 0 is never. `step` is the first. With `joins` it becomes a member
    without a failure.
    """

    worker: int
    ownership: Ownership
    validate_every: int
    audit_every: int
    step: int = 0
    waits: bool = False
    joins: bool = False


@dataclass(frozen=True, slots=True)
class InventoryCounted(Input):
    """The answer to `CountHeld`: the inventory as text, and the places of the slots with a whole replica."""

    holds: str
    whole: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupFormed(Input):
    """The answer to `FormGroup`: the group of the epoch is formed, or cannot be formed because of a failure."""

    epoch: int
    failure: TransferFailed | None = None


@dataclass(frozen=True, slots=True)
class NextGroupFormed(Input):
    """The answer to `FormNextGroup`: this worker's part of the group, or why there is none."""

    key: GroupKey
    failure: str = ""


@dataclass(frozen=True, slots=True)
class PlanMade(Input):
    """The answer to `MakePlan`."""

    plan: EpochPlan


@dataclass(frozen=True, slots=True)
class PlanPrepared(Input):
    """The answer to `PreparePlan`; there is none if the plan cannot be used."""

    number: int
    plan: EpochPlan


@dataclass(frozen=True, slots=True)
class StepTaken(Input):
    """The answer to `TakeStep` and to `CatchUp`: every replica here has taken the step."""

    commit: CommitMessage


@dataclass(frozen=True, slots=True)
class NextStepMade(Input):
    """The answer to `TakeNextStep`: the ownership with all shadows, some of which may be new and need a heal."""

    ownership: Ownership
    is_healing: bool


@dataclass(frozen=True, slots=True)
class ProgramEnded(Input):
    """An answer to `Run`: the program has run up to its optimizer steps."""


@dataclass(frozen=True, slots=True)
class PassEnded(Input):
    """An answer to `Validate`; only the owner of the last stage has results."""

    sets: tuple[Evaluation, ...] | None = None


@dataclass(frozen=True, slots=True)
class TransferFailed(Input):
    """The other answer to `Run`, `Validate`, `Audit` and `ReleaseSends`; `peer` is the other end, if it is known."""

    text: str
    peer: int | None


# The inbox of a worker: messages wait in it until the main thread can take them.
#
# Rules: agent and worker share one channel that keeps the order, so all messages after an epoch belong to it. An epoch
# therefore drops the messages before it: a commit among them comes with the epoch. It interrupts, as the end does.


class Inbox(NamedTuple):
    """The messages that wait, in the order in which they are taken; `epoch` is the newest that has come."""

    waiting: tuple[ToWorker, ...] = ()
    epoch: int = 0

    @property
    def is_urgent(self) -> bool:
        """Whether the first message interrupts the main thread."""
        return bool(self.waiting) and isinstance(self.waiting[0], (EpochMessage, StopMessage))


def arrived(inbox: Inbox, message: ToWorker) -> Inbox:
    """Returns the inbox after a message; an epoch that is not newer changes nothing."""
    waiting, epoch = inbox
    if isinstance(message, StopMessage):
        # The commit of the step that is to be kept is obeyed first.
        num_first = int(any(isinstance(each, CommitMessage) and each.step == message.keep for each in waiting[:1]))
        return Inbox((*waiting[:num_first], message, *waiting[num_first:]), epoch)
    if not isinstance(message, EpochMessage):
        return Inbox((*waiting, message), epoch)
    if message.epoch <= epoch:
        return inbox
    stops = tuple(each for each in waiting if isinstance(each, StopMessage))
    return Inbox((*stops, message), message.epoch)


def taken(inbox: Inbox) -> tuple[ToWorker, Inbox]:
    """Returns the first message, and the inbox without it."""
    return inbox.waiting[0], Inbox(inbox.waiting[1:], inbox.epoch)


def without(inbox: Inbox, message: ToWorker) -> Inbox:
    """Returns the inbox without one of its messages, which was taken out of turn by a worker that has not joined."""
    return inbox._replace(waiting=tuple(each for each in inbox.waiting if each is not message))


def plan_epoch(grid: Grid, schedule: str, document: PlanMessage) -> EpochPlan:
    """Returns the plan of a document, the same on all members; raises InvariantError if it is impossible."""
    ownership, repair = ownership_of(grid, document.owners, document.shadows), document.repair
    if repair is not None and ends_tied_stages_together(repair.done, grid):  # a coordinator knows nothing of ties
        program = owners_program(document.schedule or schedule, grid, document.before)
        change = f"{document.leaving} {document.wanted} {document.digest or both_digests(document, repair)}"
        return EpochPlan(document, ownership, plan_of(repair, program, ownership, document.committed + 1, change))
    inventories = tuple(from_json(text) for _, text in document.inventories)
    ships = tuple(Ship(*each) for each in document.ships)
    source = PlanInput(document.epoch, document.committed, ownership, inventories, ships)
    return EpochPlan(document, ownership, make_plan(source))
