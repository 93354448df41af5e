"""The output of workers as lines with the number of the worker, read from the logs that the workers write.

Rules: a worker never waits for a reader. A look reads a few kilobytes for all workers together, and leaves out the rest
of a flood; a line says how much. A line without its end waits for it until the run has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from engine.core.texts import printable

_MOST_BYTES = 16_384  # of a look
_MOST_OF_LINE = 1_000
_MOST_OF_BLOCK = 4_000  # bytes: a pipe that select calls writable takes 4096 without a wait


class WorkerOutput:
    """Follows ``worker-N.log`` in the logs of one run."""

    def __init__(self, logs: Path):
        self._logs = logs
        self._read: dict[Path, int] = {}
        self._begun: dict[Path, bytes] = {}  # a line whose end has not come

    def news(self, *, is_last: bool = False) -> Iterator[str]:
        """Yields the lines since the last call in blocks that a pipe takes whole; with `is_last` also unended lines."""
        paths = sorted(self._logs.glob("worker-*.log"), key=_worker)
        block = ""
        for line in (line for path in paths for line in self._news_of(path, _MOST_BYTES // len(paths), is_last)):
            if block and len(block.encode()) + len(line.encode()) > _MOST_OF_BLOCK:
                yield block
                block = ""
            block += f"\n{line}" if block else line
        if block:
            yield block

    def _news_of(self, path: Path, most_bytes: int, is_last: bool) -> Iterator[str]:
        start, prefix = self._read.get(path, 0), f"[{_worker(path)}] "
        try:
            size = path.stat().st_size
            if size > start:
                with path.open("rb") as file:
                    file.seek(start)
                    self._begun[path] = self._begun.get(path, b"") + file.read(min(size - start, most_bytes))
        except OSError:
            return  # a run must not end because of its picture
        self._read[path] = max(size, start)
        left_out = size - start - most_bytes
        *lines, rest = self._begun.pop(path, b"").split(b"\n")
        if is_last or left_out > 0 or len(rest) > _MOST_OF_LINE:
            lines += [rest] if rest else []
        else:
            self._begun[path] = rest
        for line in lines:
            yield prefix + _shown(line)
        if left_out > 0:
            yield f"{prefix}... {left_out} bytes are left out; all of them are in {path}"


def _worker(path: Path) -> int:
    return int(path.stem.removeprefix("worker-"))


def _shown(line: bytes) -> str:
    """Returns a line as text; of a line that was written over, the last version."""
    text = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
    shown = printable(text)
    return shown if len(shown) <= _MOST_OF_LINE else f"{shown[:_MOST_OF_LINE]}..."
