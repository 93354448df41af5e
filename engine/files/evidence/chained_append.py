"""Appends records to a file of lines: each process links its lines (`core.evidence.chain`), several may append.

Rules: a line is in the kernel's hands before the call returns. A line of which the kernel took only a part is ended
there and written again, whole: another process may have appended in between. A line that could not be written is in no
chain, so the next one follows the one before it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from engine.core.evidence.chain import linked
from engine.core.history.record import AGENT, StampedRecord
from engine.core.history.record_lines import encoded
from engine.files.atomic_write import open_to_append, storage_errors

_Key = tuple[int, str, int]  # process, path and inode


class Chain:
    """The chain of this process in one file, for all its threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = ""

    @property
    def has_links(self) -> bool:
        """Whether a line was written."""
        return bool(self._last)

    def append(self, fd: int, text: str) -> None:
        """Writes a record as a line; raises OSError if it could not be written whole."""
        with self._lock:
            line, last = linked(text, self._last)
            append(fd, f"{line}\n".encode())
            self._last = last


_chains: dict[_Key, Chain] = {}


def chain_of(fd: int, pid: int) -> Chain:
    """Returns the chain of this process, `pid`, in a file that is open for appending; an empty file has none yet."""
    facts = os.fstat(fd)
    key = (pid, os.readlink(f"/proc/self/fd/{fd}"), facts.st_ino)
    found = _chains.get(key)
    if found is None or (found.has_links and not facts.st_size):  # the inode of a file that is gone
        found = _chains[key] = Chain()
    return found


def append(fd: int, line: bytes) -> None:
    """Writes a line, which ends in a newline; raises OSError if it could not be written whole."""
    written = os.write(fd, line)
    while written < len(line):
        if written == len(line) - 1:
            line = b"\n"  # the record is there
        elif written:
            line = b"\n" + line.lstrip(b"\n")
        written = os.write(fd, line)


def add_records(path: Path, *records: StampedRecord) -> None:
    """Appends records of the launcher, or of another command about the run, with the present time.

    Raises:
        StorageError: the file could not be written.
    """
    add_lines(path, stamped(records), os.getpid())


def stamped(records: Iterable[StampedRecord], pid: int = 0) -> list[str]:
    """Returns records of a process, by default of this one, as texts with the present time."""
    stamp = {"worker": AGENT, "pid": pid or os.getpid(), "at_ns": time.monotonic_ns()}
    return [encoded(replace(each, **stamp)) for each in records]


def add_lines(path: Path, texts: Iterable[str], pid: int) -> None:
    """Appends the records of a process, as texts.

    Raises:
        StorageError: the file could not be written.
    """
    with open(open_to_append(path), "ab", buffering=0) as file, storage_errors("write", path):
        for each in texts:
            chain_of(file.fileno(), pid).append(file.fileno(), each)
