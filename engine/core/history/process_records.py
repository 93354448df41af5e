"""The records of a run about the start and end of its processes, and of the run itself."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.history.record import StampedRecord
from engine.core.ownership import Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRecord(StampedRecord):
    """The host that starts the run: its processor, usable cores and versions, and the local time in ISO 8601.

    Of several hosts each has such a record: `node` is its name, and `run_id` the name of the run in the store.
    """

    cpu: str
    cores: int
    python: str
    torch: str
    began: str
    node: str = ""
    run_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlyRecord(StampedRecord):
    """From now on the loss of one of these `hosts` would lose the state of a slot; of no host, if there are none."""

    hosts: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockRecord(StampedRecord):
    """At `at_ns` the clock of host `of`, less the clock of the recording host, is one of `least_ns` to `most_ns`."""

    of: str
    least_ns: int
    most_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeardRecord(StampedRecord):
    """Host `of` has decided something, and the recording host has heard of it: `line` is the record of host `of`."""

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
    """The guard of NCCL's sockets: a network `namespace`, or `none` because of `why`. Older runs had a `proof` too."""

    guard: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnprovenRecord(StampedRecord):
    """Of runs before links: worker `of` has found something wrong in a group, with worker `peer` if it is known."""

    of: int
    peer: int | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkServerRecord(StampedRecord):
    """The fork server is process `child`."""

    child: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkServerEndedRecord(StampedRecord):
    """The fork server, process `child`, has ended."""

    child: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorRecord(StampedRecord):
    """A coordinator has a process of its own, `child`; one of them holds the role, the other waits."""

    child: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorEndedRecord(StampedRecord):
    """The coordinator, process `child`, has ended, and the one that waited takes over."""

    child: int
    code: int


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
class KnownRecord(StampedRecord):
    """The writing worker knows that worker `of` has ended."""

    of: int


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
