"""The hash of the weights that a user gives to a job, for its records and its twin."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from engine.core.config.job import Job
from engine.files.atomic_write import storage_errors


def weights_hash(path: str) -> str:
    """Returns the SHA-256 (hex) of a file, or of the names and hashes of the files in a folder; empty for no path.

    Raises:
        StorageError: a file cannot be read.
    """
    if not path:
        return ""
    with storage_errors("read", Path(path)):
        if not Path(path).is_dir():
            return _hash_of(Path(path))
        files = sorted(each for each in Path(path).iterdir() if each.suffix in (".safetensors", ".json"))
        lines = "".join(f"{_hash_of(each)}  {each.name}\n" for each in files)
        return hashlib.sha256(lines.encode()).hexdigest()


def with_weights_hash(job: Job) -> Job:
    """Returns the job with the hash of its given weights in the place of their path, as its bits depend on that."""
    return replace(job, init=weights_hash(job.init))


def _hash_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
