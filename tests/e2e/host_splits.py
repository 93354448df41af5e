"""Splits the folder of a run on one host into folders as two hosts would have written them, on their own clocks."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.codec.records import encoded
from engine.core.history.process_records import (
    ClockRecord,
    EndedRecord,
    HeardRecord,
    HostRecord,
    StartedRecord,
    on_clock,
)
from engine.core.history.run_records import (
    AGENT,
    CommitRecord,
    EpochRecord,
    GoRecord,
    HeirsRecord,
    JobRecord,
    PlanRecord,
    Record,
    StampedRecord,
)
from engine.core.history.step_files import FOLDER, moved_entries, step_file
from engine.files.events_file import recorded

DECIDED = (EpochRecord, HeirsRecord, PlanRecord, GoRecord, CommitRecord)
BOUND_NS, SEEN_NS = 250_000, 200_000


def split(run: Path, workers_of_b: frozenset[int], ahead_ns: int, *, b_knows: bool) -> tuple[Path, Path]:
    """Makes the folders ``a`` and ``b`` beside a run: b has some workers, and a clock that is ahead.

    The bounds that host a has recorded contain the truth, and their middle is wrong by `SEEN_NS`; `b_knows`: b has
    recorded bounds too.
    """
    records = [each for each in recorded(run / "events.jsonl") if isinstance(each, StampedRecord)]
    paths = run.parent / "a", run.parent / "b"
    own: tuple[list[Record], list[Record]] = ([], [])
    for each in records:
        of_b = each.worker in workers_of_b
        moved = on_clock(each, lambda at_ns: at_ns + ahead_ns) if of_b else each
        if isinstance(moved, StartedRecord):
            moved = replace(moved, node="b" if moved.of in workers_of_b else "a")
        own[of_b].append(moved)
        if isinstance(each, DECIDED):
            stamp: Any = {"worker": AGENT, "pid": 99, "at_ns": each.at_ns + ahead_ns + 300_000}
            own[1].append(HeardRecord(**stamp, of="a", line=encoded(each)))
    first, last = records[0], records[-1]
    begin = [replace(each, node="a", run_id="r") for each in records if isinstance(each, HostRecord)]
    host = begin or [_host(first.at_ns)]
    own[0][1:1] = host
    bounds: Any = {"least_ns": ahead_ns + SEEN_NS - BOUND_NS, "most_ns": ahead_ns + SEEN_NS + BOUND_NS}
    own[0][2:2] = [
        ClockRecord(worker=AGENT, pid=9, at_ns=at_ns, of="b", **bounds)
        for at_ns in range(first.at_ns, last.at_ns, 1_000_000_000)
    ]
    seen_by_b: Any = {"least_ns": -ahead_ns - BOUND_NS, "most_ns": -ahead_ns + BOUND_NS}
    if b_knows:
        at_b_ns = first.at_ns + ahead_ns
        own[1].append(ClockRecord(worker=AGENT, pid=99, at_ns=at_b_ns, of="a", **seen_by_b))
    host_b = replace(host[0], node="b", at_ns=first.at_ns + ahead_ns, pid=99)
    own[1][:0] = [replace(_job(records), at_ns=first.at_ns + ahead_ns, pid=99), host_b]
    own[1].append(EndedRecord(worker=AGENT, pid=99, at_ns=last.at_ns + ahead_ns, outcome="finished", exit_code=0))
    for path, lines in zip(paths, own, strict=True):
        (path / FOLDER).mkdir(parents=True)
        (path / "events.jsonl").write_text("".join(f"{encoded(each)}\n" for each in _without(begin, lines)))
    for file in sorted((run / FOLDER).iterdir()):
        found = step_file(file.name)
        if found and found.worker in workers_of_b:
            (paths[1] / FOLDER / file.name).write_bytes(moved_entries(file.read_bytes(), lambda at: at + ahead_ns))
        else:
            shutil.copy(file, paths[0] / FOLDER)
    return paths


def _without(named: Iterable[Record], lines: Iterable[Record]) -> Iterable[Record]:
    """Leaves out the record of a host whose name is missing."""
    return (each for each in lines if not (named and isinstance(each, HostRecord) and not each.node))


def _job(records: Iterable[Record]) -> JobRecord:
    return next(each for each in records if isinstance(each, JobRecord))


def _host(at_ns: int) -> HostRecord:
    stamp: Any = {"worker": AGENT, "pid": 9, "at_ns": at_ns}
    return HostRecord(cpu="x", cores=1, python="", torch="", began="", node="a", run_id="r", **stamp)
