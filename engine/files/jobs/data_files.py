"""The files that a job trains on: their sizes and hashes, so that a resumed job gets the same data."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from engine.core.config.job import Job
from engine.files.atomic_write import storage_errors
from engine.files.file_hash import file_hash

DataFile = tuple[str, int, str]  # name as the job gives it, size in bytes, SHA-256 (hex)


def data_files(job: Job) -> tuple[DataFile, ...]:
    """Returns the file that the data of a job are in, or the files of its folder; none for built-in data.

    Raises:
        StorageError: a file cannot be read.
    """
    return tuple(_described(path) for path in sorted(_paths(job)))


def _paths(job: Job) -> Iterator[str]:
    texts = [each for each in job.data_args.values() if isinstance(each, str) and os.sep in each]
    for text in (job.data, *texts):
        if os.path.isfile(text):
            yield text
        elif os.path.isdir(text):
            with storage_errors("read", Path(text)), os.scandir(text) as entries:
                yield from (entry.path for entry in entries if entry.is_file())


def _described(path: str) -> DataFile:
    with storage_errors("read", Path(path)):
        return (path, *file_hash(path))
