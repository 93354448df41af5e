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
    lines = [COLUMNS, *(row.texts() for row in rows)]
    write_atomically(path, "".join(",".join(line) + "\n" for line in lines))


def read_trajectory(path: Path) -> list[TrajectoryRow]:
    """Returns the rows in the order of the file.

    Raises:
        StorageError: the file cannot be read, or a line, which the message names, is damaged.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"cannot read {str(path)!r}: {error}") from error
    if not lines or lines[0] != ",".join(COLUMNS):
        raise StorageError(f"{path}:1: expected the columns {','.join(COLUMNS)}")
    return [_row(line, f"{path}:{number}") for number, line in enumerate(lines[1:], start=2)]


def _row(line: str, place: str) -> TrajectoryRow:
    try:
        step, layer, state, buffers, loss = line.split(",")
        return TrajectoryRow(int(step), int(layer), state, buffers, float(loss) if loss else None)
    except ValueError as error:
        raise StorageError(f"{place}: expected {','.join(COLUMNS)}, found {line!r}") from error
