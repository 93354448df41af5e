"""The end of a run: its summary; the folder of one that begins; the records if its command ends before its verdict.

Without these records the run would look like one whose launcher was killed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.core.errors import BambooError, StorageError
from engine.core.history.process_records import EndedRecord

if TYPE_CHECKING:
    from engine.files.run_folder import RunFolder
    from engine.runtime.agent.run_view import Ending
    from engine.runtime.keeping.scribe import Scribe


@contextlib.contextmanager
def in_new_folder(scribe: Scribe, results: str, name: str, say: Callable[[str], None]) -> Iterator[RunFolder]:
    """Makes a run folder, which the `scribe` holds; whatever ends the command during the block is recorded there."""
    from engine.runtime.process.interrupts import holding

    folder = scribe.make_run_folder(results, name, say)
    with (
        holding() as interrupts,
        failure_recorded(folder, scribe),
        interrupts.forcing(partial(note_forced_end, folder, scribe)),
    ):
        yield folder


@contextlib.contextmanager
def failure_recorded(folder: RunFolder, scribe: Scribe) -> Iterator[None]:
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
        record_failure(folder, scribe, error)
        raise


def record_failure(folder: RunFolder, scribe: Scribe, error: BambooError) -> None:
    """Records that this error ended the command, if the disk takes it; deletes a folder without any record."""
    with contextlib.suppress(StorageError):
        scribe.ask("fail", str(folder.path), str(error), int(error.exit_code))


def note_forced_end(folder: RunFolder, scribe: Scribe, number: int) -> None:
    """Records that a second signal ended the command at once."""
    from engine.runtime.agent.run_view import telling_unwritten

    with telling_unwritten():
        scribe.end_by_force(folder.events, EndedRecord(outcome="interrupted", exit_code=128 + number))


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
