"""One record of every kind, and records of a kind that say what a test is about and are filled up from these."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from engine.codec.records import _NEEDED, decoded, encoded
from engine.core.exclusion import Cause, Position, excluded
from engine.core.history.process_records import (
    CheckRecord,
    ClockRecord,
    ComparingRecord,
    ComparisonRecord,
    CutShortRecord,
    DataRetryRecord,
    DeadlyRecord,
    Difference,
    EndedRecord,
    ExitRecord,
    FailedRecord,
    ForkServerEndedRecord,
    ForkServerRecord,
    HeardRecord,
    HostRecord,
    InterruptRecord,
    KeysLeftRecord,
    KilledRecord,
    LeftBehindRecord,
    LostRecord,
    NetworkRecord,
    NotComparedRecord,
    PairsRecord,
    RefusedRecord,
    RequestRecord,
    RestartRecord,
    ResumedRecord,
    SealRecord,
    StartedRecord,
    StoreEndedRecord,
    StoreRecord,
    TrainingEndedRecord,
    TwinRecord,
    VerdictRecord,
    WaitingRecord,
    WayOutRecord,
)
from engine.core.history.run_history import ActionFiles, RunHistory, history_of
from engine.core.history.run_records import (
    VERSION,
    ActionRecord,
    AddedRecord,
    AuditRecord,
    CommitRecord,
    ConfirmedRecord,
    CrampedRecord,
    EpochRecord,
    FaultRecord,
    FinishedRecord,
    GoRecord,
    HeirsRecord,
    HostLinkRecord,
    JobRecord,
    KeptRecord,
    LoadRecord,
    MarkRecord,
    MemoryRecord,
    MovedRecord,
    NormsRecord,
    NoticeRecord,
    PaceRecord,
    PartitionRecord,
    PlanRecord,
    PolicyRecord,
    PreparedRecord,
    PureCheckRecord,
    RaisedRecord,
    Record,
    RedoneRecord,
    ResidualsRecord,
    ScenarioRecord,
    StaysRecord,
    StoppedEarlyRecord,
    SuspicionRecord,
    TensorsRecord,
    ThinnedRecord,
    UnconfirmedRecord,
    UnkeptRecord,
    ValidationRecord,
    kind_of,
)
from engine.core.history.step_files import StepFile, entry, span_of
from engine.core.job.job import Job

AGENT: dict[str, Any] = {"worker": -1, "pid": 7, "at_ns": 11}

SAMPLES: tuple[Record, ...] = (
    JobRecord(**AGENT, version=VERSION, job=Job(stages=2, model_args={"width": 3})),
    PartitionRecord(**AGENT, starts=(0, 2), layers=("embed", "head", "loss")),
    PureCheckRecord(worker=0, pid=8, at_ns=12, ms=1.5, layers=2, unchecked=("head",)),
    ActionRecord(worker=3, pid=8, epoch=1, step=2, action="1F0", start_ns=10, end_ns=20),
    EpochRecord(
        **AGENT,
        epoch=1,
        members=(0, 1),
        verdict=(
            excluded(2, Cause.LEFT, "has left after step 1"),
            excluded(3, Cause.DEATH, "died", Position(1, 2, False)),
        ),
        reason="x",
        planned=False,
        owners=(0, 1),
        shadows=((1,), ()),
    ),
    HeirsRecord(**AGENT, epoch=1, owners=(0, 0), shadows=((), ())),
    MarkRecord(worker=0, pid=8, at_ns=12, phase="plan", epoch=1, adopted=((0, 1),)),
    PreparedRecord(worker=0, pid=8, at_ns=12, epoch=1),
    PlanRecord(**AGENT, epoch=1, committed=0, prepared=False),
    GoRecord(**AGENT, epoch=1, end=False),
    MovedRecord(worker=0, pid=8, at_ns=12, program="plan", epoch=1, step=2, bytes=3),
    CommitRecord(**AGENT, step=0, loss=0.5, grad_norm=1.0, clip_factor=1.0, last=False),
    AuditRecord(**AGENT, of=0, step=0, pipeline=0, rows=((0, "state", "buffers"),)),
    KeptRecord(**AGENT, step=9, manifest="x", bytes=8, parts=1, copy_ns=1, write_ns=2, sync_ns=3),
    UnkeptRecord(**AGENT, step=9, why="No space left on device"),
    ThinnedRecord(**AGENT, steps=((100, 199), (300, 399))),
    NormsRecord(**AGENT, step=0, norms=((0, 0.5), (1, 0.25))),
    ValidationRecord(**AGENT, step=0, name="test", samples=7, loss=0.25, metrics={"f1": 0.5}),
    StoppedEarlyRecord(**AGENT, step=0, why="stopped early at step 0"),
    FinishedRecord(**AGENT, of=0, peak_stash=((0, 0, 4),), peak_memory_kib=1024),
    FaultRecord(**AGENT, fault="1:0", do="kill", step=1, action="0B0", when="after", of=0, slot=(0, 0)),
    ConfirmedRecord(**AGENT, fault="1:0", how="exit: -9"),
    UnconfirmedRecord(**AGENT, fault="1:0", how="it did not strike"),
    SuspicionRecord(**AGENT, of=0, text="x", peer=1),
    RaisedRecord(**AGENT, of=0, step=1, error="x"),
    NoticeRecord(**AGENT, of=0, grace_s=30.0),
    StaysRecord(**AGENT, of=0, text="cannot leave"),
    ResidualsRecord(**AGENT, epoch=2, of=1, sent=("1SHIP2",), bytes=4096, stuck=""),
    HostLinkRecord(worker=0, pid=8, at_ns=12, step=2, bytes=4096, busy_ns=1000, copy_time=0.25),
    RedoneRecord(worker=0, pid=8, at_ns=12, step=3, action="1SHIP2", why="x"),
    ScenarioRecord(**AGENT, scenario="x.yaml", text="name: x\n", seed=3, settings=("steps=3",)),
    HostRecord(**AGENT, cpu="x", cores=2, python="3.11.7", torch="2.13.0", began="2026-11-22T14:40:15+00:00"),
    DeadlyRecord(**AGENT, hosts=("a",), text="the run cannot survive the loss of host a: no other host holds stage 0"),
    ClockRecord(**AGENT, of="b", least_ns=-5, most_ns=7),
    HeardRecord(**AGENT, of="b", line='{"event":"comparing","worker":-1,"pid":7,"at_ns":1}'),
    StartedRecord(**AGENT, of=0, child=8, slots=((0, 0), (0, 1))),
    WayOutRecord(**AGENT, of=0, way="inside", step=3, text="hands over inside step 3"),
    StoreRecord(**AGENT, endpoints=("http://127.0.0.1:1",), run_id="x", private=True),
    StoreEndedRecord(**AGENT),
    KeysLeftRecord(**AGENT, error="x"),
    PairsRecord(**AGENT, guard="none", why="x"),
    ForkServerRecord(**AGENT, child=9),
    ForkServerEndedRecord(**AGENT, child=9),
    ExitRecord(**AGENT, of=0, code=-9, expected=False, seen_ns=10),
    RestartRecord(**AGENT, number=1, reason="x"),
    ResumedRecord(**AGENT, step=4, place="results/x/checkpoints", file="manifest-0.json", run="x", lost=2),
    WaitingRecord(**AGENT, of=4, lost="exited with code 1"),
    KilledRecord(**AGENT, of=0, why="x"),
    LeftBehindRecord(**AGENT, of=0, child=8),
    NetworkRecord(**AGENT, of="b", worst_ns=300_000, silent_ns=801_500_000, back_ns=201_800_000),
    LostRecord(worker=0, pid=8, at_ns=12, records=2, why="No space left on device"),
    DataRetryRecord(
        worker=0, pid=8, at_ns=12, host="a", stage=1, call="microbatch()", number=1, wait_ms=1.5, error="EIO"
    ),
    InterruptRecord(**AGENT, signal="SIGINT"),
    CutShortRecord(**AGENT, reason="x"),
    FailedRecord(**AGENT, error='a "quoted"\nline \u00e9'),
    TrainingEndedRecord(**AGENT, outcome="finished", exit_code=0),
    EndedRecord(**AGENT, outcome="finished", exit_code=0),
    MemoryRecord(worker=0, pid=8, at_ns=12, step=3, allocated=2**30, reserved=2**31, predicted=2**30),
    TensorsRecord(worker=0, pid=8, at_ns=12, step=1, boundary=((0, 1, 4, 8, 0, 0, 0, 0, 0, 0),), peak=()),
    LoadRecord(**AGENT, gpu=0, samples=10, busy=0.75, used=2**30),
    RequestRecord(**AGENT, request="request-1.json", faults=("a", "b")),
    RefusedRecord(**AGENT, request="request-1.json", reason="x"),
    PaceRecord(**AGENT, of=0, step=9, slowness=2.0, why="x"),
    PolicyRecord(**AGENT, step=9, why="x", owners=(0, 0)),
    CrampedRecord(**AGENT, of=3, why="keeps waiting: one block takes 2 MB, and it has 1 MB"),
    AddedRecord(**AGENT, request="join-1.json", of=3, joins=True),
    ComparingRecord(**AGENT),
    TwinRecord(**AGENT, losses=((0, 0.5), (1, 0.25))),
    ComparisonRecord(
        **AGENT,
        compared=8,
        steps=9,
        last_step=7,
        difference=Difference(5, 1, "buffers", "running_mean", "0a", "0b"),
        disturbed=3,
    ),
    NotComparedRecord(**AGENT, why="no twin was asked for"),
    SealRecord(**AGENT, files=(("run.json", 3, "00ff00ff00ff"),)),
    CheckRecord(**AGENT, name="outcome", result="passed", text="recovered", request="request-1.json"),
    VerdictRecord(**AGENT, result="passed", exit_code=0, request="request-1.json"),
)
_NEUTRAL: dict[str, dict[str, Any]] = {"epoch": {"verdict": []}, "comparison": {"difference": None}}
# What is not said of a record is as in its sample.
_BASE: dict[str, dict[str, Any]] = {
    kind_of(type(each)): {
        name: value for name, value in json.loads(encoded(each)).items() if name in _NEEDED[type(each)]
    }
    | _NEUTRAL.get(kind_of(type(each)), {})
    for each in SAMPLES
}


def made(event: str, **fields: Any) -> Any:
    """Returns the record of a kind with some fields, as its line has them."""
    return decoded(json.dumps({"event": event, **_BASE[event], **fields}))


def records_of(events: Iterable[Mapping[str, Any]]) -> list[Record]:
    """Returns the records that some events tell of, each as far as its line would."""
    return [made(**event) for event in events]


class MadeFiles(ActionFiles):
    """The actions of a history as its files would have them."""

    def __init__(self, history: RunHistory):
        span = span_of(history.job)
        self._data: dict[StepFile, bytes] = {}
        for each in history.of(ActionRecord):
            file = StepFile(each.step // span * span, each.worker)
            done = entry(each.epoch, each.step, each.action, each.start_ns, each.end_ns)
            self._data[file] = self._data.get(file, b"") + done

    def ranges(self) -> dict[int, int]:
        """Returns the first step of each range, with the bytes of its actions."""
        firsts = sorted({each.first for each in self._data})
        return {first: sum(len(data) for _, data in self.read(first)) for first in firsts}

    def read(self, first: int) -> Iterator[tuple[int, bytes]]:
        """Yields each worker with the bytes of its actions in the range that begins with a step."""
        return ((each.worker or 0, data) for each, data in sorted(self._data.items()) if each.first == first)


def made_history(events: Iterable[Mapping[str, Any]]) -> RunHistory:
    """Returns what the events add up to, with their actions also as files."""
    history = history_of(records_of(events))
    history.files = MadeFiles(history)
    return history


def lines_of(events: Iterable[Mapping[str, Any]]) -> str:
    """Returns the lines of the events, as a file has them."""
    return "".join(f"{encoded(each)}\n" for each in records_of(events))
