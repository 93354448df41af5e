"""The hash of the weights that a user gives to a job, for its records and its twin."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from engine.core.config.job import Job
from engine.core.errors import Problem, StorageError, UserError
from engine.files.atomic_write import storage_errors
from engine.files.file_hash import file_hash
from engine.files.jobs.checkpoint_place import CheckpointPlace, place_of_step

_SUFFIXES = (".safetensors", ".json")  # of the files in a folder of weights, with its index


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
        lines = "".join(f"{file_hash(each).sha256}  {each.name}\n" for each in sorted(_files_of(Path(path))))
        return hashlib.sha256(lines.encode()).hexdigest()


def hash_as_given(path: str, before: str) -> str:
    """Returns the hash of given weights; raises UserError if it is not that of the run `before`, if there was one.

    What holds no weights, or is a damaged checkpoint, is refused before a run begins.
    """
    found = weights_hash(path)
    if before and before != found:
        hint = "put the weights of that run back, or name others: --init FILE"
        raise UserError([Problem("init", f"SHA-256 {before} as in that run", f"{found} of {path!r}", hint)])
    if not path:
        return found
    if (place := place_of_step(Path(path))) is not None:
        _refuse_damaged(path, place)
    elif not (files := _files_of(Path(path))) or not all(map(_may_be_weights, files)):
        expected = "weights: FILE.safetensors, a state_dict that torch.save wrote, or a folder of safetensors files"
        hint = "it begins as no file of weights does" if files else "it has no safetensors file"
        raise UserError([Problem("init", expected, repr(path), hint)])
    return found


def _refuse_damaged(path: str, place: CheckpointPlace) -> None:
    """Reads every byte of the checkpoint in the folder `path`; raises UserError if one is wrong, or for several."""
    names = place.names()
    if len(names) > 1:
        told = f"{path!r}: {', '.join(each.file for each in names)[:300]}"
        raise UserError([Problem("init", "the folder of one checkpoint", told)])
    try:
        for each in names:
            place.folder.verify(each)
    except StorageError as error:
        raise UserError([Problem("init", "weights that can be read", f"{path!r}: {error}")]) from error


def _files_of(path: Path) -> list[Path]:
    """Returns the file, or the files in a folder that may have its weights."""
    if not path.is_dir():
        return [path]
    return [each for each in path.iterdir() if each.suffix in _SUFFIXES]


def _may_be_weights(path: Path) -> bool:
    """Returns whether a file begins as one of torch or safetensors does; torch names a class of its own error only."""
    if path.suffix == ".json":  # the index of a folder
        return True
    with storage_errors("read", path), open(path, "rb") as file:
        begin = file.read(9)
    return begin[8:] == b"{" if path.suffix == ".safetensors" else begin.startswith((b"PK\x03\x04", b"\x80"))


def with_weights_hash(job: Job) -> Job:
    """Returns the job with the hash of its given weights in the place of their path, as its bits depend on that."""
    return replace(job, init=weights_hash(job.init))
