"""The file trajectory.csv: the rows of a trajectory as text from which every bit can be read back."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from engine.core.checks.trajectory import COLUMNS, TrajectoryRow
from engine.core.errors import StorageError
from engine.files.atomic_write import write_atomically


def write_trajectory(path: Path, rows: Iterable[TrajectoryRow]) -> None:
    """Writes the rows in the given order.

    Raises:
        StorageError: the file could not be written.
    """
    write_atomically(path, trajectory_text(rows))


def trajectory_text(rows: Iterable[TrajectoryRow]) -> str:
    """Returns the rows as the text of a file."""
    return "".join(",".join(line) + "\n" for line in (COLUMNS, *(row.texts() for row in rows)))


def trajectory_rows(text: str, path: Path) -> list[TrajectoryRow]:
    """Returns the rows in the text of the file at `path`.

    Raises:
        StorageError: a line, which the message names, is damaged.
    """
    lines = text.splitlines()
    if not lines or lines[0] != ",".join(COLUMNS):
        raise StorageError(f"{path}:1: expected the columns {','.join(COLUMNS)}")
    return [trajectory_row(line, f"{path}:{number}") for number, line in enumerate(lines[1:], start=2)]


def trajectory_row(line: str, place: str) -> TrajectoryRow:
    """Returns the row in a line; raises StorageError, which names the place, for any other text."""
    try:
        step, layer, state, buffers, loss = line.split(",")
        return TrajectoryRow(int(step), int(layer), state, buffers, float(loss) if loss else None)
    except ValueError as error:
        raise StorageError(f"{place}: expected {','.join(COLUMNS)}, found {line!r}") from error
