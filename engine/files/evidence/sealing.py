"""Seals the evidence of a run when its command ends, and holds its files against the seal later.

Rule: behind the seal only events may grow, and the files of steps of a run that left a process behind.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from engine.core.evidence.proof import Flaw
from engine.core.evidence.seal import EVENTS, SealedFile, broken_seal, is_evidence, part_bytes, sealed
from engine.core.history.step_files import FOLDER
from engine.core.history.verdict_records import SealRecord
from engine.files.evidence.evidence_file import evidence, parts

_TWIN = "twin/"
_MOST_FILES = 100_000


def seal_of(run: Path, goes_on: Callable[[], object] = lambda: None) -> SealRecord:
    """Returns the seal of the evidence in a run folder as it is now; `goes_on` is called after each part of a file.

    Raises:
        StorageError: a file cannot be read.
    """
    return SealRecord(files=tuple((*_sealed(run, file, goes_on),) for file in evidence_files(run)))


def _sealed(run: Path, file: str, goes_on: Callable[[], object]) -> SealedFile:
    with evidence(run, file) as (opened, size):
        return sealed(file, size, _told(parts(opened, size, part_bytes(size)), goes_on))


def _told(found: Iterable[bytes], goes_on: Callable[[], object]) -> Iterator[bytes]:
    for part in found:
        goes_on()
        yield part


def evidence_files(run: Path) -> Iterator[str]:
    """Yields the files of the evidence in a run folder, as paths in it."""
    for folder in ("", f"{FOLDER}/", _TWIN, f"{_TWIN}{FOLDER}/"):
        names = []
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(run / folder) as entries:
            names = sorted(each.name for each in entries if each.is_file(follow_symlinks=False))
        yield from (f"{folder}{name}" for name in names if is_evidence(f"{folder}{name}"))


def seal_flaws(run: Path, seal: SealRecord, *, may_grow: bool) -> Iterator[Flaw]:
    """Yields each file that is not as it was sealed; `may_grow`: a process was left behind, and may write.

    Raises the errors of `evidence`, but for a file that is gone.
    """
    files = [SealedFile(*each) for each in seal.files[:_MOST_FILES]]
    yield from (flaw for each in files for flaw in _flaws_of(run, each, may_grow=may_grow))
    yield from _unknown(run, {each.file for each in files}, may_grow=may_grow)


def _unknown(run: Path, known: Iterable[str], *, may_grow: bool) -> Iterator[Flaw]:
    for file in evidence_files(run):
        if file not in known and not (may_grow and file.startswith(f"{FOLDER}/")):
            yield Flaw(file, "the run did not write this file")


def _flaws_of(run: Path, told: SealedFile, *, may_grow: bool) -> Iterator[Flaw]:
    if not is_evidence(told.file):
        yield Flaw(EVENTS, f"the seal names a file that is none of a run: {told.file!r:.100}")
        return
    grows = told.file == EVENTS or (may_grow and told.file.startswith(f"{FOLDER}/"))
    try:
        with evidence(run, told.file) as (opened, size):
            if size < told.bytes:
                yield Flaw(told.file, f"it ends after {size:,} bytes, and the run wrote {told.bytes:,}")
            elif size > told.bytes and not grows:
                yield Flaw(told.file, f"it has {size:,} bytes, and the run wrote {told.bytes:,}")
            if why := broken_seal(told, parts(opened, min(size, told.bytes), part_bytes(told.bytes))):
                yield Flaw(told.file, why)
    except FileNotFoundError:
        yield Flaw(told.file, "it is gone")
