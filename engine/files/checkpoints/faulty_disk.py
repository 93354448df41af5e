"""A disk with faults: full after some bytes, errors of calls, a byte that is changed in silence.

Rules: a trouble acts on the next files of this process that it fits, and then the disk is sound again. A byte
is changed behind the hash of its writer, so that only a reader that hashes finds it. Other calls go through.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from engine.files.checkpoints.disk import Disk
from engine.files.checkpoints.storage import Bytes

FailingCall = Literal["write", "sync", "read"]


@dataclass(slots=True)
class Trouble:
    """A fault of a disk: `call` fails with the number `error`, or with 0 the byte is changed; after so many bytes.

    It acts on `files` files, and calls `tell` with a description each time.
    """

    call: FailingCall
    error: int
    after_bytes: int = 0
    files: int = 1
    tell: Callable[[str], object] = str


class DiskTroubles:
    """The troubles that wait for the files of one process; any thread may add one."""

    def __init__(self, *troubles: Trouble):
        self._waiting = list(troubles)
        self._lock = threading.Lock()

    def add(self, trouble: Trouble) -> None:
        """Adds a trouble for the next files."""
        with self._lock:
            self._waiting.append(trouble)

    def raise_at(self, call: FailingCall, name: str) -> None:
        """Raises OSError if a call fails now; `name` is the file's."""
        with self._lock:
            found = self._next(call)
            if found is not None and found.after_bytes <= 0 and found.error:
                self._act(found, f"{call} of {name}: {os.strerror(found.error)}")
                raise OSError(found.error, os.strerror(found.error))

    def to_write(self, data: Bytes) -> Bytes:
        """Returns the bytes that the disk takes of `data`: fewer before it is full, or a copy with one bit changed."""
        with self._lock:
            found = self._next("write")
            if found is None or found.after_bytes >= len(data):
                return data
            if found.error:
                return data[: found.after_bytes]
            changed = bytearray(data)
            changed[found.after_bytes] ^= 1
            return changed

    def written(self, count: int, name: str) -> None:
        """Counts bytes that the disk has taken."""
        with self._lock:
            found = self._next("write")
            if found is not None:
                found.after_bytes -= count
                if found.after_bytes < 0:
                    self._act(found, f"one bit of {name} is changed")

    def _next(self, call: FailingCall) -> Trouble | None:
        return next((each for each in self._waiting if each.call == call), None)

    def _act(self, trouble: Trouble, how: str) -> None:
        trouble.files -= 1
        if trouble.files <= 0:
            self._waiting.remove(trouble)
        trouble.tell(how)


class FaultyDisk:
    """Another disk, with troubles; every method does as `Disk` says."""

    def __init__(self, disk: Disk, troubles: DiskTroubles):
        self._disk = disk
        self._troubles = troubles
        self._names: dict[int, str] = {}
        self.make_folder = disk.make_folder
        self.rename = disk.rename
        self.sync_folder = disk.sync_folder
        self.remove = disk.remove
        self.names = disk.names

    def create(self, name: str) -> int:
        """Opens a new file."""
        fd = self._disk.create(name)
        self._names[fd] = name
        return fd

    def write(self, fd: int, data: Bytes) -> int:
        """Writes fewer bytes than were asked for, fails, or changes one, if a trouble says so."""
        self._troubles.raise_at("write", self._names[fd])
        count = self._disk.write(fd, self._troubles.to_write(data))
        self._troubles.written(count, self._names[fd])
        return count

    def sync(self, fd: int) -> None:
        """Syncs a file, or fails."""
        self._troubles.raise_at("sync", self._names[fd])
        self._disk.sync(fd)

    def close(self, fd: int) -> None:
        """Closes a file."""
        self._names.pop(fd, None)
        self._disk.close(fd)

    def read(self, name: str, most: int) -> bytes:
        """Reads a file, or fails."""
        self._troubles.raise_at("read", name)
        return self._disk.read(name, most)


def full_disk(after_bytes: int, files: int = 1, tell: Callable[[str], object] = str) -> Trouble:
    """Returns the trouble of a disk that is full after so many bytes; each of `files` files then fails."""
    return Trouble("write", errno.ENOSPC, after_bytes, files, tell)


def failing_disk(call: FailingCall, files: int = 1, tell: Callable[[str], object] = str) -> Trouble:
    """Returns the trouble of a disk whose call fails with EIO, for the next `files` files."""
    return Trouble(call, errno.EIO, 0, files, tell)


def damaging_disk(at_byte: int, files: int = 1, tell: Callable[[str], object] = str) -> Trouble:
    """Returns the trouble of a disk that changes one bit of the byte at this place, counted from now, in silence."""
    return Trouble("write", 0, at_byte, files, tell)
