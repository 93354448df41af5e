"""Appends to the files of a run in which each holds a range of steps; `core.history.step_files` has their form."""

from __future__ import annotations

import os

from engine.core.history.step_files import StepFile

_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class StepWriter:
    """The files of one worker, or of the hashes; `folder_fd` is the folder's descriptor, `span` the steps of a file."""

    def __init__(self, folder_fd: int, worker: int | None, span: int):
        self._folder_fd = folder_fd
        self._worker = worker
        self._span = span
        self._fd = -1
        self._steps = range(0)  # of the open file
        self._rest = b""  # of an entry of which the kernel took a part; no other process writes behind it

    def append(self, step: int, data: bytes) -> None:
        """Writes an entry of a step; raises OSError if it could not be written."""
        if step not in self._steps:
            self._open(step)
        data = self._rest + data
        written = os.write(self._fd, data)
        while written < len(data):
            self._rest = data = data[written:]
            written = os.write(self._fd, data)
        self._rest = b""

    def fd_of(self, step: int) -> int:
        """Returns the descriptor of the file of a step, for lines; raises OSError if it cannot be opened."""
        if step not in self._steps:
            self._open(step)
        return self._fd

    def close(self) -> None:
        """Closes the open file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd, self._steps = -1, range(0)

    def _open(self, step: int) -> None:
        first = step - step % self._span
        fd = os.open(str(StepFile(first, self._worker)), _FLAGS, 0o600, dir_fd=self._folder_fd)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._steps, self._rest = fd, range(first, first + self._span), b""


def open_steps(path: os.PathLike[str] | str) -> int:
    """Makes the folder of the files and returns its descriptor."""
    os.makedirs(path, mode=0o700, exist_ok=True)
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
