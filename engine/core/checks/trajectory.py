"""The trajectory of a run: hashes of its weights, one row per (step, layer); and the comparison of two.

Rules: a trajectory is a set of rows, so the order in which workers wrote them does not matter. Losses are compared by
their `repr`: it differs for any two floats, and nan equals nan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class TrajectoryRow:
    """One layer after one step: SHA-256 (hex) of weights and optimizer state, of buffers, and the step's loss."""

    step: int
    layer: int
    state: str
    buffers: str
    loss: float | None

    def texts(self) -> tuple[str, ...]:
        """Returns the row as text in the order of `COLUMNS`; a missing loss is empty."""
        loss = "" if self.loss is None else repr(self.loss)
        return (str(self.step), str(self.layer), self.state, self.buffers, loss)


COLUMNS = tuple(each.name for each in fields(TrajectoryRow))


def trajectory_hash(rows: Iterable[TrajectoryRow]) -> str:
    """Returns the SHA-256 (hex) over all rows, which may come in any order."""
    ordered = sorted(_by_key(rows).items())
    lines = "".join(",".join(row.texts()) + "\n" for _, row in ordered)
    return hashlib.sha256(lines.encode()).hexdigest()


def first_difference(a: Iterable[TrajectoryRow], b: Iterable[TrajectoryRow]) -> str | None:
    """Returns one sentence on the first (step, layer) and column in which two trajectories differ, or None."""
    rows_a, rows_b = _by_key(a), _by_key(b)
    for key in sorted(rows_a.keys() | rows_b.keys()):
        place = f"step {key[0]}, layer {key[1]}"
        if key not in rows_a or key not in rows_b:
            return f"{place}: only the {'first' if key in rows_a else 'second'} trajectory has this row"
        for column, text_a, text_b in zip(COLUMNS, rows_a[key].texts(), rows_b[key].texts(), strict=True):
            if text_a != text_b:
                return (
                    f"{place}: {column} differs, {text_a or 'none'} in the first and {text_b or 'none'} in the second"
                )
    return None


def _by_key(rows: Iterable[TrajectoryRow]) -> dict[tuple[int, int], TrajectoryRow]:
    by_key: dict[tuple[int, int], TrajectoryRow] = {}
    for row in rows:
        key = (row.step, row.layer)
        assert key not in by_key, f"two rows for step {row.step}, layer {row.layer}"
        by_key[key] = row
    return by_key
