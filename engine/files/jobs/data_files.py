"""The files that a job trains on: their sizes and hashes, so that a resumed job gets the same data."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Set
from itertools import islice
from pathlib import Path

from engine.core.config.job import Job
from engine.files.atomic_write import storage_errors
from engine.files.file_hash import file_hash

DataFile = tuple[str, int, str]  # name as the job gives it, size in bytes, SHA-256 (hex)
_MOST_FILES = 10_000  # of one folder


def data_files(job: Job) -> tuple[DataFile, ...]:
    """Returns the files that the data of a job are in; none for built-in data.

    Each text in the job's data arguments that names a file or a folder counts. Of a folder the first `_MOST_FILES`
    count, in the order of their names; the files below it too, but no hidden folders and not what runs keep.

    Raises:
        StorageError: a file cannot be read.
    """
    texts = (job.data, *(each for each in job.data_args.values() if isinstance(each, str)))
    kept = {os.path.realpath(each) for each in (job.results, job.checkpoints) if each}
    return tuple(_described(path) for path in sorted({path for text in texts for path in _paths(text, kept)}))


def _paths(text: str, kept: Set[str]) -> Iterator[str]:
    try:
        found = os.stat(text).st_mode
    except (OSError, ValueError):  # it is no path
        return
    if stat.S_ISREG(found):
        yield text
    elif stat.S_ISDIR(found):
        yield from islice(_below(text, kept), _MOST_FILES)


def _below(folder: str, kept: Set[str]) -> Iterator[str]:
    with storage_errors("read", Path(folder)):
        for place, folders, files in os.walk(folder, onerror=_raised):
            real = os.path.realpath(place)
            names = (each for each in folders if each[0] != "." and each != "__pycache__")
            folders[:] = sorted(each for each in names if os.path.join(real, each) not in kept)
            yield from filter(os.path.isfile, (os.path.join(place, each) for each in sorted(files)))


def _raised(error: OSError) -> None:
    raise error


def _described(path: str) -> DataFile:
    with storage_errors("read", Path(path)):
        return (path, *file_hash(path))
