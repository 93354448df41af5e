"""The log of a worker as JSON lines: what it prints, its warnings, the records of `logging` and its own words.

    worker-N.log    one object a line: time, level, host, worker, stage, epoch, step, source, message
    worker-N.out    output that does not pass through Python's streams, of C libraries and child processes

Rules: a line is one write, so that those of threads and forked processes do not mix. A message is what was printed up
to the end of a line; of a line that is written over, the last version. The lines of the second file are copied into the
log before the next line, at a ping and at the end; those that a kill leaves behind are only there. A log that cannot be
written ends no worker.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from engine.files.atomic_write import open_to_append, open_to_read

_MOST_BYTES = 65_536  # of a line without its end, and of one copy
_TRACEBACK = "Traceback (most recent call last)"
_plain = logging.Formatter()

PlaceOf = Callable[[], tuple[int | None, int, int]]  # returns stage, epoch and step


class JsonLog:
    """Takes over the standard streams of this process, whose descriptor 1 is the log of `worker` on `host`."""

    def __init__(self, host: str, worker: int, where: PlaceOf):
        log = Path(os.readlink("/proc/self/fd/1"))
        self._fd, self._lock = os.dup(1), threading.RLock()
        self._stamp, self._where = {"host": host, "worker": worker}, where
        raw = open_to_append(path := log.with_suffix(".out"))
        for fd in (1, 2):
            os.dup2(raw, fd)
        os.close(raw)
        self._raw = open_to_read(path)
        os.lseek(self._raw, 0, os.SEEK_END)  # the lines of an earlier worker of this number are copied
        self._rest = b""
        os.register_at_fork(after_in_child=self._forked)
        sys.stdout, sys.stderr = self._streams = LogStream(self, 1, "stdout"), LogStream(self, 2, "stderr")
        warnings.showwarning = self._warn
        _give_records_of_handlers()

    def write(self, level: str, source: str, message: str) -> None:
        """Writes one line."""
        with self._lock:
            self.copy()
            self._put(level, source, message)

    def copy(self, most_bytes: int = _MOST_BYTES) -> None:
        """Copies the whole lines that have come past Python's streams, a bounded part of a flood."""
        with self._lock:
            data = os.read(self._raw, most_bytes) if self._raw >= 0 else b""
            *lines, self._rest = (self._rest + data).split(b"\n") if data else (self._rest,)
            if len(self._rest) > _MOST_BYTES:
                lines, self._rest = [*lines, self._rest], b""
            for line in lines:
                self._put("info", "output", line.decode(errors="replace"))

    def end(self) -> None:
        """Writes what has no end of its line yet."""
        for stream in self._streams:
            stream.end()
        with self._lock:
            self.copy(16 * _MOST_BYTES)
            if self._rest:
                self._put("info", "output", self._rest.decode(errors="replace"))
                self._rest = b""

    def _put(self, level: str, source: str, message: str) -> None:
        stage, epoch, step = self._where()
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        place = {"stage": stage, "epoch": epoch, "step": step}
        line = json.dumps({"time": time, "level": level, **self._stamp, **place, "source": source, "message": message})
        with contextlib.suppress(OSError):
            os.write(self._fd, f"{line}\n".encode())

    def _forked(self) -> None:
        """Leaves to the worker, in a process that it has forked, what others have written; the lock may be held."""
        self._lock, self._raw, self._rest = threading.RLock(), -1, b""
        for stream in self._streams:
            stream.rests.clear()

    def _warn(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        words = warnings.formatwarning(message, category, filename, lineno, line)
        if file is None:
            self.write("warning", "warnings", words.rstrip("\n"))
        else:
            file.write(words)


class LogStream(io.TextIOBase):
    """A standard stream whose lines become those of a log; its descriptor leads to the file for other output."""

    encoding, errors = "utf-8", "backslashreplace"

    def __init__(self, log: JsonLog, fd: int, source: str):
        self.log = log
        self.rests: dict[int, str] = {}  # by thread: their lines do not mix
        self._fd, self._source = fd, source
        self.buffer = io.FileIO(fd, "w", closefd=False)

    def fileno(self) -> int:
        """Returns the descriptor for output that does not pass through this stream."""
        return self._fd

    def writable(self) -> bool:
        """Returns true."""
        return True

    def write(self, text: str) -> int:
        """Writes the message that `text` ends, or keeps it until its end; a traceback is one."""
        own = threading.get_ident()
        self.rests[own] = rest = self.rests.get(own, "") + text
        is_inside = rest.startswith(_TRACEBACK) and rest.splitlines()[-1].startswith((_TRACEBACK, " "))
        if (rest.endswith("\n") and not is_inside) or len(rest) > _MOST_BYTES:
            self._end(own)
        return len(text)

    def flush(self) -> None:
        """Writes the text so far; a line that is being written over waits for its last version."""
        if "\r" not in self.rests.get(own := threading.get_ident(), ""):
            self._end(own)

    def end(self) -> None:
        """Writes the text so far of all threads."""
        for thread in list(self.rests):
            self._end(thread)

    def _end(self, thread: int) -> None:
        message = self.rests.pop(thread, "").rstrip("\r\n").rpartition("\r")[2]
        if message:
            usual = "info" if self._fd == 1 else "warning"
            self.log.write("error" if message.startswith(_TRACEBACK) else usual, self._source, message)


def _give_records_of_handlers() -> None:
    """Gives a log the records of `logging`, with level and name, where a handler would print them on its stream."""
    usual = logging.StreamHandler.emit

    def emit(handler: logging.StreamHandler[TextIO], record: logging.LogRecord) -> None:
        if not isinstance(handler.stream, LogStream):
            usual(handler, record)
            return
        try:
            handler.stream.log.write(record.levelname.lower(), record.name, _plain.format(record))
        except Exception:  # the text of a record is the user's code
            handler.handleError(record)

    logging.StreamHandler.emit = emit  # type: ignore[method-assign,assignment]
