"""The output of a command during a run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.core.job.job import Job
    from engine.runtime.agent.run_state import RunView


@dataclass(frozen=True, slots=True)
class Screen:
    """Shows live runs: `say` a line, `picture` the views of a job with this events file."""

    say: Callable[[str], None]
    picture: Callable[[Job, Path], AbstractContextManager[Callable[[RunView], None]]]


def lines_only(say: Callable[[str], None]) -> Screen:
    """Returns a screen without pictures."""
    return Screen(say, lambda job, events: nullcontext(lambda view: None))
