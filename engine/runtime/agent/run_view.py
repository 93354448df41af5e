"""A run as a picture shows it while it goes on, and its ending."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.errors import BambooError
from engine.runtime.agent.run_state import RunState
from engine.runtime.ipc.progress_board import Progress


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker as a picture shows it."""

    worker: int
    pid: int
    slots: tuple[tuple[int, int], ...]
    state: str
    progress: Progress
    peak_stash: int
    peak_memory_kib: int


@dataclass(frozen=True, slots=True)
class RunView:
    """A run as a picture shows it, a few times a second; the run state is the agent's own and grows."""

    run_state: RunState
    workers: tuple[WorkerView, ...]


@dataclass(frozen=True, slots=True)
class Ending:
    """How a session ended: outcome in a word, the error if there was one, and all that was learned until then.

    `missing` is what a run that has finished lacks of its last step, in words: its last witness went after that commit.
    """

    outcome: str
    exit_code: int
    error: BambooError | None
    view: RunView
    started_at_ns: int
    ended_at_ns: int
    missing: tuple[str, ...] = ()
