"""The table of actions: one row for each action that a worker finished, with its epoch and purpose.

Rules: an action belongs to the epoch in which it began. It is *redundant* if another worker owns its slot. It is
*replayed* if an owner of the slot had already finished the same action of the same step. For a long run the table has
only some ranges of steps, those near a recovery first; sums, bars and the rows about recoveries cover all actions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from engine.core.action import COMPUTE_OPS, OP_TABLE, Action, LegendEntry, Op, StepPosition, ops_at, parse_action
from engine.core.history.process_records import StartedRecord
from engine.core.history.run_history import ActionFiles, RunHistory
from engine.core.history.step_files import (
    CHORES,
    ENTRY_BYTES,
    FIELDS,
    OPS,
    action_of,
    is_chore,
    is_entry,
    marked_steps,
    span_of,
    superfluous,
)
from engine.core.program.remaining_tasks import work_of

# The actions of a run as arrays, from the bytes of its files: fast enough for tens of millions of them.
#
# Rule: one array holds the actions of one worker in one range of steps, in the order in which it finished them.

KINDS = tuple(shown.value for shown in LegendEntry)  # the legend of a timeline
KIND_OF = {op: KINDS.index(row.shown) for op, row in OP_TABLE.items()}
NOT_BUSY = (KINDS.index("transfer"), KINDS.index("waiting"))
_KINDS = np.array([KIND_OF[op] for op in OPS], dtype=np.int8)
_IS_BUSY = ~np.isin(_KINDS, NOT_BUSY)
_IS_ENTRY = np.array([[is_entry(op, mark) for mark in range(256)] for op in range(256)])
_IS_CHORE = np.array([[is_chore(chore, mark) for mark in range(256)] for chore in range(256)])
BAR_COLUMNS = ["worker", "step", "epoch", "start_ns", "end_ns", "busy_ns"]


@dataclass(slots=True)
class Totals:
    """The sums over all actions of a worker, and its last action by time."""

    num_actions: int = 0
    busy_ns: int = 0
    end_ns: int = 0
    last_step: int = -1
    last_action: str = ""


@dataclass(slots=True)
class Sums:
    """The sums over all actions of a run; `unread` counts entries that could not be read."""

    workers: dict[int, Totals] = field(default_factory=dict)
    bars: list[pd.DataFrame] = field(default_factory=list)  # per worker, step and epoch: BAR_COLUMNS
    unread: int = 0
    chores: list[tuple[int, np.ndarray]] = field(default_factory=list)  # of the last range

    def add(self, worker: int, entries: np.ndarray) -> None:
        """Adds some actions of a worker; not their bars."""
        if not len(entries):
            return
        totals = self.workers.setdefault(worker, Totals())
        end_ns = entries["start_ns"] + entries["length_ns"]
        totals.num_actions += len(entries)
        totals.busy_ns += int(entries["length_ns"][_IS_BUSY[entries["op"]]].sum())
        last = int(end_ns.argmax())
        if end_ns[last] > totals.end_ns:
            entry = entries[last]
            totals.end_ns, totals.last_step = int(end_ns[last]), int(entry["step"])
            totals.last_action = _text_of(entry)

    @property
    def end_ns(self) -> int:
        """The end of the last action; 0 without any."""
        return max((each.end_ns for each in self.workers.values()), default=0)


def entries_of(files: ActionFiles, first: int, sums: Sums) -> Iterator[tuple[int, np.ndarray]]:
    """Yields each worker with its actions in a range of steps, and adds them to `sums`."""
    sums.chores = []
    for worker, data in files.read(first):
        entries = np.frombuffer(data, dtype=np.dtype(FIELDS), count=len(data) // ENTRY_BYTES)
        good = _IS_ENTRY[entries["op"], entries["mark"]]
        if not good.all():
            chores = _IS_CHORE[entries["op"], entries["mark"]]
            sums.unread += int((~good & ~chores).sum())
            sums.chores.append((worker, entries[chores]))
            entries = entries[good]
        sums.add(worker, entries)
        yield worker, entries


def bars_of(worker: int, entries: np.ndarray, epochs_ns: np.ndarray, numbers: np.ndarray) -> pd.DataFrame:
    """Returns one bar per step of a worker that redid no step: its begin, its end, and its busy time."""
    if not len(entries):
        return pd.DataFrame(columns=BAR_COLUMNS)
    steps = entries["step"]
    begins = np.flatnonzero(np.append(True, steps[1:] != steps[:-1]))
    start_ns = entries["start_ns"]
    busy_ns = np.where(_IS_BUSY[entries["op"]], entries["length_ns"], 0)
    epoch = numbers[np.searchsorted(epochs_ns, start_ns[begins], side="right")]
    return pd.DataFrame(
        {
            "worker": np.full(len(begins), worker),
            "step": steps[begins].astype(np.int64),
            "epoch": epoch,
            "start_ns": np.minimum.reduceat(start_ns, begins),
            "end_ns": np.maximum.reduceat(start_ns + entries["length_ns"], begins),
            "busy_ns": np.add.reduceat(busy_ns, begins),
        }
    )


def columns_of(parts: list[tuple[int, np.ndarray]], pids: dict[int, int]) -> tuple[dict[str, Any], list[str]]:
    """Returns the columns of a table of actions, with the number of each text, and the texts."""
    entries = np.concatenate([each for _, each in parts]) if parts else np.empty(0, dtype=np.dtype(FIELDS))
    sizes = [len(each) for _, each in parts]
    work = entries.view(np.uint64).reshape(-1, ENTRY_BYTES // 8)[:, -1] if len(entries) else np.empty(0, np.uint64)
    _, places, codes = np.unique(work, return_index=True, return_inverse=True)
    columns = {
        "worker": np.repeat(np.array([worker for worker, _ in parts], dtype=np.int64), sizes),
        "pid": np.repeat(np.array([pids.get(worker, 0) for worker, _ in parts], dtype=np.int64), sizes),
        "step": entries["step"].astype(np.int64),
        "code": codes,
        "start_ns": entries["start_ns"],
        "end_ns": entries["start_ns"] + entries["length_ns"],
    }
    return columns, [_text_of(entries[at]) for at in places]


def _text_of(entry: Any) -> str:
    return str(action_of(*(int(entry[name]) for name in ("stage", "pipeline", "microbatch", "op"))))


MOST_ACTIONS = 500_000  # rows, which take about 50 MB, and three times as much while they are made
_OF_REPLICAS = COMPUTE_OPS | ops_at(StepPosition.STREAM, StepPosition.REPLICA)
_NO_ACTIONS: list[tuple[int, np.ndarray]] = []


@dataclass(frozen=True, slots=True, eq=False)
class Actions:
    """The actions of a run: table, sums, a bar per worker, step and epoch, and the rows that recoveries caused."""

    table: pd.DataFrame
    of_recoveries: pd.DataFrame
    bars: pd.DataFrame
    sums: Sums
    chores: pd.DataFrame  # of the same steps as the table


def actions_of(history: RunHistory, most: int | None = MOST_ACTIONS) -> Actions:
    """Returns the actions of a run, of which the table has at most `most` rows."""
    ranges, sums = history.files.ranges(), Sums()
    span = span_of(history.job)
    marked = {step // span for step in marked_steps(history.records_of_recoveries)}
    chosen = _chosen(ranges, marked, span, most)
    epochs_ns = np.array([each.at_ns for each in history.epochs], dtype=np.int64)
    numbers = np.array([0, *(each.epoch for each in history.epochs)], dtype=np.int64)
    tables, of_recoveries, chores = [], [], [_chores([])]
    for first in ranges:
        parts = list(entries_of(history.files, first, sums))
        if first not in chosen and first // span not in marked:
            sums.bars += [bars_of(worker, entries, epochs_ns, numbers) for worker, entries in parts]
            continue
        table = _table(history, parts)
        sums.bars.append(_bars(table))
        of_recoveries.append(table[(table["op"] == Op.HEAL.value) | table["replayed"]])
        if first in chosen:
            tables.append(table)
            chores.append(_chores(sums.chores))
    none = _table(history, _NO_ACTIONS)
    bars = pd.concat([each for each in sums.bars if len(each)] or [pd.DataFrame(columns=BAR_COLUMNS, dtype="int64")])
    return Actions(
        _joined(tables, none), _joined(of_recoveries, none), bars, sums, pd.concat(chores, ignore_index=True)
    )


def _chores(parts: list[tuple[int, np.ndarray]]) -> pd.DataFrame:
    """Returns one row per chore; of its slot and microbatch only data have a meaning."""
    entries = np.concatenate([np.empty(0, dtype=np.dtype(FIELDS)), *(each for _, each in parts)])
    workers = np.repeat([worker for worker, _ in parts], [len(each) for _, each in parts])
    places = {name: entries[name].astype(np.int64) for name in ("step", "pipeline", "stage", "microbatch")}
    times = {"start_ns": entries["start_ns"], "end_ns": entries["start_ns"] + entries["length_ns"]}
    names = np.array([str(each) for each in CHORES], dtype=object)[entries["op"]]
    return pd.DataFrame({"worker": workers.astype(np.int64), **places, "chore": names, **times})


def _joined(tables: Sequence[pd.DataFrame], none: pd.DataFrame) -> pd.DataFrame:
    if not tables:
        return none
    table = pd.concat(tables) if len(tables) > 1 else tables[0]
    return table.sort_values("end_ns", kind="stable", ignore_index=True)


def _chosen(ranges: dict[int, int], marked: Collection[int], span: int, most: int | None) -> set[int]:
    if most is None:
        return {*ranges}
    left = most * ENTRY_BYTES
    out = superfluous({first // span: size for first, size in ranges.items()}, marked, left)
    chosen = set()
    for first, size in ranges.items():
        if first // span not in out and size <= left:
            left -= size
            chosen.add(first)
    return chosen


def _table(history: RunHistory, parts: list[tuple[int, np.ndarray]]) -> pd.DataFrame:
    """Returns one row per action of a range: worker, text and parts, times, epoch, redundant and replayed."""
    pids = {each.of: each.child for each in history.of(StartedRecord)}
    columns, texts = columns_of(parts, pids)
    codes = columns.pop("code")
    table = pd.DataFrame(columns)
    table.insert(3, "action", pd.array(texts, dtype="str").take(codes))
    parts_of_texts = _parts([parse_action(text) for text in texts])
    table = pd.concat([table, parts_of_texts.take(codes).reset_index(drop=True)], axis=1)
    epoch, owner = _epochs_and_owners(history, table)
    table["epoch"] = epoch
    table["redundant"] = (owner >= 0) & (owner != table["worker"].to_numpy()) & table["counts_for_replica"]
    table["replayed"] = _replayed(table)
    return table.drop(columns=["counts_for_replica", "same"])


def _parts(actions: Sequence[Action]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "pipeline": np.array([each.pipeline for each in actions], dtype=np.int64),
            "stage": np.array([each.stage for each in actions], dtype=np.int64),
            "op": pd.array([each.op.value for each in actions], dtype="str"),
            "microbatch": np.array([each.microbatch for each in actions], dtype=np.int64),
            "kind": np.array([KIND_OF[each.op] for each in actions], dtype=np.int64),
            "same": pd.array([work_of(each).op.value for each in actions], dtype="str"),
            "counts_for_replica": np.array([each.op in _OF_REPLICAS for each in actions], dtype=bool),
        }
    )


def _epochs_and_owners(history: RunHistory, table: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Returns for each action the epoch in which it began, and the owner of its slot in that epoch (-1: unknown)."""
    epochs, stages = history.epochs, history.job.slots
    index = np.searchsorted([each.at_ns for each in epochs], table["start_ns"], side="right")
    numbers = np.array([0, *(each.epoch for each in epochs)], dtype=np.int64)
    places = (table["pipeline"] * stages + table["stage"]).to_numpy()
    width = max([1, *(len(each.owners) for each in epochs), *(places + 1)])
    owners = np.full((len(epochs) + 1, width), -1, dtype=np.int64)
    for started in history.of(StartedRecord):
        for pipeline, stage in started.slots:
            if pipeline * stages + stage < width:
                owners[0, pipeline * stages + stage] = started.of
    for row, each in enumerate(epochs, start=1):
        owners[row, : len(each.owners)] = each.owners
    return numbers[index], owners[index, places]


def _replayed(table: pd.DataFrame) -> pd.Series:
    owned = table[table["op"].isin([op.value for op in COMPUTE_OPS]) & ~table["redundant"]].sort_values("end_ns")
    again = owned.duplicated(["step", "pipeline", "stage", "microbatch", "same"])
    return again.reindex(table.index, fill_value=False).astype(bool)


def _bars(table: pd.DataFrame) -> pd.DataFrame:
    busy_ns = (table["end_ns"] - table["start_ns"]).where(~table["kind"].isin(NOT_BUSY), 0)
    grouped = table.assign(busy_ns=busy_ns).groupby(["worker", "step", "epoch"], as_index=False)
    return grouped.agg(start_ns=("start_ns", "min"), end_ns=("end_ns", "max"), busy_ns=("busy_ns", "sum"))
