"""The place of the checkpoints that a user names: a run, a folder or a URL, with or without a step behind an @."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

from engine.core.errors import StorageError
from engine.core.history.run_records import JobRecord
from engine.files.checkpoints.checkpoint_folder import CheckpointFolder, CheckpointName, checkpoints_at
from engine.files.events_file import recorded
from engine.files.run_folder import RunFolder, find_run

_STEP = re.compile(r"(.*)@([0-9]{1,12})", re.DOTALL)


@dataclass(frozen=True, slots=True)
class CheckpointPlace:
    """Checkpoints: all in a folder or at a URL, or those of one run; of one step, or of all.

    `of` is the folder of the run that the user named, None for a folder of checkpoints and a URL. `run` is the name of
    the run whose checkpoints count, empty for all.
    """

    folder: CheckpointFolder
    run: str = ""
    step: int | None = None
    of: RunFolder | None = None

    def names(self) -> tuple[CheckpointName, ...]:
        """Returns the names of the checkpoints, by step, also of those whose manifests cannot be read."""
        found = (name for name in self.folder.names() if self.step in (None, name.step))
        return tuple(name for name in found if not self.run or self._is_of_run(name))

    def _is_of_run(self, name: CheckpointName) -> bool:
        try:
            return self.folder.manifest(name).run == self.run
        except StorageError:
            return True


def checkpoint_place(text: str, results: Path) -> CheckpointPlace:
    """Returns the place that `text` names: a run or the beginning of its name, ``latest``, a folder or a URL.

    Raises:
        NothingMatchedError: there is no such run.
        UserError: the URL is none that can be used, or the names of several runs begin so.
    """
    match = None if Path(text).exists() else _STEP.fullmatch(text)
    where, step = (match[1], int(match[2])) if match else (text, None)
    if "://" in where:
        return CheckpointPlace(checkpoints_at(where), step=step)
    if Path(where).is_dir() and not RunFolder(Path(where)).events.exists():
        return CheckpointPlace(checkpoints_at(Path(where)), step=step)
    run = find_run(results, where or None)
    if named := _named_place(run):
        return CheckpointPlace(checkpoints_at(named), run.path.name, step, run)
    return CheckpointPlace(checkpoints_at(run.checkpoints, run.path), "", step, run)


def _named_place(run: RunFolder) -> str:
    """Returns the place that the job of a run names; empty if it names none, or nothing is recorded."""
    with contextlib.suppress(StorageError, FileNotFoundError):
        for record in recorded(run.events):
            return getattr(record.job, "checkpoints", "") if isinstance(record, JobRecord) else ""
    return ""
