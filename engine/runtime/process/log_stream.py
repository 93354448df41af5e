"""The standard output and error of a worker: text that a full disk does not take is lost, and no layer fails for it."""

from __future__ import annotations

import io
from typing import Any, TextIO


class _Lossy(io.FileIO):
    def write(self, data: Any) -> int:
        """Writes all of the data, and drops the part that the file does not take."""
        view = memoryview(data).cast("B")
        written = 0
        try:
            while written < len(view):
                written += super().write(view[written:]) or 0
        except OSError:
            pass
        return len(view)


def log_stream(fd: int) -> TextIO:
    """Returns a stream on a descriptor that writes each line at once: a line of a killed worker must not be lost."""
    raw = io.BufferedWriter(_Lossy(fd, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)
