"""Files of records whose lines are linked by hashes: opened without following a link, and appended to."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from engine.codec.records import encoded
from engine.core.errors import StorageError
from engine.core.history.evidence import linked
from engine.core.history.run_records import AGENT, StampedRecord
from engine.files.atomic_write import open_below, open_in, open_to_append, storage_errors
from engine.files.run_folder import refuse_size

_CHUNK_BYTES = 1 << 20
_MOST_LINE_BYTES = 1 << 26  # the losses of a twin of millions of steps


@contextlib.contextmanager
def evidence(run: Path, file: str) -> Iterator[tuple[IO[bytes], int]]:
    """Yields a file of the evidence, open for reading, and its size; `file` is its path in the folder of the run.

    The run may come from elsewhere: a file that no run would write is an error; wrong text in it, and its absence, may
    be a flaw of the evidence.

    Raises:
        FileNotFoundError: it does not exist.
        StorageError: it cannot be read, a part of its path is a link, or no run writes a file of that size.
    """
    path = run / file
    try:
        with open_below(path.parent, run) as folder, open(open_in(path.name, folder), "rb") as opened:
            facts = os.fstat(opened.fileno())
            refuse_size(path, facts)
            yield opened, facts.st_size
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}") from error


def parts(file: IO[bytes], size: int, part: int) -> Iterator[bytes]:
    """Yields the first `size` bytes of a file in parts."""
    while size > 0 and (data := file.read(min(part, size))):
        size -= len(data)
        yield data


def evidence_lines(run: Path, file: str) -> Iterator[str]:
    """Yields the lines of a file, also an unfinished last one; raises as `evidence`, also for a line without end."""
    rest = b""
    with evidence(run, file) as (opened, size):
        for data in parts(opened, size, _CHUNK_BYTES):
            *whole, rest = (rest + data).split(b"\n")
            yield from (line.decode("utf-8", "replace") for line in whole)
            if len(rest) > _MOST_LINE_BYTES:
                raise StorageError(f"{run / file}: no line of a run is longer than {_MOST_LINE_BYTES:,} bytes")
    if rest:
        yield rest.decode("utf-8", "replace")


# Several processes append records to a file of lines; each links its own (`core.history.evidence`).
#
# Rules: a line is handed to the kernel before the call returns. If the kernel accepts only a part of a line, that is
# terminated and the whole line written again, because another process may have appended. A line that could not be
# written is in no chain, so the next one follows its predecessor.

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
    """Returns the chain of this process, `pid`, in a file open for appending; in an empty file it is new."""
    facts = os.fstat(fd)
    key = (pid, os.readlink(f"/proc/self/fd/{fd}"), facts.st_ino)
    chain = _chains.get(key)
    if chain is None or (chain.has_links and not facts.st_size):  # a reused inode
        chain = _chains[key] = Chain()
    return chain


def append_linked(fd: int, text: str) -> None:
    """Writes a record, the text of a JSON object, behind those of this process; raises OSError if it was not taken."""
    chain_of(fd, os.getpid()).append(fd, text)


def append(fd: int, line: bytes) -> None:
    """Writes a line, which ends in a newline; raises OSError if it could not be written whole."""
    written = os.write(fd, line)
    while written < len(line):
        if written == len(line) - 1:
            line = b"\n"  # the record is complete
        elif written:
            line = b"\n" + line.lstrip(b"\n")
        written = os.write(fd, line)


def add_records(path: Path, *records: StampedRecord) -> None:
    """Appends records of the launcher, or of a later command, with the current time; raises StorageError."""
    add_lines(path, stamped(records), os.getpid())


def stamped(records: Iterable[StampedRecord], pid: int = 0) -> list[str]:
    """Returns records of a process, by default of this one, as texts with the current time."""
    stamp: Any = {"worker": AGENT, "pid": pid or os.getpid(), "at_ns": time.monotonic_ns()}
    return [encoded(replace(record, **stamp)) for record in records]


def add_lines(path: Path, texts: Iterable[str], pid: int) -> None:
    """Appends the records of a process, as texts. Raises StorageError if the file could not be written."""
    with open(open_to_append(path), "ab", buffering=0) as file, storage_errors("write", path):
        for text in texts:
            chain_of(file.fileno(), pid).append(file.fileno(), text)
