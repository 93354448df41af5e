"""Records the end of a run whose command ends before its verdict.

Without these records the run would look like one whose launcher was killed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from engine.core.errors import BY_SIGNAL, BambooError, StorageError
from engine.core.history.process_records import EndedRecord, FailedRecord, TrainingEndedRecord

if TYPE_CHECKING:
    from engine.files.run_folder import RunFolder


@contextlib.contextmanager
def failure_recorded(folder: RunFolder) -> Iterator[None]:
    """Records an error that ends the command before the run has a verdict, such as a store that refuses."""
    try:
        yield
    except BambooError as error:
        record_failure(folder, error)
        raise


def record_failure(folder: RunFolder, error: BambooError) -> None:
    """Records that this error ended the command, if the disk takes it."""
    from engine.files.events_file import add_records, read_history

    with contextlib.suppress(StorageError):
        history = read_history(folder.events)
        outcome, code = "interrupted" if error.exit_code in BY_SIGNAL else "failed", int(error.exit_code)
        failed = [] if history.error else [FailedRecord(error=str(error))]
        training = [] if history.training_ended else [TrainingEndedRecord(outcome=outcome, exit_code=code)]
        if not history.is_empty and history.ended is None:
            add_records(folder.events, *failed, *training, EndedRecord(outcome=outcome, exit_code=code))


def note_forced_end(folder: RunFolder, number: int) -> None:
    """Records that a second signal ended the command at once."""
    from engine.files.events_file import add_records

    if folder.events.exists():
        add_records(folder.events, EndedRecord(outcome="interrupted", exit_code=128 + number))
