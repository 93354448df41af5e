"""The hashes of a run's weights on disk: its trajectory, and its twin's."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from engine.core.checks.trajectory import COLUMNS, TrajectoryRow
from engine.core.errors import StorageError
from engine.files.atomic_write import make_folder, open_to_read, write_atomically


def trajectory_text(rows: Iterable[TrajectoryRow]) -> str:
    """Returns the rows as the text of trajectory.csv, from which every bit can be restored."""
    return "".join(",".join(line) + "\n" for line in (COLUMNS, *(row.texts() for row in rows)))


def trajectory_rows(text: str, path: Path) -> list[TrajectoryRow]:
    """Returns the rows in the text of the file at `path`; raises StorageError with the damaged line."""
    lines = text.splitlines()
    if not lines or lines[0] != ",".join(COLUMNS):
        raise StorageError(f"{path}:1: expected the columns {','.join(COLUMNS)}")
    return [trajectory_row(line, f"{path}:{number}") for number, line in enumerate(lines[1:], start=2)]


def trajectory_row(line: str, place: str) -> TrajectoryRow:
    """Returns the row in a line; raises StorageError with the place for any other text."""
    try:
        step, layer, state, buffers, loss = line.split(",")
        return TrajectoryRow(int(step), int(layer), state, buffers, float(loss) if loss else None)
    except ValueError as error:
        raise StorageError(f"{place}: expected {','.join(COLUMNS)}, found {line!r}") from error


# Trajectories of fault-free twins are kept for later runs of the same job: ``<results>/twins/<fingerprint>.csv``.
#
# Rule: a kept twin decides whether a later run is correct. It counts only if it is this user's own file with mode 0600,
# and its last line is the SHA-256 of its fingerprint and its rows.

TWINS_FOLDER = "twins"


def kept_twin(results: Path, fingerprint: str) -> list[TrajectoryRow] | None:
    """Returns the rows of a kept twin, or None; raises StorageError if it is unreadable, damaged or another user's."""
    path = _path(results, fingerprint)
    try:
        with open(open_to_read(path), "rb") as file:
            facts = os.fstat(file.fileno())
            data = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}") from error
    if facts.st_uid != os.geteuid() or stat.S_IMODE(facts.st_mode) & 0o077:
        raise StorageError(f"{path}: expected a file of this user with mode 0600")
    text, _, last = data.decode("utf-8", "replace").removesuffix("\n").rpartition("\n")
    # A signature would need a key outside the folder of results, for a file whose loss costs one run.
    if last != _hash(fingerprint, f"{text}\n"):
        raise StorageError(f"{path}: the hash in its last line is not that of its rows")
    return trajectory_rows(text, path)


def keep_twin(results: Path, fingerprint: str, rows: Iterable[TrajectoryRow]) -> None:
    """Writes the rows of a twin. Raises StorageError if the file could not be written."""
    path, text = _path(results, fingerprint), trajectory_text(rows)
    make_folder(path.parent, results)
    write_atomically(path, f"{text}{_hash(fingerprint, text)}\n")


@cache
def own_sources() -> str:
    """Returns the hash of the engine's code, read once by this process: that takes 0.1 s."""
    return source_hash(Path(__file__).parents[1])


def source_hash(package: Path) -> str:
    """Returns the SHA-256 (hex) over the Python files of a package: changed code may compute other bits."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _hash(fingerprint: str, text: str) -> str:
    return "sha256 " + hashlib.sha256(f"{fingerprint}\n{text}".encode()).hexdigest()


def _path(results: Path, fingerprint: str) -> Path:
    return results / TWINS_FOLDER / f"{fingerprint}.csv"
