"""The table of actions: one row for each action that a worker finished, with its epoch and purpose.

Rules: an action belongs to the epoch in which it began. It is *redundant* if another worker owns its slot. It is
*replayed* if an owner of the slot had already finished the same action of the same step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from engine.core.action import COMPUTE_OPS, OP_TABLE, Action, ops_at, parse_action
from engine.core.history.process_records import StartedRecord
from engine.core.history.run_history import RunHistory
from engine.core.history.run_records import ActionRecord
from engine.core.op_row import Shown, Stands
from engine.core.program.replay import work_of

KINDS = tuple(shown.value for shown in Shown)  # the legend of a timeline
_KIND_OF = {op: KINDS.index(row.shown) for op, row in OP_TABLE.items()}
_OF_REPLICAS = COMPUTE_OPS | ops_at(Stands.STREAM, Stands.REPLICA)


def actions_table(history: RunHistory) -> pd.DataFrame:
    """Returns one row per action: worker, text and parts, times in nanoseconds, epoch, redundant and replayed."""
    done = history.of(ActionRecord)
    table = pd.DataFrame(
        {
            "worker": _column(done, "worker"),
            "pid": _column(done, "pid"),
            "step": _column(done, "step"),
            "action": pd.array([each.action for each in done], dtype="str"),
            "start_ns": _column(done, "start_ns"),
            "end_ns": _column(done, "end_ns"),
        }
    )
    codes, texts = pd.factorize(table["action"])
    parsed = [parse_action(text) for text in texts]
    parts = _parts(parsed).take(codes).reset_index(drop=True)
    table = pd.concat([table, parts], axis=1)
    epoch, owner = _epochs_and_owners(history, table)
    table["epoch"] = epoch
    table["redundant"] = (owner >= 0) & (owner != table["worker"].to_numpy()) & table["counts_for_replica"]
    table["replayed"] = _replayed(table)
    return table.drop(columns=["counts_for_replica", "same"])


def _column(done: Sequence[ActionRecord], name: str) -> np.ndarray:
    return np.fromiter((getattr(each, name) for each in done), dtype=np.int64, count=len(done))


def _parts(actions: Sequence[Action]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "pipeline": np.array([each.pipeline for each in actions], dtype=np.int64),
            "stage": np.array([each.stage for each in actions], dtype=np.int64),
            "op": pd.array([each.op.value for each in actions], dtype="str"),
            "microbatch": np.array([each.microbatch for each in actions], dtype=np.int64),
            "kind": np.array([_KIND_OF[each.op] for each in actions], dtype=np.int64),
            "same": pd.array([work_of(each).op.value for each in actions], dtype="str"),
            "counts_for_replica": np.array([each.op in _OF_REPLICAS for each in actions], dtype=bool),
        }
    )


def _epochs_and_owners(history: RunHistory, table: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Returns for each action the epoch in which it began, and the owner of its slot in that epoch (-1: unknown)."""
    epochs, stages = history.epochs, history.job.stages
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
