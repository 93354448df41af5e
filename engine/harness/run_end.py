"""The end of a run: its summary; the folder of one that begins; the records if its command ends before its verdict.

Without these records the run would look like one whose launcher was killed.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.core.errors import BY_SIGNAL, BambooError, StorageError
from engine.core.history.process_records import EndedRecord, FailedRecord, TrainingEndedRecord

if TYPE_CHECKING:
    from engine.files.run_folder import RunFolder
    from engine.runtime.agent.run_view import Ending


@contextlib.contextmanager
def in_new_folder(results: str, name: str, say: Callable[[str], None]) -> Iterator[RunFolder]:
    """Makes a run folder and holds it; whatever ends the command during the block is recorded there."""
    from engine.files.run_folder import create_run_folder
    from engine.runtime.process.folder_lock import folder_used
    from engine.runtime.process.interrupts import holding

    folder = create_run_folder(Path(results), name, datetime.now(), secrets.token_hex(2), say)
    with (
        holding() as interrupts,
        folder_used(folder.path),
        failure_recorded(folder),
        interrupts.forcing(partial(note_forced_end, folder)),
    ):
        yield folder


@contextlib.contextmanager
def failure_recorded(folder: RunFolder) -> Iterator[None]:
    """Records an error that ends the command before the run has a verdict, such as a store that refuses.

    The folder of a run that has recorded nothing is deleted. An error of the system becomes one of bamboo.
    """
    from engine.files.atomic_write import of_system

    try:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            raise of_system(error) from error
    except BambooError as error:
        if folder.events.exists():
            record_failure(folder, error)
        else:
            _delete(folder.path)
        raise


def record_failure(folder: RunFolder, error: BambooError) -> None:
    """Records that this error ended the command, if the disk takes it."""
    from engine.files.events_file import read_history
    from engine.files.evidence.chained_append import add_records

    with contextlib.suppress(StorageError):
        history = read_history(folder.events)
        outcome, code = "interrupted" if error.exit_code in BY_SIGNAL else "failed", int(error.exit_code)
        failed = [] if history.error else [FailedRecord(error=str(error))]
        training = [] if history.training_ended else [TrainingEndedRecord(outcome=outcome, exit_code=code)]
        if not history.is_empty and history.ended is None:
            add_records(folder.events, *failed, *training, EndedRecord(outcome=outcome, exit_code=code))


def _delete(run: Path) -> None:
    """Deletes the folder of a run that has not begun, if its files are bamboo's own; ``latest`` is the run before."""
    from engine.files.own_files import delete_tree
    from engine.files.run_folder import point_latest_to_newest

    delete_tree(run, run.parent)
    point_latest_to_newest(run.parent)


def note_forced_end(folder: RunFolder, number: int) -> None:
    """Records that a second signal ended the command at once."""
    from engine.files.evidence.chained_append import add_records

    if folder.events.exists():
        add_records(folder.events, EndedRecord(outcome="interrupted", exit_code=128 + number))


def summary_of(folder: RunFolder, ending: Ending, wall_s: float) -> dict[str, Any]:
    """Returns the result of a run for `run.json`."""
    from engine.core.checks.trajectory import trajectory_hash

    run_state = ending.view.run_state
    launched_at_ns = run_state.launched_at_ns
    last = max(run_state.validations, default=None)
    sets = () if last is None else run_state.validations[last]
    return {
        "run_dir": str(folder.path),
        "outcome": ending.outcome,
        "exit_code": ending.exit_code,
        "error": None if ending.error is None else str(ending.error),
        "steps": run_state.committed + 1,
        "resumed_after": run_state.begun if run_state.begun >= 0 else None,
        "kept": run_state.kept,
        "not_kept": run_state.not_kept,
        "loss_first": run_state.losses[0] if run_state.losses else None,
        "loss_last": run_state.losses[-1] if run_state.losses else None,
        "validation_loss": sets[0].loss if sets else None,
        "validation_metric": next(iter(sets[0].metrics.values()), None) if sets else None,
        "evaluations": [asdict(each) for each in sets],
        "trajectory": trajectory_hash(run_state.rows) if run_state.rows else None,
        "missing": list(ending.missing),
        "wall_s": round(wall_s, 3),
        "launch_s": round((launched_at_ns - ending.started_at_ns) / 1e9, 3) if launched_at_ns else None,
        "peak_stash": {each.worker: each.peak_stash for each in ending.view.workers},
        "loggers": [*ending.loggers],
        "peak_memory_mib": {each.worker: round(each.peak_memory_kib / 1024, 1) for each in ending.view.workers},
    }
