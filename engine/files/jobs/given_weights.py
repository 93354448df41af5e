"""The hash of the weights that a user gives to a job, for its records and its twin."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

from engine.core.config.job import Job
from engine.core.errors import Problem, UserError
from engine.files.atomic_write import storage_errors
from engine.files.file_hash import file_hash


def weights_hash(path: str) -> str:
    """Returns the SHA-256 (hex) of a file, or of the names and hashes of the files in a folder; empty for no path.

    Raises:
        StorageError: a file cannot be read.
    """
    if not path:
        return ""
    with storage_errors("read", Path(path)):
        if not Path(path).is_dir():
            return file_hash(path).sha256
        files = sorted(each for each in Path(path).iterdir() if each.suffix in (".safetensors", ".json"))
        lines = "".join(f"{file_hash(each).sha256}  {each.name}\n" for each in files)
        return hashlib.sha256(lines.encode()).hexdigest()


def hash_as_given(path: str, before: str) -> str:
    """Returns the hash of given weights; raises UserError if it is not that of the run `before`, if there was one.

    A file that is none of weights is refused before a run begins.
    """
    found = weights_hash(path)
    if before and before != found:
        hint = "put the weights of that run back, or name others: --init FILE"
        raise UserError([Problem("init", f"SHA-256 {before} as in that run", f"{found} of {path!r}", hint)])
    if os.path.isfile(path) and not _may_be_weights(path):
        expected = "weights: FILE.safetensors, a state_dict that torch.save wrote, or a folder of safetensors files"
        raise UserError([Problem("init", expected, repr(path), "it begins as no file of weights does")])
    return found


def _may_be_weights(path: str) -> bool:
    """Returns whether a file begins as one of torch or safetensors does; torch names a class of its own error only."""
    with storage_errors("read", Path(path)), open(path, "rb") as file:
        begin = file.read(9)
    is_safetensors = path.endswith(".safetensors")
    return begin[8:] == b"{" if is_safetensors else begin.startswith((b"PK\x03\x04", b"\x80"))


def with_weights_hash(job: Job) -> Job:
    """Returns the job with the hash of its given weights in the place of their path, as its bits depend on that."""
    return replace(job, init=weights_hash(job.init))
