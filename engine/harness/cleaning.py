"""Finds and deletes the leftovers in a folder of results: of killed runs, and of old runs where the user asks for that.

Rules: a run or a matrix that goes on is left alone, also if it begins between the search and the deletion. Only files
that bamboo writes are deleted; links are not followed. A folder with a file of the user stays, with that file.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.core.checkpoints.manifest import is_part
from engine.core.errors import StorageError
from engine.files.checkpoints.checkpoint_folder import checkpoints_at
from engine.files.matrix_results import MATRICES, RESULTS
from engine.files.own_files import MATRIX, RUN, TEMPORARY, TEMPORARY_LINK, TWINS, delete_entry, disk_bytes, own_files
from engine.files.run_folder import RunFolder, run_names
from engine.files.twin_file import TWINS_FOLDER
from engine.harness.dead_runs import dead_run, stores
from engine.harness.twin_run import reusable_twins

_MOMENT_S = 60.0  # a younger temporary file may still be written


@dataclass(frozen=True, slots=True)
class Leftover:
    """Entries to delete in a folder of results, each folder behind its own entries.

    `user` is the run or matrix that may still use them.
    """

    results: Path
    what: str
    path: Path
    entries: tuple[Path, ...]
    user: Path | None = None

    @property
    def num_bytes(self) -> int:
        """The space on disk that the entries take."""
        return sum(map(disk_bytes, self.entries))


@dataclass(frozen=True, slots=True)
class OldRuns:
    """The runs and matrices to delete: all but the newest `keep`, and of these the ones older than `older_than_s`."""

    keep: int = 0
    older_than_s: float = 0.0


def leftovers(results: Path, old: OldRuns | None) -> tuple[list[Leftover], list[str]]:
    """Returns the leftovers in a folder of results, and the names of the runs and matrices that go on."""
    found: list[Leftover] = []
    busy: list[str] = []
    matrices = results / MATRICES
    for folder, names, form, what in (
        (results, run_names(results), RUN, "run"),
        (matrices, _inner_names(matrices), MATRIX, "matrix"),
    ):
        for number, name in enumerate(reversed(names)):
            path = folder / name
            with dead_run(path) as is_dead:
                if not is_dead:
                    busy.append(name)
                elif old and number >= old.keep and _age_of_run_s(path) > old.older_than_s:
                    found.append(Leftover(results, what, path, (*own_files(path, form), path), path))
                else:
                    found += _unfinished(results, path, path)
    gone = {each.path for each in found}
    remaining = [RunFolder(results / name) for name in run_names(results) if results / name not in gone]
    return [*found, *_unusable_twins(results, remaining), *_old_links(results)], busy


def delete(leftover: Leftover) -> list[Path]:
    """Deletes a leftover and returns its entries that are still there: in use again, or not bamboo's alone."""
    if leftover.user is None:
        return _delete(leftover)
    with dead_run(leftover.user) as is_dead:
        return _delete(leftover) if is_dead else list(leftover.entries)


def _delete(leftover: Leftover) -> list[Path]:
    for path in leftover.entries:
        with contextlib.suppress(OSError):  # gone already, or a folder with a file of the user
            delete_entry(path, leftover.results)
    return [path for path in leftover.entries if os.path.lexists(path)]


def _inner_names(folder: Path) -> list[str]:
    """Returns the names of the runs or matrices in a folder; a link to another folder of results has none."""
    return [] if folder.is_symlink() else run_names(folder)


def _unfinished(results: Path, run: Path, user: Path) -> Iterator[Leftover]:
    """Yields the leftovers of killed processes in the folder of a dead run or matrix."""
    for store in stores(run):
        inside = [path for path in own_files(run, RUN) if path == store or store in path.parents]
        yield Leftover(results, "store of a killed run", store, tuple(inside), user)
    for path in own_files(run, TEMPORARY):
        yield Leftover(results, "temporary file", path, (path,), user)
    with contextlib.suppress(StorageError):  # of another user
        for name in checkpoints_at(RunFolder(run).checkpoints, run).orphans():
            path = RunFolder(run).checkpoints / name
            if is_part(name.rpartition("/")[2]):  # others are told above
                yield Leftover(results, "part of an unfinished checkpoint", path, (path,), user)
    if run == user:
        for name in _inner_names(run / "runs"):  # of a matrix
            yield from _unfinished(results, run / "runs" / name, user)


def _unusable_twins(results: Path, runs: list[RunFolder]) -> Iterator[Leftover]:
    folder = results / TWINS_FOLDER
    if not folder.is_dir() or folder.is_symlink():
        return
    usable = reusable_twins(runs)
    for path in own_files(folder, TWINS):
        if path.stem not in usable and _age_s(path) > _MOMENT_S:
            yield Leftover(results, "twin that no run here can use again", path, (path,))


def _old_links(results: Path) -> Iterator[Leftover]:
    for path in own_files(results, TEMPORARY_LINK) if results.is_dir() else ():
        if _age_s(path) > _MOMENT_S:
            yield Leftover(results, "temporary file", path, (path,))


def _age_of_run_s(folder: Path) -> float:
    """Returns the time since the last event of a run or the last result of a matrix."""
    written = [path for path in (folder / "events.jsonl", folder / RESULTS) if path.is_file()]
    return _age_s(written[0] if written else folder)


def _age_s(path: Path) -> float:
    return time.time() - path.lstat().st_mtime
