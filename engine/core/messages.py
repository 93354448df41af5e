"""The control messages of training, one class each; `epoch` of a worker's message is the one that it has accepted.

Those about plans and inventories are in `engine/core/program/inventory.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from engine.core.errors import Problem, WorkerException
from engine.core.message_kinds import CUT, LastWords, Message, Plain, TextsToAgent, ToAgent, ToWorker, message
from engine.core.ownership import Members, Slot
from engine.core.units import Scalar

BorderSpecs = tuple[tuple[tuple[int, ...], str, bool], ...]  # shape, dtype, needs gradient of each tensor
OwnPhase = Literal["fence", "regroup", "inventory", "plan"]  # phases of a recovery that only workers know of


@message
class WelcomeMessage(ToWorker):
    """The first message to a worker: all that it needs to join."""

    worker: int
    job: Plain
    owners: tuple[int, ...]
    shadows: tuple[tuple[int, ...], ...]
    ranks: tuple[int, ...]  # the workers in the order of the process group
    num_lines: int  # of the progress board
    faults: tuple[Plain, ...]
    checkpoint: Plain | None = None  # a `Resumption`: training continues after it
    checkpoints: str = ""  # the folder or the URL of the checkpoints; empty if the job keeps none
    run: str = ""  # the name of its folder
    waits: bool = False  # it owns nothing, and waits until an epoch makes it a member
    joins: bool = False  # without a failure, too
    address: str = "127.0.0.1"  # where its transfers listen
    start: str = ""  # of all workers together: those that begin again have another text
    network: Plain | None = None  # of a run on several hosts: its certificate and key as PEM, or nothing for clear text
    local_rank: int = 0  # the least number that no other living worker of its host has: that of its GPU
    host: str = ""  # of several
    outputs: str = ""  # the folder of the outputs of a prediction


@message
class PartitionMessage(ToWorker):
    """How the model was cut: the first layer of each stage; every worker waits for it."""

    starts: tuple[int, ...]


@message
class GoMessage(ToWorker):
    """Training goes on in the epoch, or ends; before that a validation pass may be due."""

    end: bool
    validate: bool
    keep: bool = False  # the state after the last step is written as a checkpoint, unless that has begun


@message
class CommitMessage(ToWorker):
    """A step is committed: gradients are multiplied with `clip_factor`; `then` names the event after the optimizer.

    `lr` is -1 unless it follows a plateau; `monitored` has the value that the rate follows, if there is one.
    """

    step: int
    clip_factor: float  # 0: the optimizer skips the step
    then: Literal["step", "end", "epoch"]
    keep: bool = False  # the state after the step is written as a checkpoint
    lr: float = -1.0
    monitored: tuple[float, ...] = ()


@message
class EpochMessage(ToWorker):
    """A new epoch, sent to every worker as soon as it is decided, and again to a worker that is behind."""

    epoch: int
    members: Members
    gather: bool  # the members answer with their inventories, and wait for the plan
    regroup: bool  # they form a new group, too
    commit: CommitMessage | None  # the last one
    digest: str | None  # of the plan that they have prepared
    go: GoMessage | None  # when no message is left to wait for
    group: int = 0  # the number of the attempt whose group, formed while they trained, they enter; 0 for none
    left_ms: tuple[tuple[int, int], ...] = ()  # the time that workers which leave have left, by worker
    hosts: tuple[int, ...] = ()  # of the members, as in a plan, if the epoch begins without one


@message
class ValidatedMessage(ToWorker):
    """The outcome of the validation pass after a step is known; the next step may begin."""

    step: int


@message
class ArmMessage(ToWorker):
    """Faults that became known while the job runs."""

    faults: tuple[Plain, ...]


@message
class InflictMessage(ToWorker):
    """The worker is to harm itself: the fault is recorded. `do` names the kind, `slot` the slot that it is about."""

    fault: str
    do: str
    parameters: Mapping[str, Scalar]
    slot: Slot | None


@message
class FiredMessage(ToWorker):
    """A fault has struck, at any worker; the worker that waits for it goes on."""

    fault: str


@message
class CutMessage(TextsToAgent):
    """The owner of the first slot has cut the model: first layer of each stage, names of layers, notes for the user."""

    starts: tuple[int, ...]
    layers: tuple[str, ...]
    samples: int = 0  # in the training set; 0 for data without limit
    notes: tuple[str, ...] = ()


@message
class BorderMessage(ToAgent):
    """The border behind a stage, as learnt behind the one `before` it; there is none before the first stage."""

    stage: int
    before: tuple[BorderSpecs, ...]
    behind: BorderSpecs


@message
class BordersMessage(ToWorker):
    """The borders behind the first stages: one for all owners, more for the next owner, all for all workers."""

    borders: tuple[BorderSpecs, ...]


@message
class ReadyMessage(ToAgent):
    """The worker has joined, and waits for training."""


@message
class WaitingMessage(ToAgent):
    """The worker has code and data, and waits to become a member; `joins`: without a failure, too."""

    joins: bool = False


@message
class HeartbeatMessage(ToAgent):
    """The answer to a ping: the open step, the actions begun in it, and whether the last of them is running."""

    epoch: int
    step: int
    index: int
    inside: bool
    quiet_ns: int = 0  # without news; then `counts` has each member, and the messages to it, awaited and received
    counts: tuple[tuple[int, int, int, int], ...] = ()
    device: str = ""  # while inside: the worker's GPU, if that has not come to the end of its work


@message
class AuditMessage(ToAgent):
    """The hashes of layers of a worker in a pipeline after a step: state, buffers, marks of the tensors up to each."""

    step: int
    pipeline: int
    rows: tuple[tuple[int, str, str, tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]], ...]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The means over `samples` of an evaluation set: the loss, and metrics by name."""

    name: str
    samples: int
    loss: float
    metrics: Mapping[str, float]


@message
class ValidationMessage(ToAgent):
    """The results of the validation pass after a step; none if the data has no evaluation set."""

    step: int
    sets: tuple[Evaluation, ...]


@message
class FinishedMessage(ToAgent):
    """The worker has done all of the last step, and waits to be let go."""

    epoch: int
    peak_stash: tuple[tuple[int, int, int], ...]  # pipeline, stage, microbatches kept at most
    peak_memory_kib: int
    sizes: tuple[tuple[int, int, int, int, int, int, int], ...]  # of each own stage: its number and its StageBytes


@message
class SuspicionMessage(TextsToAgent):
    """A transfer with `peer` has failed, or a group could not be formed; the worker waits for an epoch."""

    epoch: int
    text: str
    peer: int | None


@message
class RefusedMessage(LastWords):
    """The last message of a worker that has found mistakes of the user."""

    problems: tuple[Problem, ...]


@message
class FailedMessage(LastWords):
    """The last message of a worker that has found an error of the run; `code` is the exit code that it asks for."""

    error: str
    code: int


@message
class RaisedMessage(LastWords):
    """The last message of a worker that an exception ends: its time, the open step, and the exception."""

    at_ns: int
    step: int
    exception: WorkerException


@message
class StrikeMessage(ToAgent):
    """The moment of a fault has come at this worker, whose last action is `done`, of `step`; empty if there is none."""

    fault: str
    step: int = -1
    done: str = ""


@message
class FaultEffectMessage(TextsToAgent):
    """The worker has felt a fault: `how` says so in words."""

    fault: str
    how: str


@message
class MarkMessage(ToAgent):
    """The worker has come to a phase of a recovery that a fault waits for."""

    epoch: int
    phase: OwnPhase


# The control messages about processes: between the launcher and its fork server, lanes; signs of life, ends; groups.
#
# `messages.py` has those of training.


@message
class BeginMessage(Message):
    """The launcher asks the fork server for a process in between, before the first of some children.

    The server imports the modules of `preload` first.
    """

    preload: tuple[str, ...] = ()


@message
class ForkMessage(Message):
    """The launcher asks the process in between for a child, with the child's descriptors: first pipe and log."""

    role: str
    name: str


@message
class ForkedMessage(Message):
    """The process in between has forked a child, whose pidfd comes along."""

    pid: int


@message
class UnforkedMessage(Message):
    """The process in between was refused a child."""

    error: str


@message
class LeaveMessage(Message):
    """The launcher wants no more children now."""


@message
class LeftMessage(Message):
    """The fork server says that the process in between has ended."""


@message
class CaseMessage(Message):
    """The launcher gives a lane its next case."""

    task: Plain


@message
class DoneMessage(Message):
    """A lane answers its case."""

    cut_note = CUT
    result: Plain


@message
class PingMessage(ToWorker):
    """The agent asks for a sign of life, of each worker, with every tick."""


@message
class BusyMessage(TextsToAgent):
    """The part of the start that a worker has been in since `since_ns`, for seconds; empty if it is over.

    `line` is the line of the user's code that runs, empty if there is none.
    """

    part: str = ""
    line: str = ""
    since_ns: int = 0


@message
class NoticeMessage(ToAgent):
    """The worker got SIGTERM, and is going to leave."""


@message
class ByeMessage(ToWorker):
    """Every worker has finished, and may leave."""


@message
class StopMessage(ToWorker):
    """The run ends now; each worker leaves its wait.

    First it writes its share of the state after the step `keep`, the last committed one; -1 if that is not kept. The
    `owners` of the slots are those among the workers that are left; without them, what was begun before is completed.
    """

    keep: int = -1
    owners: tuple[int, ...] = ()


@message
class KeyMessage(ToAgent, ToWorker):
    """A key of an epoch's rendezvous, from one worker and passed on to every worker; the value is in base64."""

    epoch: int
    key: str
    value: str


@message
class LinkWantedMessage(ToAgent):
    """The worker has messages for worker `peer`, and no link to it; `before` is the number of one that has ended.

    In a run on several hosts it listens at an address and a port.
    """

    peer: int
    before: int = 0
    address: str = ""
    port: int = 0


@message
class LinkMessage(ToWorker):
    """The worker gets a link to worker `peer`; no other one of the run has its number.

    On one host its ends come along: a socket, the ring to that worker, the ring from it. Between hosts it has a token
    in hexadecimal, with which the other one connects; the worker that gets a port does so.
    """

    peer: int
    number: int
    token: str = ""
    address: str = ""
    port: int = 0


@message
class NextGroupMessage(ToWorker):
    """These members of a coming epoch form its group while they train; the attempt before is given up.

    An epoch may have several attempts, numbered from 1 on. A worker that is no member only gives up the one before.
    """

    epoch: int
    number: int
    members: tuple[int, ...]


@message
class NextGroupFormedMessage(TextsToAgent):
    """The worker has its part of the next group, or could not form it because of a `failure`, in words."""

    epoch: int
    number: int
    failure: str = ""


@message
class PureMessage(ToAgent):
    """The marks of some layers, by layer and name of the value, from the check before training."""

    rows: tuple[tuple[str, Mapping[str, str]], ...]
