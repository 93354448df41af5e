"""The runs in a folder of results, one row each, from the beginning and the end of their events; leftovers; exports."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.core.errors import Problem, StorageError, UserError
from engine.core.history.process_records import ComparisonRecord, NotComparedRecord
from engine.core.history.run_history import RunHistory, history_of
from engine.core.job.hugging_face import MODEL as HF_MODEL
from engine.core.manifest import is_part
from engine.files.atomic_write import open_to_read
from engine.files.checkpoint_folder import checkpoints_at
from engine.files.events_file import events_of
from engine.files.external_runs import external_facts
from engine.files.jobs.checkpoint_choice import find_checkpoint
from engine.files.jobs.library import EXTERNAL_FOLDER
from engine.files.matrix_results import MATRICES, RESULTS
from engine.files.run_folder import (
    EXTERNAL_RUN,
    MATRIX,
    RUN,
    TEMPORARY,
    TEMPORARY_LINK,
    TWINS,
    RunFolder,
    delete_entry,
    disk_bytes,
    own_files,
    refuse_size,
    run_names,
    started_at,
)
from engine.files.trajectory_file import TWINS_FOLDER
from engine.harness.case_runner import reusable_twins
from engine.harness.dead_runs import dead_run, stores

_END_BYTES = 131_072  # of the events, with the records of the end and of the last step


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run: `outcome` and `verdict` in words, `steps` committed of `num_steps`, the time of its start."""

    name: str
    started: str
    outcome: str
    verdict: str
    model: str = ""
    pipelines: int = 0
    stages: int = 0
    blocks: int = 1
    steps: int = 0
    num_steps: int = 0
    command: str = ""  # of another launcher's job


def run_rows(results: Path) -> list[RunRow]:
    """Returns the runs in a folder of results, the newest first; with those of other launchers' jobs."""
    foreign = _inner_names(results / EXTERNAL_FOLDER)
    rows = [_row(results / name) for name in run_names(results)]
    rows += [_external_row(results / EXTERNAL_FOLDER / name) for name in foreign]
    return sorted(rows, key=lambda row: row.name.rpartition("/")[2], reverse=True)


def _external_row(run: Path) -> RunRow:
    name, started = f"{EXTERNAL_FOLDER}/{run.name}", _started(run)
    try:
        facts = external_facts(RunFolder(run))
        result, command = facts.get("result"), shlex.join(facts["external"]["command"])
        verdict = _unfinished(run) if result is None else str(result["verdict"])
        checks = [] if result is None else [each for each in result["checks"] if each["result"] == verdict != "passed"]
        why = f"{checks[0]['name']}: {checks[0]['text']}" if checks else ""
    except (StorageError, LookupError, TypeError):
        return RunRow(name, started, "unknown", "run.json cannot be read: bamboo report says why")
    return RunRow(name, started, verdict, why, command=command)


def _row(run: Path) -> RunRow:
    started = _started(run)
    try:
        history = _ends(RunFolder(run).events)
    except StorageError:
        return RunRow(run.name, started, "unknown", "events cannot be read: bamboo report says why")
    if history.is_empty:
        return RunRow(run.name, started, _unfinished(run), "nothing recorded yet")
    job = history.job
    outcome = history.ended.outcome if history.ended else _unfinished(run)
    shape = job.model, job.pipelines, job.stages, job.blocks
    return RunRow(run.name, started, outcome, _verdict(history), *shape, history.committed + 1, history.num_steps)


def _verdict(history: RunHistory) -> str:
    """Returns the first failed check, else the error, else the result about the weights; empty before the verdict."""
    if history.findings:
        return f"{history.findings[0].name} {history.findings[0].result}"
    if history.error and history.ended and history.ended.exit_code:
        return history.error.splitlines()[0]
    comparison = history.first(ComparisonRecord)
    if comparison is not None and comparison.difference is None:
        return comparison.unproven_text
    return str(history.first(NotComparedRecord) or "")


def _started(run: Path) -> str:
    try:
        return started_at(run.name).isoformat(" ")
    except ValueError:
        return ""  # such as month 13: the user's folder


def _unfinished(run: Path) -> str:
    with dead_run(run) as is_dead:
        return "launcher gone" if is_dead else "running"


def _ends(events: Path) -> RunHistory:
    """Returns the history of the first and last records, empty without events; raises StorageError."""
    try:
        with open(open_to_read(events), "rb") as file:
            refuse_size(events, os.fstat(file.fileno()))
            first = file.readline(_END_BYTES)
            begin = max(len(first), os.fstat(file.fileno()).st_size - _END_BYTES)
            file.seek(begin)
            if begin > len(first):
                file.readline()  # the rest of a line
            last = file.read()
    except FileNotFoundError:
        return RunHistory()
    except OSError as error:
        raise StorageError(f"{events}: {error.strerror}") from error
    return history_of(events_of(first + last, events))


# The leftovers in a folder of results: of killed runs, and if the user asks for that of old runs.
#
# Rules: a live run or matrix is left alone, even if it starts between the search and the deletion. Only files that
# bamboo writes are deleted; links are not followed. A folder with a user's file stays, with that file.

_MOMENT_S = 60.0  # a younger temporary file may still be written


@dataclass(frozen=True, slots=True)
class Leftover:
    """Entries to delete in a folder of results, each folder after its own, unless run or matrix `user` uses them."""

    results: Path
    what: str
    path: Path
    entries: tuple[Path, ...]
    user: Path | None = None

    @property
    def num_bytes(self) -> int:
        """The space on disk that the entries take."""
        return sum(map(disk_bytes, self.entries))


@dataclass(frozen=True, slots=True)
class OldRuns:
    """The runs and matrices to delete: all but the newest `keep`, and of these the ones older than `older_than_s`."""

    keep: int = 0
    older_than_s: float = 0.0


def leftovers(results: Path, old: OldRuns | None) -> tuple[list[Leftover], list[str]]:
    """Returns the leftovers in a folder of results, and the names of live runs and matrices."""
    entries: list[Leftover] = []
    busy: list[str] = []
    matrices, external = results / MATRICES, results / EXTERNAL_FOLDER
    for folder, names, form, what in (
        (results, run_names(results), RUN, "run"),
        (matrices, _inner_names(matrices), MATRIX, "matrix"),
        (external, _inner_names(external), EXTERNAL_RUN, "run of another launcher"),
    ):
        for number, name in enumerate(reversed(names)):
            path = folder / name
            with dead_run(path) as is_dead:
                if not is_dead:
                    busy.append(name)
                elif old and number >= old.keep and _age_s(_last_written(path)) > old.older_than_s:
                    entries.append(Leftover(results, what, path, (*own_files(path, form), path), path))
                else:
                    entries += _unfinished_runs(results, path, path)
    gone = {leftover.path for leftover in entries}
    remaining = [RunFolder(results / name) for name in run_names(results) if results / name not in gone]
    entries += _unusable_twins(results, remaining)
    for path in own_files(results, TEMPORARY_LINK) if results.is_dir() else ():
        if _age_s(path) > _MOMENT_S:
            entries.append(Leftover(results, "temporary file", path, (path,)))
    return entries, busy


def delete(leftover: Leftover) -> list[Path]:
    """Deletes a leftover and returns the entries that remain: in use again, or not only bamboo's."""
    if leftover.user is None:
        return _delete(leftover)
    with dead_run(leftover.user) as is_dead:
        return _delete(leftover) if is_dead else list(leftover.entries)


def _delete(leftover: Leftover) -> list[Path]:
    for path in leftover.entries:
        with contextlib.suppress(OSError):  # gone already, or a folder with a user's file
            delete_entry(path, leftover.results)
    return [path for path in leftover.entries if os.path.lexists(path)]


def _inner_names(folder: Path) -> list[str]:
    """Returns the names of the runs or matrices in a folder; a link to another folder of results has none."""
    return [] if folder.is_symlink() else run_names(folder)


def _unfinished_runs(results: Path, run: Path, user: Path) -> Iterator[Leftover]:
    """Yields the leftovers of killed processes in the folder of a dead run or matrix."""
    for store in stores(run):
        inside = [path for path in own_files(run, RUN) if path == store or store in path.parents]
        yield Leftover(results, "store of a killed run", store, tuple(inside), user)
    for path in own_files(run, TEMPORARY):
        yield Leftover(results, "temporary file", path, (path,), user)
    with contextlib.suppress(StorageError):  # of another user
        for name in checkpoints_at(RunFolder(run).checkpoints, run).orphans():
            path = RunFolder(run).checkpoints / name
            if is_part(name.rpartition("/")[2]):  # others are listed above
                yield Leftover(results, "part of an unfinished checkpoint", path, (path,), user)
    if run == user:
        for name in _inner_names(run / "runs"):  # of a matrix
            yield from _unfinished_runs(results, run / "runs" / name, user)


def _unusable_twins(results: Path, runs: list[RunFolder]) -> Iterator[Leftover]:
    folder = results / TWINS_FOLDER
    if not folder.is_dir() or folder.is_symlink():
        return
    usable = reusable_twins(runs)
    for path in own_files(folder, TWINS):
        if path.stem not in usable and _age_s(path) > _MOMENT_S:
            yield Leftover(results, "twin that no run here can use again", path, (path,))


def _last_written(folder: Path) -> Path:
    return next((path for path in (folder / "events.jsonl", folder / RESULTS) if path.is_file()), folder)


def _age_s(path: Path) -> float:
    return time.time() - path.lstat().st_mtime


def export_weights(
    where: str, results: Path, output: Path, say: Callable[[str], object], *, for_dcp: bool = False, ema: bool = False
) -> dict[str, Any]:
    """Writes the weights of a run's newest good checkpoint, or of one step, and returns facts about it.

    `say` gets a line about each refused checkpoint. `for_dcp`: in the format of ``torch.distributed.checkpoint``; with
    `ema` it writes the averages of the weights.

    Raises:
        NothingMatchedError: there is no such run, or it has no checkpoint.
        StorageError: none of its checkpoints is good, or the output cannot be written.
        UserError: the output has no known form, or the job of the run has no `ema`.
    """
    from engine.models.hugging_face import save_config  # torch
    from engine.runtime.checkpoint.export import export, refuse_output

    refuse_output(output, for_dcp)  # before every byte of the checkpoint is read
    choice = find_checkpoint(where, results, say)
    job = choice.manifest.job
    if ema and not job.get("ema"):
        hint = f"run {choice.manifest.run} kept no average of its weights"
        raise UserError([Problem("--ema", "a run with --ema DECAY", "ema 0", hint)])
    beside = (
        (lambda folder: save_config(job["model_args"], folder)) if job["model"] == HF_MODEL else lambda folder: None
    )
    place = checkpoints_at(choice.origin.place)
    done = export(place, choice.manifest, output, beside=beside, for_dcp=for_dcp, ema=ema)
    facts = {"run": choice.manifest.run, "step": choice.manifest.step, "output": str(output)}
    return facts | {"tensors": done.tensors, "bytes": done.num_bytes}
