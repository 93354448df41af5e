"""The records of a run about the start and end of its processes, and of the run itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from engine.core.history.run_records import EpochRecord, StampedRecord
from engine.core.ownership import Slot
from engine.core.texts import counted

S = TypeVar("S", bound=StampedRecord)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRecord(StampedRecord):
    """The host that starts the run: its processor, usable cores and versions, and the local time in ISO 8601.

    Of several hosts each has such a record: `node` is its name, `run_id` the name of the run in the store, and its
    lease there is `lease_s` long.
    """

    cpu: str
    cores: int
    python: str
    torch: str
    began: str
    node: str = ""
    run_id: str = ""
    lease_s: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlyRecord(StampedRecord):
    """From now on the loss of any of these `hosts` would lose the state of a slot; empty: every host is redundant."""

    hosts: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockRecord(StampedRecord):
    """At `at_ns` the clock of host `of` minus that of the recording host lies between `least_ns` and `most_ns`."""

    of: str
    least_ns: int
    most_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkRecord(StampedRecord):
    """The worst round trip to host `of` in the last minute, and how long it may be silent, streamless or unrenewed."""

    of: str
    worst_ns: int
    silent_ns: int
    back_ns: int
    lease_s: int = 0

    def __str__(self) -> str:
        deadlines = f"{self.silent_ns / 1e9:.3g} s of silence, or {self.back_ns / 1e9:.3g} s without a stream"
        deadlines += f", or with its lease of {self.lease_s} s" if self.lease_s else ""
        return f"host {self.of} is lost after {deadlines} (round trips of up to {self.worst_ns / 1e6:.3g} ms)"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeardRecord(StampedRecord):
    """The recording host has a copy of a decision of host `of`: `line` is the record of host `of`."""

    of: str
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedRecord(StampedRecord):
    """The process `child` of worker `of` has started, with the slots that it owns; of several hosts, on host `node`."""

    of: int
    child: int
    slots: tuple[Slot, ...]
    node: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WayOutRecord(StampedRecord):
    """Worker `of` has given notice, and leaves by this `way` (boundary, inside, none) in or after `step`.

    `text` says it in words that follow "worker N".
    """

    of: int
    way: str
    step: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRecord(StampedRecord):
    """The coordinator's store: its endpoints, the run's name in it, and whether it is private to the run."""

    endpoints: tuple[str, ...]
    run_id: str
    private: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreEndedRecord(StampedRecord):
    """The private store of the run has ended, and is started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysLeftRecord(StampedRecord):
    """The keys of the run could not be deleted from the store."""

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PairsRecord(StampedRecord):
    """The guard of NCCL's sockets: a network `namespace`, or `none` because of `why`."""

    guard: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkServerRecord(StampedRecord):
    """The fork server is process `child`."""

    child: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkServerEndedRecord(StampedRecord):
    """The fork server, process `child`, has ended."""

    child: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitRecord(StampedRecord):
    """The process of worker `of` has ended, seen at `seen_ns`; a negative code is the number of a signal."""

    of: int
    code: int
    expected: bool
    seen_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRecord(StampedRecord):
    """All workers are started again, for the `number`-th time: one of them had ended before the first commit."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedRecord(StampedRecord):
    """Training begins after the checkpoint of a step: of `run`, in a place, with its manifest.

    In a run whose state was lost, the `lost` steps behind it had been committed, and are trained again.
    """

    step: int
    place: str
    file: str
    run: str
    lost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingRecord(StampedRecord):
    """Worker `of` waits to become a member; or `lost` says, in words that follow "worker N", how it was lost."""

    of: int
    lost: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KilledRecord(StampedRecord):
    """The agent kills worker `of` for the reason `why`."""

    of: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftBehindRecord(StampedRecord):
    """The process `child` of worker `of` still runs after SIGKILL."""

    of: int
    child: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LostRecord(StampedRecord):
    """The writing worker could not write `records` of its records for this reason, and went on."""

    records: int
    why: str

    def __str__(self) -> str:
        return f"worker {self.worker} could not write {counted(self.records, 'record')}: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRetryRecord(StampedRecord):
    """The data of the writing worker failed with `error` in a call, which it tries again after `wait_ms`.

    It is the further try `number` of this call, from 1.
    """

    call: str
    number: int
    wait_ms: float
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptRecord(StampedRecord):
    """The signal of this name asked the launcher to end."""

    signal: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CutShortRecord(StampedRecord):
    """All steps are committed; the audit and validation after the last one end early, for this reason."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRecord(StampedRecord):
    """The run ends with an error; `notice` names the wrong numbers, if it has noticed any."""

    error: str
    notice: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingEndedRecord(StampedRecord):
    """Training has ended with an outcome, in one word, and an exit code; the twin and the checks may follow."""

    outcome: str
    exit_code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRecord(StampedRecord):
    """The last record of a launcher: the outcome of its command in one word, and the exit code of the command.

    Only the checks of `bamboo inject --run`, which another process writes, may follow.
    """

    outcome: str
    exit_code: int


# The records of a run about its judgement: the comparison with its twin, the checks and the verdict.
Result = Literal["passed", "failed", "invalid", "not judged"]  # the last one: a signal came before

DATA_PART = "data"  # the part of a difference between two microbatches


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between a run and its twin: in a layer after a step, in the loss or the data of the step.

    `part` is the part that differs, in words; `tensor` is the first tensor of it that differs, or empty if that is not
    known. Where the data differ, `tensor` is the first microbatch. `run` and `twin` are the beginnings of hashes, or
    losses.
    """

    step: int
    layer: int | None  # None for the loss and the data
    part: str
    tensor: str
    run: str
    twin: str

    def __str__(self) -> str:
        layer = "" if self.layer is None else f", layer {self.layer}"
        kind = "" if self.part == DATA_PART else "tensor "
        tensor = f", {kind}{self.tensor}" if self.tensor else ""
        values = f"{self.run} in this run and {self.twin} in its twin"
        return f"step {self.step}{layer}{tensor}: different {self.part}, {values}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparingRecord(StampedRecord):
    """Training is over, and the run is to be compared with its twin, which may have to be run first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinRecord(StampedRecord):
    """The losses of the fault-free twin, as (step, loss)."""

    losses: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRecord(StampedRecord):
    """The run was compared with its twin in `compared` of `steps` steps; `last_step` is -1 if no step was compared.

    A step without hashes in one of the runs is not compared: for instance, a worker died before it reported them.
    `difference` is None if all compared hashes are equal. In the step `disturbed` the first fault struck, or the first
    worker was lost; None in a run without either.
    """

    compared: int
    steps: int
    last_step: int
    difference: Difference | None
    disturbed: int | None

    @property
    def is_random(self) -> bool:
        """Whether run and twin differ before the first fault: then the model itself is not deterministic."""
        if self.difference is None:
            return False
        return self.disturbed is None or self.difference.step < self.disturbed

    @property
    def unproven_text(self) -> str:
        """The words of a reader that has this record alone, and not the hashes that prove it."""
        finding = "no difference" if self.difference is None else f"a difference in step {self.difference.step}"
        return f"compared with its twin at the end, {self.compared} of {self.steps} steps: {finding}"

    def __str__(self) -> str:
        if self.difference is None:
            return f"weights identical to the run without the fault, {self.compared} of {self.steps} steps"
        text = f"the weights are not those of the fault-free twin: {self.difference}"
        if not self.is_random:
            return text
        when = f"it differs before the fault of step {self.disturbed}"
        if self.disturbed is None:
            when = "there was no fault"
        cause = "the model is not deterministic, it uses"
        if self.difference.part == DATA_PART:
            cause = "the data are not deterministic, they use"
        return f"{text}; {when}: {cause} something random that bamboo does not seed"


@dataclass(frozen=True, slots=True, kw_only=True)
class NotComparedRecord(StampedRecord):
    """The weights were not compared with those of a twin."""

    why: str

    def __str__(self) -> str:
        return f"weights not compared: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SealRecord(StampedRecord):
    """The files of the evidence at the end of the command, that of events up to here: path, bytes, hashes of parts."""

    files: tuple[tuple[str, int, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRecord(StampedRecord):
    """A check of the run, or of a request of `bamboo inject --run`: its name, its result, the reason in words."""

    name: str
    result: Result
    text: str
    request: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictRecord(StampedRecord):
    """The verdict over all checks of the run, or of a request, and the exit code of the command that judged."""

    result: Result
    exit_code: int
    request: str = ""


# The records of a run about requests, files that others put into its folder while it runs.
@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord(StampedRecord):
    """The launcher accepts the faults of a request, a file in the run folder."""

    request: str
    faults: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedRecord(StampedRecord):
    """The launcher refuses the faults of a request."""

    request: str
    reason: str


def on_clock(record: S, at: Callable[[int], int]) -> S:
    """Returns a record whose times are on another clock; lengths of time stay."""
    moved = replace(record, at_ns=at(record.at_ns))
    if isinstance(moved, ExitRecord):
        return replace(moved, seen_ns=at(moved.seen_ns))
    if isinstance(moved, EpochRecord):
        verdict = (out if out.alive_ns is None else out._replace(alive_ns=at(out.alive_ns)) for out in moved.verdict)
        return replace(moved, verdict=tuple(verdict))
    return moved
