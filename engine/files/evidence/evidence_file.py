"""Opens the files of the evidence of a run, which may be from elsewhere: through no link, and of no impossible size.

Rule: a file that no run writes so, or that cannot be read, is an error; wrong text in it, and its absence, may be a
flaw of the evidence.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from engine.core.errors import StorageError
from engine.files.atomic_write import open_below, open_in
from engine.files.run_folder import refuse_size

_CHUNK_BYTES = 1 << 20
_MOST_LINE_BYTES = 1 << 26  # the losses of a twin of millions of steps


@contextlib.contextmanager
def evidence(run: Path, file: str) -> Iterator[tuple[IO[bytes], int]]:
    """Yields a file of the evidence, open for reading, and its size; `file` is its path in the folder of the run.

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
    """Yields the lines of a file of the evidence, without their newlines, and a last one without its end.

    Raises the errors of `evidence`, also for a line that is longer than any record.
    """
    rest = b""
    with evidence(run, file) as (opened, size):
        for data in parts(opened, size, _CHUNK_BYTES):
            *whole, rest = (rest + data).split(b"\n")
            yield from (each.decode("utf-8", "replace") for each in whole)
            if len(rest) > _MOST_LINE_BYTES:
                raise StorageError(f"{run / file}: no line of a run is longer than {_MOST_LINE_BYTES:,} bytes")
    if rest:
        yield rest.decode("utf-8", "replace")
