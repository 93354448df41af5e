"""The actions of a run as arrays, from the bytes of its files: fast enough for tens of millions of them.

Rule: one array holds the actions of one worker in one range of steps, in the order in which it finished them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from engine.core.action import OP_TABLE
from engine.core.history.run_history import ActionFiles
from engine.core.history.step_files import ENTRY_BYTES, FIELDS, OPS, action_of, is_entry
from engine.core.op_row import Shown

KINDS = tuple(shown.value for shown in Shown)  # the legend of a timeline
KIND_OF = {op: KINDS.index(row.shown) for op, row in OP_TABLE.items()}
NOT_BUSY = (KINDS.index("transfer"), KINDS.index("waiting"))
_KINDS = np.array([KIND_OF[op] for op in OPS], dtype=np.int8)
_IS_BUSY = ~np.isin(_KINDS, NOT_BUSY)
_IS_ENTRY = np.array([[is_entry(op, mark) for mark in range(256)] for op in range(256)])
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
            found = entries[last]
            totals.end_ns, totals.last_step = int(end_ns[last]), int(found["step"])
            totals.last_action = _text_of(found)

    @property
    def num_actions(self) -> int:
        """The number of all actions."""
        return sum(each.num_actions for each in self.workers.values())

    @property
    def end_ns(self) -> int:
        """The end of the last action; 0 without any."""
        return max((each.end_ns for each in self.workers.values()), default=0)


def entries_of(files: ActionFiles, first: int, sums: Sums) -> Iterator[tuple[int, np.ndarray]]:
    """Yields each worker with its actions in a range of steps, and adds them to `sums`."""
    for worker, data in files.read(first):
        entries = np.frombuffer(data, dtype=np.dtype(FIELDS), count=len(data) // ENTRY_BYTES)
        good = _IS_ENTRY[entries["op"], entries["mark"]]
        if not good.all():
            sums.unread += int(len(good) - good.sum())
            entries = entries[good]
        sums.add(worker, entries)
        yield worker, entries


def bars_of(worker: int, entries: np.ndarray, epochs_ns: np.ndarray, numbers: np.ndarray) -> pd.DataFrame:
    """Returns one bar per step of a worker that redid no step: its begin, its end, and its busy time.

    `epochs_ns` are the beginnings of epochs; `numbers` are the numbers of the epochs, from that before the first on.
    """
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


def _text_of(found: Any) -> str:
    return str(action_of(*(int(found[each]) for each in ("stage", "pipeline", "microbatch", "op"))))
