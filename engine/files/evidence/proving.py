"""Reads the evidence of a run, and returns its proof: `core.evidence.proof` has the verdict."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from engine.core.checks.trajectory import COLUMNS, TrajectoryRow
from engine.core.errors import StorageError
from engine.core.evidence.proof import Computed, Flaw, Proof, is_twin_of, proved
from engine.core.evidence.seal import BEFORE_EVENTS, EVENTS
from engine.core.history.process_records import HostRecord, LeftBehindRecord
from engine.core.history.record import UNSEALED
from engine.core.history.run_history import RunHistory
from engine.core.history.run_records import JobRecord, PartitionRecord
from engine.core.history.step_files import FOLDER, span_of, step_file
from engine.core.history.verdict_records import SealRecord, TwinRecord
from engine.files.events_file import read_history
from engine.files.evidence.chain_file import chain_flaws
from engine.files.evidence.evidence_file import evidence_lines
from engine.files.evidence.hash_files import HashFiles
from engine.files.evidence.sealing import evidence_files, seal_flaws
from engine.files.run_folder import RunFolder, kept_copies
from engine.files.trajectory_file import trajectory_row

TRAJECTORY = "trajectory.csv"
_TWIN = "twin/"
_MOST_HOSTS = 256  # of a run
_Losses = dict[str, Callable[[int], float | None]]


def proof_of(folder: RunFolder, history: RunHistory) -> Proof:
    """Returns the proof of the files in the folder of a run; `history` has the records of that folder.

    Raises:
        StorageError: a file cannot be read, or is none that a run writes: a link, endless lines, mostly holes.
    """
    run, flaws = folder.path, list[Flaw]()
    if history.is_empty:
        return _unrecorded(run)
    seal, begun, missing = history.first(SealRecord), history.first(JobRecord), ""
    if not _has_links(run, EVENTS, flaws):
        if seal is None and begun is not None and begun.version == UNSEALED:
            return Proof(tuple(flaws), "its records are of an older bamboo, which did not link them")
        flaws += [Flaw(EVENTS, "none of its records is linked to those before")] * (not flaws)
    if seal is not None:
        flaws += seal_flaws(run, seal, may_grow=bool(history.of(LeftBehindRecord)))
    if seal is None or history.ended is None:
        missing = f"{EVENTS} has no {'end' if seal else 'seal'}: the command has not come to its end"
    flaws += _of_hosts(run)
    twin = _history_of_twin(folder, history, flaws)
    told = history.first(TwinRecord)
    losses: _Losses = {"the record of its losses": dict(told.losses).get} if told else {}
    losses |= {f"{_TWIN}{EVENTS}": _loss_of(twin)} if twin else {}
    ours = _computed(run, "", history, {EVENTS: _loss_of(history)}, flaws)
    theirs = _computed(run, _TWIN, twin, losses, flaws)
    return proved(history, ours, theirs, flaws, missing)


def _unrecorded(run: Path) -> Proof:
    """Returns the proof of a run without a whole record: it has none of the files that follow the first one."""
    if not any(each not in (EVENTS, *BEFORE_EVENTS) for each in evidence_files(run)):
        return Proof(missing="the run has recorded nothing yet")
    return Proof((Flaw(EVENTS, "it has no whole record, and files that follow the first one are there"),))


def _has_links(run: Path, file: str, flaws: list[Flaw]) -> bool:
    found, broken = chain_flaws(run, file)
    flaws += broken
    return found


def _of_hosts(run: Path) -> Iterator[Flaw]:
    """Yields the places where chains break in the records that other hosts have shipped, which no seal covers."""
    for copy in kept_copies(run)[:_MOST_HOSTS]:
        names = sorted(os.listdir(copy / FOLDER)) if (copy / FOLDER).is_dir() else []
        hashes = (f"{FOLDER}/{name}" for name in names if (kind := step_file(name)) and kind.worker is None)
        for file in (EVENTS, *hashes):
            yield from chain_flaws(run, f"{copy.relative_to(run)}/{file}")[1]


def _history_of_twin(folder: RunFolder, history: RunHistory, flaws: list[Flaw]) -> RunHistory | None:
    """Returns the history of the twin; None of a run without one, or of a twin that an earlier run has made."""
    if not folder.twin.events.exists():
        return None
    _has_links(folder.path, f"{_TWIN}{EVENTS}", flaws)
    twin = read_history(folder.twin.events)
    if not is_twin_of(history, twin):
        flaws.append(Flaw(f"{_TWIN}{EVENTS}:1", "this is not the job of the twin of this run"))
    return twin


def _loss_of(history: RunHistory) -> Callable[[int], float | None]:
    """Returns the function from a step to the loss of its commit."""
    commits = history.commits

    def loss_of(step: int) -> float | None:
        place = step - commits.steps[0] if commits else 0
        return commits.losses[place] if 0 <= place < len(commits) and commits.steps[place] == step else None

    return loss_of


def _computed(
    run: Path, folder: str, history: RunHistory | None, losses: _Losses, flaws: list[Flaw]
) -> Computed | None:
    """Returns the computation whose files begin with `folder`; None without a trajectory."""
    file = f"{folder}{TRAJECTORY}"
    if not (run / file).exists():
        return None
    rows = _rows(run, file, flaws)
    if history is None:
        return Computed(folder, rows, losses)
    cut, host = history.first(PartitionRecord), history.first(HostRecord)
    return Computed(
        folder,
        rows,
        losses,
        len(cut.layers) if cut else 0,
        history.job.pipelines,
        HashFiles(run, folder, span_of(history.job), flaws).of,
        is_alone=host is None or not host.node,
    )


def _rows(run: Path, file: str, flaws: list[Flaw]) -> Iterator[TrajectoryRow]:
    """Yields the rows of a trajectory up to the first that is damaged, which is a flaw."""
    head = ",".join(COLUMNS)
    for number, line in enumerate(evidence_lines(run, file), start=1):
        if number == 1 and line != head:
            flaws.append(Flaw(f"{file}:1", f"expected the columns {head}"))
            return
        try:
            row = None if number == 1 else trajectory_row(line, f"{number}")
        except StorageError as error:
            flaws.append(Flaw(f"{file}:{number}", str(error).partition(": ")[2]))
            return
        if row is not None:
            yield row
