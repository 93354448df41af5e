"""The view of a run for pictures while it runs, and the ending of a run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.core.errors import BambooError, StorageError
from engine.core.history.process_records import TrainingEndedRecord
from engine.core.membership.state import Sighting
from engine.runtime.agent.run_state import RunState
from engine.runtime.agent.worker_handles import WorkerHandle
from engine.runtime.ipc.progress_board import Progress, ProgressBoard
from engine.runtime.ipc.recorder import Recorder, now_ns


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker in a picture; `silent_s` since its last message, and `inside_s` in the action that it computes.

    `doing` is the part of the start that it has been in for seconds, in words.
    """

    worker: int
    pid: int
    slots: tuple[tuple[int, int], ...]
    state: str
    progress: Progress
    peak_stash: int
    peak_memory_kib: int
    silent_s: float = 0.0
    inside_s: float = 0.0
    doing: str = ""


@dataclass(frozen=True, slots=True)
class RunView:
    """A run in a picture, a few times a second; the agent goes on to change the run state."""

    run_state: RunState
    workers: tuple[WorkerView, ...]
    is_interrupted: bool = False


@dataclass(frozen=True, slots=True)
class Ending:
    """The ending of a session: its outcome in one word, the error if there was one, and the last view of the run.

    `missing` names the results of the last step that a finished run lacks, because a worker ended before it sent them.
    `loggers` has the end of each logger as plain values.
    """

    outcome: str
    exit_code: int
    error: BambooError | None
    view: RunView
    started_at_ns: int
    ended_at_ns: int
    missing: tuple[str, ...] = ()
    loggers: tuple[Mapping[str, Any], ...] = ()

    def unstored(self, error: StorageError) -> Ending:
        """Returns the ending of a run whose records or results are not all on disk; one by a signal keeps its code."""
        if self.outcome == "interrupted":
            return replace(self, error=self.error or error)
        cause = self.error or StorageError(f"{error}; {self.view.run_state.progress()}")
        return replace(self, outcome="failed", exit_code=int(error.exit_code), error=cause)


def worker_view(member: WorkerHandle, board: ProgressBoard, seen: Sighting | None, *, is_slow: bool) -> WorkerView:
    """Returns the picture of a worker now."""
    silent_s, inside_s = (0.0, 0.0) if seen is None else seen.ages_s(now_ns())
    return WorkerView(
        member.worker,
        member.child.pid,
        member.slots,
        "slow" if is_slow and member.state == "running" else member.state,
        board.read(member.worker),
        max(member.peak_stash.values(), default=0),
        member.peak_memory_kib,
        silent_s,
        inside_s,
        member.doing,
    )


def ended(recorder: Recorder, ending: Ending) -> Ending:
    """Records the end of training; returns it, or the end of a run whose events cannot be written any more."""
    try:
        recorder.write(TrainingEndedRecord(outcome=ending.outcome, exit_code=ending.exit_code))
        recorder.settle()
    except StorageError as error:
        if ending.error is None:
            return ending.unstored(error)
    return ending


@contextlib.contextmanager
def telling_unwritten() -> Iterator[None]:
    """Tells the user of records that a process which ends by force leaves unwritten."""
    try:
        yield
    except StorageError as error:
        os.write(2, f"bamboo: {error}\n".encode())
