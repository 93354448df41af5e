"""Reads the actions of a run from its files of steps; `core.history.step_files` has their form.

Rule: a file that is gone since the folder was listed was left out meanwhile, and counts as one that was never there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from engine.core.errors import StorageError
from engine.core.history.run_history import ActionFiles
from engine.core.history.run_records import ActionRecord
from engine.core.history.step_files import ENTRY_BYTES, FOLDER, StepFile, actions_in, step_file
from engine.files.atomic_write import open_to_read
from engine.files.run_folder import refuse_size


class StepReader(ActionFiles):
    """The files of the actions of the run in a folder, as they are now; a run without any has an empty `num_bytes`."""

    def __init__(self, run: Path):
        self._folder = run / FOLDER
        self._sizes = dict(self._listed())
        self.num_bytes = sum(self._sizes.values())

    def _listed(self) -> Iterator[tuple[StepFile, int]]:
        try:
            with os.scandir(self._folder) as entries:
                for each in entries:
                    found = step_file(each.name)
                    if found is not None and found.worker is not None and each.is_file(follow_symlinks=False):
                        with contextlib.suppress(FileNotFoundError):
                            yield found, each.stat(follow_symlinks=False).st_size
        except FileNotFoundError:
            return
        except OSError as error:
            raise StorageError(f"{self._folder}: {error.strerror}") from error

    def ranges(self) -> dict[int, int]:
        """Returns the first step of each range, in order, with the bytes of its actions."""
        found: dict[int, int] = {}
        for each, size in sorted(self._sizes.items()):
            found[each.first] = found.get(each.first, 0) + size
        return found

    def read(self, first: int) -> Iterator[tuple[int, bytes]]:
        """Yields each worker with the bytes of its actions in the range that begins with a step.

        Raises:
            StorageError: a file cannot be read.
        """
        for each in sorted(each for each in self._sizes if each.first == first):
            path = self._folder / str(each)
            try:
                with open(open_to_read(path), "rb") as file:
                    refuse_size(path, os.fstat(file.fileno()))
                    data = file.read()
            except FileNotFoundError:
                continue
            except OSError as error:
                raise StorageError(f"{path}: {error.strerror}") from error
            yield each.worker or 0, data

    def actions(self, firsts: Collection[int], pids: Mapping[int, int], since: int = 0) -> Iterator[ActionRecord]:
        """Yields the actions of some ranges, of steps from `since` on; `pids` has the process of each worker."""
        for first in firsts:
            for worker, data in self.read(first):
                yield from actions_in(data, worker, pids.get(worker, 0), since)

    def last_actions(self, pids: Mapping[int, int]) -> dict[int, ActionRecord]:
        """Returns the last action of each worker, from the end of its newest file."""
        newest: dict[int, int] = {}
        for each, size in self._sizes.items():
            if size >= ENTRY_BYTES and each.worker is not None:
                newest[each.worker] = max(each.first, newest.get(each.worker, 0))
        found = {}
        for worker, first in newest.items():
            with contextlib.suppress(OSError), (self._folder / str(StepFile(first, worker))).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, size // ENTRY_BYTES - 1) * ENTRY_BYTES)
                for action in actions_in(file.read(ENTRY_BYTES), worker, pids.get(worker, 0)):
                    found[worker] = action
        return found
