"""The rows of a run's fault-free twin: from a kept twin of the same job, else from a new run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from engine.core.errors import BambooError

if TYPE_CHECKING:
    from engine.core.checks.trajectory import TrajectoryRow
    from engine.core.config.job import Job
    from engine.files.run_folder import RunFolder
    from engine.runtime.agent.run_view import Ending


def twin_rows(job: Job, folder: RunFolder, run: Callable[[Job, RunFolder], Ending]) -> list[TrajectoryRow]:
    """Returns the rows of the twin of a run; `run` makes a new twin, whose files go to ``twin/`` in `folder`.

    The losses of the twin are added to the events of the run, because reports read only these.

    Raises:
        BambooError: the twin did not finish.
    """
    from engine.core.checks.twin import fingerprint
    from engine.core.history.verdict_records import TwinRecord
    from engine.files.events_file import add_records
    from engine.files.host_facts import host_facts
    from engine.files.twin_file import keep_twin, kept_twin, source_hash

    sources = source_hash(Path(__file__).parents[1])
    name = fingerprint(job, host_facts(Path.cwd()), sources)
    twin = kept_twin(Path(job.results), name) if name else None
    if twin is None:
        twin = _new_rows(job, folder, run)
        if name:
            keep_twin(Path(job.results), name, twin)
    losses = {row.step: row.loss for row in twin if row.loss is not None}
    add_records(folder.events, TwinRecord(losses=tuple(sorted(losses.items()))))
    return twin


def reusable_twins(runs: Iterable[RunFolder]) -> set[str]:
    """Returns the names of the twins that a new run of the job of one of these runs would use again."""
    from engine.core.checks.twin import fingerprint
    from engine.core.config.job import Job
    from engine.files.host_facts import host_facts
    from engine.files.twin_file import source_hash

    facts, sources = host_facts(Path.cwd()), source_hash(Path(__file__).parents[1])
    names = set()
    for run in runs:
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # of another version, or half written
            names.add(fingerprint(Job(**json.loads(run.run_json.read_text())["job"]), facts, sources))
    return {name for name in names if name}


def _new_rows(job: Job, folder: RunFolder, run: Callable[[Job, RunFolder], Ending]) -> list[TrajectoryRow]:
    from engine.core.checks.twin import twin_of
    from engine.core.history.process_records import EndedRecord
    from engine.files.events_file import add_records

    own = folder.twin
    own.logs.mkdir(mode=0o700, parents=True)
    ending = run(twin_of(job), own)
    add_records(own.events, EndedRecord(outcome=ending.outcome, exit_code=ending.exit_code))
    if ending.exit_code:
        is_interrupted = ending.outcome == "interrupted"
        why = "interrupted in the twin" if is_interrupted else f"the fault-free twin did not finish: {ending.error}"
        raise BambooError(why, ending.exit_code)
    return ending.view.run_state.rows
