"""The table of actions: one row for each action that a worker finished, with its epoch and purpose.

Rules: an action belongs to the epoch in which it began. It is *redundant* if another worker owns its slot. It is
*replayed* if an owner of the slot had already finished the same action of the same step. Of a long run the table has
whole ranges of steps, with those near a recovery first; sums, bars and the rows about recoveries are of all actions.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from engine.core.action import COMPUTE_OPS, Action, Op, ops_at, parse_action
from engine.core.history.process_records import StartedRecord
from engine.core.history.retention import marked_steps, superfluous
from engine.core.history.run_history import RunHistory
from engine.core.history.step_files import ENTRY_BYTES, span_of
from engine.core.op_row import Stands
from engine.core.program.replay import work_of
from engine.report.action_arrays import BAR_COLUMNS, KIND_OF, NOT_BUSY, Sums, bars_of, columns_of, entries_of

MOST_ACTIONS = 500_000  # rows, which take about 50 MB, and three times as much while they are made
_OF_REPLICAS = COMPUTE_OPS | ops_at(Stands.STREAM, Stands.REPLICA)
_NO_ACTIONS: list[tuple[int, np.ndarray]] = []


@dataclass(frozen=True, slots=True, eq=False)
class Actions:
    """The actions of a run: the table, the sums over all, one bar per worker, step and epoch.

    `of_recoveries` has the rows that a recovery made necessary: work that was replayed, and shadows that were restored.
    """

    table: pd.DataFrame
    of_recoveries: pd.DataFrame
    bars: pd.DataFrame
    sums: Sums


def actions_of(history: RunHistory, most: int | None = MOST_ACTIONS) -> Actions:
    """Returns the actions of a run, of which the table has at most `most` rows."""
    ranges, sums = history.files.ranges(), Sums()
    span = span_of(history.job)
    marked = {step // span for step in marked_steps(history.records_of_recoveries)}
    chosen = _chosen(ranges, marked, span, most)
    epochs_ns = np.array([each.at_ns for each in history.epochs], dtype=np.int64)
    numbers = np.array([0, *(each.epoch for each in history.epochs)], dtype=np.int64)
    tables, of_recoveries = [], []
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
    none = _table(history, _NO_ACTIONS)
    bars = pd.concat([each for each in sums.bars if len(each)] or [pd.DataFrame(columns=BAR_COLUMNS, dtype="int64")])
    return Actions(_joined(tables, none), _joined(of_recoveries, none), bars, sums)


def _joined(tables: Sequence[pd.DataFrame], none: pd.DataFrame) -> pd.DataFrame:
    if not tables:
        return none
    table = pd.concat(tables) if len(tables) > 1 else tables[0]
    return table.sort_values("end_ns", kind="stable", ignore_index=True)


def _chosen(ranges: dict[int, int], marked: Collection[int], span: int, most: int | None) -> set[int]:
    """Returns the first steps of the ranges whose actions are rows of the table."""
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
