"""The evidence of a run on disk: sealed at the end of its command, and verified when it is read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

from engine.codec.records import TornLineError, decoded
from engine.core.checks.proof import Computation, Flaw, Proof, StepHashes, proved
from engine.core.checks.trajectory import COLUMNS, TrajectoryRow
from engine.core.errors import InvariantError, StorageError
from engine.core.history.evidence import (
    BEFORE_EVENTS,
    EVENTS,
    Chains,
    SealedFile,
    broken_seal,
    is_evidence,
    part_bytes,
    sealed,
    unlinked,
)
from engine.core.history.process_records import HostRecord, LeftBehindRecord, SealRecord, TwinRecord
from engine.core.history.run_history import RunHistory
from engine.core.history.run_records import UNSEALED, AuditRecord, JobRecord, PartitionRecord
from engine.core.history.step_files import FOLDER, StepFile, span_of, step_file
from engine.core.job.bit_fields import twin_of
from engine.files.events_file import read_history
from engine.files.linked_lines import evidence, evidence_lines, parts
from engine.files.run_folder import RunFolder, kept_copies
from engine.files.trajectory_file import trajectory_row


def chain_flaws(run: Path, file: str) -> tuple[bool, list[Flaw]]:
    """Returns whether the lines of a file are linked, and where the chain breaks; raises the errors of `evidence`."""
    chains = Chains()
    try:
        for line in evidence_lines(run, file):
            chains.take(line)
    except FileNotFoundError:
        return False, [Flaw(file, "it is gone")]
    return chains.num_links > 0, broken_chain(chains, file)


def broken_chain(chains: Chains, file: str) -> list[Flaw]:
    """Returns the place where a chain breaks in a file that was read to its end; nothing if none does."""
    chains.end()
    if chains.broken is None:
        return []
    number, why = chains.broken
    return [Flaw(f"{file}:{number}", why)]


_MOST_TORN = 1_000


class HashFiles:
    """The hashes in a `folder` of a run, in files of `span` steps, one in memory; adds their `flaws`."""

    def __init__(self, run: Path, folder: str, span: int, flaws: list[Flaw]):
        self._run, self._folder, self._span, self._flaws = run, folder, span, flaws
        self._first = -1
        self._steps: dict[int, StepHashes] | None = None

    def of(self, step: int) -> StepHashes | None:
        """Returns the hashes of a step; None if its file is missing or cannot be read."""
        first = step - step % self._span
        if first != self._first:
            self._first, self._steps = first, self._read(first)
        return None if self._steps is None else self._steps.get(step, StepHashes())

    def _read(self, first: int) -> dict[int, StepHashes] | None:
        file, steps, chains = f"{self._folder}{FOLDER}/{StepFile(first, None)}", dict[int, StepHashes](), Chains()
        number = num_torn = 0
        try:
            for line in evidence_lines(self._run, file):
                number += 1
                chains.take(line)
                audit = _audit(line)
                if audit is not None:
                    steps.setdefault(audit.step, StepHashes()).add(audit)
                elif (num_torn := num_torn + 1) > _MOST_TORN:
                    raise InvariantError(f"{_MOST_TORN:,} lines before it are not records")
        except FileNotFoundError:
            return None
        except InvariantError as error:
            self._flaws.append(Flaw(f"{file}:{number}", str(error)))
            return None
        self._flaws += broken_chain(chains, file)
        return steps


def _audit(line: str) -> AuditRecord | None:
    """Returns the hashes in a line; None for a torn line. Raises InvariantError."""
    try:
        record = decoded(unlinked(line)[0])
    except TornLineError:
        return None
    if not isinstance(record, AuditRecord):
        raise InvariantError("this is not a record of hashes")
    return record


# The evidence of a run is sealed when its command ends, and its files are compared with the seal later.
#
# Rule: after the seal only events may grow, and the files of steps of a run that left a process behind.

_TWIN = "twin/"
_MOST_FILES = 100_000


def seal_of(run: Path, goes_on: Callable[[], object] = lambda: None) -> SealRecord:
    """Returns the seal of a run folder as it is now; calls `goes_on` after each part of a file. Raises StorageError."""

    def read(opened: IO[bytes], size: int) -> Iterator[bytes]:
        for part in parts(opened, size, part_bytes(size)):
            goes_on()
            yield part

    files = []
    for file in evidence_files(run):
        with evidence(run, file) as (opened, size):
            files.append((*sealed(file, size, read(opened, size)),))
    return SealRecord(files=tuple(files))


def evidence_files(run: Path) -> Iterator[str]:
    """Yields the files of the evidence in a run folder, as paths in it."""
    for folder in ("", f"{FOLDER}/", _TWIN, f"{_TWIN}{FOLDER}/"):
        names = []
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(run / folder) as entries:
            names = sorted(entry.name for entry in entries if entry.is_file(follow_symlinks=False))
        yield from (f"{folder}{name}" for name in names if is_evidence(f"{folder}{name}"))


def seal_flaws(run: Path, seal: SealRecord, *, may_grow: bool) -> Iterator[Flaw]:
    """Yields each file that differs from the seal; with `may_grow` a process may still write. Raises as `evidence`."""
    files = [SealedFile(*fields) for fields in seal.files[:_MOST_FILES]]
    for file in files:
        yield from _flaws_of(run, file, may_grow=may_grow)
    names = {file.file for file in files}
    for name in evidence_files(run):
        if name not in names and not (may_grow and name.startswith(f"{FOLDER}/")):
            yield Flaw(name, "the run did not write this file")


def _flaws_of(run: Path, entry: SealedFile, *, may_grow: bool) -> Iterator[Flaw]:
    if not is_evidence(entry.file):
        yield Flaw(EVENTS, f"the seal names a file that is none of a run: {entry.file!r:.100}")
        return
    grows = entry.file == EVENTS or (may_grow and entry.file.startswith(f"{FOLDER}/"))
    try:
        with evidence(run, entry.file) as (opened, size):
            if size < entry.bytes:
                yield Flaw(entry.file, f"it ends after {size:,} bytes, and the run wrote {entry.bytes:,}")
            elif size > entry.bytes and not grows:
                yield Flaw(entry.file, f"it has {size:,} bytes, and the run wrote {entry.bytes:,}")
            if why := broken_seal(entry, parts(opened, min(size, entry.bytes), part_bytes(entry.bytes))):
                yield Flaw(entry.file, why)
    except FileNotFoundError:
        yield Flaw(entry.file, "it is gone")


TRAJECTORY = "trajectory.csv"
_MOST_HOSTS = 256  # of a run
_Losses = dict[str, Callable[[int], float | None]]


def proof_of(folder: RunFolder, history: RunHistory) -> Proof:
    """Returns the proof of a run folder with this `history`; raises StorageError for a file that no run writes."""
    run, flaws = folder.path, list[Flaw]()
    if history.is_empty:
        if all(name in (EVENTS, *BEFORE_EVENTS) for name in evidence_files(run)):
            return Proof(missing="the run has recorded nothing yet")
        return Proof((Flaw(EVENTS, "it has no whole record, and files that follow the first one are there"),))
    seal, begun, missing = history.first(SealRecord), history.first(JobRecord), ""
    if not _has_links(run, EVENTS, flaws):
        if seal is None and begun is not None and begun.version == UNSEALED:
            return Proof(tuple(flaws), "its records are of an older bamboo, which did not link them")
        flaws += [Flaw(EVENTS, "none of its records is linked to those before")] * (not flaws)
    if seal is not None:
        flaws += seal_flaws(run, seal, may_grow=bool(history.of(LeftBehindRecord)))
    if seal is None or history.ended is None:
        missing = f"{EVENTS} has no {'end' if seal else 'seal'}: the command has not finished"
    flaws += _flaws_of_hosts(run)
    twin: RunHistory | None = None  # also if an earlier run has made the twin
    if folder.twin.events.exists():
        _has_links(run, f"{_TWIN}{EVENTS}", flaws)
        twin = read_history(folder.twin.events)
        if twin_of(history.job) != twin_of(twin.job):
            flaws.append(Flaw(f"{_TWIN}{EVENTS}:1", "this is not the job of the twin of this run"))
    record = history.first(TwinRecord)
    losses: _Losses = {"the record of its losses": dict(record.losses).get} if record else {}
    losses |= {f"{_TWIN}{EVENTS}": _loss_of(twin)} if twin else {}
    ours = _computed(run, "", history, {EVENTS: _loss_of(history)}, flaws)
    theirs = _computed(run, _TWIN, twin, losses, flaws)
    return proved(history, ours, theirs, flaws, missing)


def _has_links(run: Path, file: str, flaws: list[Flaw]) -> bool:
    has_links, broken = chain_flaws(run, file)
    flaws += broken
    return has_links


def _flaws_of_hosts(run: Path) -> Iterator[Flaw]:
    """Yields the places where chains break in the records shipped by other hosts, which no seal covers."""
    for copy in kept_copies(run)[:_MOST_HOSTS]:
        names = sorted(os.listdir(copy / FOLDER)) if (copy / FOLDER).is_dir() else []
        hashes = (f"{FOLDER}/{name}" for name in names if (kind := step_file(name)) and kind.worker is None)
        for file in (EVENTS, *hashes):
            yield from chain_flaws(run, f"{copy.relative_to(run)}/{file}")[1]


def _loss_of(history: RunHistory) -> Callable[[int], float | None]:
    """Returns the function from a step to the loss of its commit."""
    commits = history.commits

    def loss_of(step: int) -> float | None:
        place = step - commits.steps[0] if commits else 0
        return commits.losses[place] if 0 <= place < len(commits) and commits.steps[place] == step else None

    return loss_of


def _computed(
    run: Path, folder: str, history: RunHistory | None, losses: _Losses, flaws: list[Flaw]
) -> Computation | None:
    """Returns the computation whose files begin with `folder`; None without a trajectory."""
    file = f"{folder}{TRAJECTORY}"
    if not (run / file).exists():
        return None
    rows = _rows(run, file, flaws)
    if history is None:
        return Computation(folder, rows, losses)
    cut, host = history.first(PartitionRecord), history.first(HostRecord)
    return Computation(
        folder,
        rows,
        losses,
        len(cut.layers) if cut else 0,
        history.job.pipelines,
        HashFiles(run, folder, span_of(history.job), flaws).of,
        is_alone=host is None or not host.node,
    )


def _rows(run: Path, file: str, flaws: list[Flaw]) -> Iterator[TrajectoryRow]:
    """Yields the rows of a trajectory up to the first damaged one, which is a flaw."""
    head = ",".join(COLUMNS)
    lines = enumerate(evidence_lines(run, file), start=1)
    if next(lines, (1, head))[1] != head:
        flaws.append(Flaw(f"{file}:1", f"expected the columns {head}"))
        return
    for number, line in lines:
        try:
            yield trajectory_row(line, f"{number}")
        except StorageError as error:
            flaws.append(Flaw(f"{file}:{number}", str(error).partition(": ")[2]))
            return
