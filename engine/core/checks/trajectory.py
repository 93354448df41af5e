"""The trajectory of a run: hashes of its weights, one row per (step, layer); and the comparison of two.

Rules: a trajectory is a set of rows, so the order in which workers wrote them does not matter. Losses are compared by
their `repr`: it differs for any two floats, and nan equals nan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

from engine.core.errors import ensure
from engine.core.history.verdict_records import DATA_PART, Difference

MARK_DIGITS = 8
_HASH_DIGITS = 12  # of a hash in a message
_PARTS = ("weights or optimizer state", "buffers")


# The names of some tensors, and their marks, of `MARK_DIGITS` each; a mark hashes a tensor and all before it.
TensorMarks = tuple[tuple[str, ...], str]
NO_MARKS: TensorMarks = ((), "")


@dataclass(frozen=True, slots=True)
class TrajectoryRow:
    """One layer after one step: SHA-256 (hex) of weights and optimizer state, of buffers, and the step's loss.

    The marks of the tensors, and of the microbatches of the step (`data`), only explain a difference; files do not
    have them.
    """

    step: int
    layer: int
    state: str
    buffers: str
    loss: float | None
    marks: tuple[TensorMarks, TensorMarks] = field(default=(NO_MARKS, NO_MARKS), compare=False, repr=False)
    data: TensorMarks = field(default=NO_MARKS, compare=False, repr=False)

    def texts(self) -> tuple[str, ...]:
        """Returns the row as text in the order of `COLUMNS`; a missing loss is empty."""
        loss = "" if self.loss is None else repr(self.loss)
        return (str(self.step), str(self.layer), self.state, self.buffers, loss)


_Rows = dict[tuple[int, int], TrajectoryRow]  # by step and layer
COLUMNS = tuple(each.name for each in fields(TrajectoryRow) if each.compare)


def trajectory_hash(rows: Iterable[TrajectoryRow]) -> str:
    """Returns the SHA-256 (hex) over all rows, which may come in any order."""
    ordered = sorted(_by_key(rows).items())
    lines = "".join(",".join(row.texts()) + "\n" for _, row in ordered)
    return hashlib.sha256(lines.encode()).hexdigest()


def first_difference(run: Iterable[TrajectoryRow], twin: Iterable[TrajectoryRow]) -> Difference | None:
    """Returns the first difference between two trajectories, or None.

    Of the first step that differs: its first microbatch with other bits, which explains all else; else its first layer
    with other tensors; else the loss.
    """
    ours, theirs = _by_key(run), _by_key(twin)
    found = _first_of_results(ours, theirs)
    return found and (_of_data(found.step, ours, theirs) or found)


def _first_of_results(ours: _Rows, theirs: _Rows) -> Difference | None:
    loss: Difference | None = None
    for step, layer in sorted(ours.keys() | theirs.keys()):
        if loss is not None and step > loss.step:
            break
        mine, its = ours.get((step, layer)), theirs.get((step, layer))
        if mine is None or its is None:
            found = ["none" if each is None else "one" for each in (mine, its)]
            return Difference(step, layer, "rows", "", *found)
        parts = zip(_PARTS, (mine.state, mine.buffers), (its.state, its.buffers), mine.marks, its.marks, strict=True)
        for part, one, other, marks, its_marks in parts:
            if one != other:
                tensor, _, _ = _first_mark(marks, its_marks)
                return Difference(step, layer, part, tensor, one[:_HASH_DIGITS], other[:_HASH_DIGITS])
        if loss is None and repr(mine.loss) != repr(its.loss):
            loss = Difference(step, None, "loss", "", repr(mine.loss), repr(its.loss))
    return loss


def _of_data(step: int, ours: _Rows, theirs: _Rows) -> Difference | None:
    """Returns the first microbatch of a step that differs; None if the marks do not tell."""
    mine, its = (next((row.data for (at, _), row in rows.items() if at == step), NO_MARKS) for rows in (ours, theirs))
    microbatch, one, other = _first_mark(mine, its)
    return Difference(step, None, DATA_PART, microbatch, one, other) if microbatch else None


def _first_mark(mine: TensorMarks, its: TensorMarks) -> tuple[str, str, str]:
    """Returns the name of the first tensor that differs and its two marks, or empty texts if the marks do not tell."""
    for number, name in enumerate(mine[0][: len(its[0])]):
        place = slice(number * MARK_DIGITS, (number + 1) * MARK_DIGITS)
        if mine[1][place] != its[1][place]:
            return name, mine[1][place], its[1][place]
    return "", "", ""


def _by_key(rows: Iterable[TrajectoryRow]) -> _Rows:
    by_key: _Rows = {}
    for row in rows:
        key = (row.step, row.layer)
        ensure(key not in by_key, f"two rows for step {row.step}, layer {row.layer}")
        by_key[key] = row
    return by_key
