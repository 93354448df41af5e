"""Trajectories of fault-free twins, kept for the next run of the same job: ``<results>/twins/<fingerprint>.csv``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from engine.core.checks.trajectory import TrajectoryRow
from engine.files.atomic_write import storage_errors
from engine.files.trajectory_file import read_trajectory, write_trajectory

TWINS_FOLDER = "twins"


def kept_twin(results: Path, fingerprint: str) -> list[TrajectoryRow] | None:
    """Returns the rows of a twin that ran before; None if its file does not exist.

    Raises:
        StorageError: the file cannot be read or is damaged.
    """
    path = _path(results, fingerprint)
    return read_trajectory(path) if path.exists() else None


def keep_twin(results: Path, fingerprint: str, rows: Iterable[TrajectoryRow]) -> None:
    """Writes the rows of a twin.

    Raises:
        StorageError: the file could not be written.
    """
    path = _path(results, fingerprint)
    with storage_errors("make", path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_trajectory(path, rows)


def source_hash(package: Path) -> str:
    """Returns the SHA-256 (hex) over the Python files of a package: changed code may compute other bits."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _path(results: Path, fingerprint: str) -> Path:
    return results / TWINS_FOLDER / f"{fingerprint}.csv"
