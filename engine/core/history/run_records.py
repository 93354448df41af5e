"""The records of a run about training, faults and recoveries, one class for each kind; their rules stand below."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

from engine.core.errors import WorkerException
from engine.core.exclusion import Verdict
from engine.core.job.job import Job
from engine.core.ownership import Slot

# The base classes of all records of a run, and the version of their format.
#
# Rules: the kind of a record in its line is the name of its class in snake case, without `Record`. A field that may be
# missing in a line has a default; a line leaves it out if it has that value. Names of times end in `_ns`: nanoseconds
# on the host's monotonic clock.

# Of the format: a change of a field or of its meaning needs a new number; version 1 had no number. Since version 3
# the end is recorded after the verdict; since version 5 actions and hashes stand in files of their own; since version 6
# a job keeps checkpoints; since version 7 lines are linked, and a seal comes before the end.
VERSION = 9
UNSEALED = 6  # is read as well; nothing proves that its records are whole
AGENT = -1  # the number of the agent in records that name a worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A record of the history of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StampedRecord(Record):
    """A record with its writer (a worker, or `AGENT`), the process and the time; they are added when it is written.

    A worker adds its `host`, and the `stage` that it is computing or, before the first one, owns.
    """

    worker: int = 0
    pid: int = 0
    at_ns: int = 0
    host: str = ""
    stage: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadLine(Record):
    """A line of the file that is no record, such as the half of a line; a reader makes it, and no file has it."""

    number: int  # of the line, from 1


def kind_of(record: type[Record]) -> str:
    """Returns the kind of a record in its line, such as ``cut_short``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", record.__name__.removesuffix("Record")).lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord(StampedRecord):
    """The first record: the version of the format and the job; the line has the fields of the job themselves.

    `injectable`: the run takes faults from requests in its folder.
    """

    version: int
    job: Job
    injectable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRecord(StampedRecord):
    """The model was cut into stages: the first layer of each stage, and the names of all layers."""

    starts: tuple[int, ...]
    layers: tuple[str, ...]
    samples: int = 0  # in the training set; 0 for data without limit


@dataclass(frozen=True, slots=True, kw_only=True)
class PureCheckRecord(StampedRecord):
    """A worker has checked its layers for purity in `ms` milliseconds; it could not check the `unchecked` ones.

    `flops` are those of a microbatch, as (layer, forward, backward); `residuals` the bytes that it keeps for its
    backward, as (layer, bytes, bytes of its input). `gpu` is the name of the worker's GPU.
    """

    ms: float
    layers: int
    unchecked: tuple[str, ...]
    flops: tuple[tuple[int, int, int], ...] = ()
    residuals: tuple[tuple[int, int, int], ...] = ()
    gpu: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionRecord(Record):
    """A worker has finished an action of a step; the action began in `epoch`."""

    worker: int
    pid: int
    epoch: int
    step: int
    action: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRecord(StampedRecord):
    """An epoch begins: its members, the verdict on excluded workers, and the owner and the shadows of each slot.

    `planned`: it was made at a step boundary, for a worker's notice, or for other owners or another schedule that are
    wanted. `schedule` is that of its steps; empty: the job's own.
    """

    epoch: int
    members: tuple[int, ...]
    verdict: Verdict
    reason: str
    planned: bool
    owners: tuple[int, ...]
    shadows: tuple[tuple[int, ...], ...]
    schedule: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeirsRecord(StampedRecord):
    """Replaces the owners of an epoch: an heir became known only with the inventories."""

    epoch: int
    owners: tuple[int, ...]
    shadows: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkRecord(StampedRecord):
    """A worker has ended a phase of a recovery; with `plan`, the slots that it adopted from another pipeline."""

    phase: str
    epoch: int
    adopted: tuple[Slot, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRecord(StampedRecord):
    """A worker has made the plan of an epoch before the epoch begins."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord(StampedRecord):
    """All members have the input of the plan of an epoch; `committed` is the last committed step."""

    epoch: int
    committed: int
    prepared: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GoRecord(StampedRecord):
    """Training continues in an epoch; with `end`, no step follows."""

    epoch: int
    end: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedRecord(StampedRecord):
    """A worker has sent `bytes` in a step, for a recovery or to restore shadows."""

    program: str
    epoch: int
    step: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecord(StampedRecord):
    """A step is committed: loss, norm of the gradients, clip factor (-1 and 0 if skipped); `last`: no step follows.

    `lr` is the learning rate, unless the job alone tells it, or it follows a figure by the user's own code.
    """

    step: int
    loss: float
    grad_norm: float
    clip_factor: float
    last: bool
    lr: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedEarlyRecord(StampedRecord):
    """`step`, which is committed, is the last one, because validations no longer improve; `why` says so in words."""

    step: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NormsRecord(StampedRecord):
    """The gradient norm of each layer in a step that commits, before clipping, as (layer, norm)."""

    step: int
    norms: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord(StampedRecord):
    """Worker `of` hashed its layers in a pipeline after a step: (layer, weights and optimizer state, buffers)."""

    of: int
    step: int
    pipeline: int
    rows: tuple[tuple[int, str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRecord(StampedRecord):
    """The state after a step is kept as a checkpoint: its manifest, its size, and sums of the times of its parts."""

    step: int
    manifest: str
    bytes: int
    parts: int
    copy_ns: int
    write_ns: int
    sync_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnkeptRecord(StampedRecord):
    """The state after a step was to be kept as a checkpoint, and is not; training continues."""

    step: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinnedRecord(StampedRecord):
    """The actions and hashes of these steps, as (first, last), are left out: the run had grown beyond its limit."""

    steps: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationRecord(StampedRecord):
    """A validation pass after a step: the means over `samples` of an evaluation set."""

    step: int
    name: str
    samples: int
    loss: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRecord(StampedRecord):
    """Worker `of` has finished: (pipeline, stage, peak of microbatches), its peak KiB, (stage, its bytes by kind)."""

    of: int
    peak_stash: tuple[tuple[int, int, int], ...]
    peak_memory_kib: int
    sizes: tuple[tuple[int, int, int, int, int, int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRecord(StampedRecord):
    """A fault strikes worker `of` for a slot: at an action of a step, or after another fault in a phase.

    `node` is the host of the worker, if the run has several. If the worker itself has told the moment, `done` is its
    last action, of `done_step`.
    """

    fault: str
    do: str
    step: int
    action: str | None = None
    when: str | None = None
    after: str | None = None
    phase: str | None = None
    of: int
    slot: Slot | None
    node: str = ""
    done_step: int = -1
    done: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmedRecord(StampedRecord):
    """The effect of a fault was seen on all its victims; `how` says by which sign."""

    fault: str
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnconfirmedRecord(StampedRecord):
    """The run is over, or its coordinator is lost, and the effect of a fault was not seen; `how` says why."""

    fault: str
    how: str

    def __str__(self) -> str:
        return f"fault {self.fault} is unconfirmed: {self.how}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspicionRecord(StampedRecord):
    """A transfer of worker `of` with `peer` has failed, or a group has not been formed at it."""

    of: int
    text: str
    peer: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RaisedRecord(StampedRecord):
    """An exception ended worker `of` at `at_ns` in a step, -1 before training; its fields are `WorkerException`'s."""

    of: int
    step: int
    error: str
    place: str = ""
    file: str = ""
    line: int = 0
    function: str = ""
    frames: str = ""
    traceback: str = ""
    microbatch: str = ""
    gpu: str = ""

    @property
    def exception(self) -> WorkerException:
        """The exception."""
        return WorkerException(**{each.name: getattr(self, each.name) for each in fields(WorkerException)})


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeRecord(StampedRecord):
    """Worker `of` is to leave within `grace_s` seconds."""

    of: int
    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StaysRecord(StampedRecord):
    """Worker `of` has given notice and cannot leave; `text` is the reason, in words that follow "worker N"."""

    of: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioRecord(StampedRecord):
    """The scenario of the run: its name or file, its text, its seed, and the settings of the command.

    `needs_trust`: it names code of the user's, so that it runs with ``--trust-code`` only.
    """

    scenario: str
    text: str
    seed: int
    settings: tuple[str, ...]
    needs_trust: bool = False


# The records of a run about the paces of its workers, the answers of the policy, and workers that were added.
@dataclass(frozen=True, slots=True, kw_only=True)
class PaceRecord(StampedRecord):
    """Worker `of` has become slow, slower or less slow: `slowness` times its usual time; 1: it is as usual again."""

    of: int
    step: int
    slowness: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRecord(StampedRecord):
    """The policy was asked after a step: why blocks move or not, and the wanted `owners`; empty: the present ones.

    Or it wants another schedule, and why.
    """

    step: int
    why: str
    owners: tuple[int, ...]

    @property
    def asked(self) -> str:
        """The moment of the question, in words."""
        return f"asked after step {self.step}" if self.step >= 0 else "asked before step 0"


@dataclass(frozen=True, slots=True, kw_only=True)
class CrampedRecord(StampedRecord):
    """Waiting worker `of` has too little memory for a slot and waits on; `why` follows "worker N".

    Without `why` it has enough again.
    """

    of: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedRecord(StampedRecord):
    """The launcher has taken a `request`, a file in the run folder, and starts worker `of`, which will wait.

    `joins`: it becomes a member without a failure, too.
    """

    request: str
    of: int
    joins: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualsRecord(StampedRecord):
    """Worker `of`, which leaves, sends what the forwards of some microbatches have saved, so they are not run again.

    `sent` are the actions, `bytes` their size; `stuck` says why other residuals could not travel.
    """

    epoch: int
    of: int
    sent: tuple[str, ...]
    bytes: int
    stuck: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RedoneRecord(StampedRecord):
    """The writing worker could not use the residual that `action` brought, and ran its forward again; `why` says so."""

    step: int
    action: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLinkRecord(StampedRecord):
    """The writing worker copied `bytes` of residuals to its host and back in a step; each took `copy_time` forwards.

    All copies together took `busy_ns`. It is written once, behind the second step that has copies.
    """

    step: int
    bytes: int
    busy_ns: int
    copy_time: float


# The records of a run about the memory and the load of its devices.
@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRecord(StampedRecord):
    """The writing worker held at most so many bytes of its GPU in a step: in tensors, and with free ones kept for them.

    A step without a record was within 1 % of the record before it. `predicted` is for a usual step of the owners then,
    0 if it is not known.
    """

    step: int
    allocated: int
    reserved: int
    predicted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorsRecord(StampedRecord):
    """The writing worker held tensors of so many bytes at the boundary behind a step, and at the peak inside of it.

    A row has pipeline, stage, weights, moments, buffers, stash, accumulators, retained, transfer, offloaded. The
    steps after the first two of a program hold the same as these.
    """

    step: int
    boundary: tuple[tuple[int, int, int, int, int, int, int, int, int, int], ...]
    peak: tuple[tuple[int, int, int, int, int, int, int, int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRecord(StampedRecord):
    """A GPU of the host computed for this share of the time, in `samples` of a second; `used` bytes were in use."""

    gpu: int
    samples: int
    busy: float
    used: int
