"""The rows of a run's fault-free twin: from a kept twin of the same job, else from a new run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from engine.core.errors import BambooError, StorageError

if TYPE_CHECKING:
    from engine.core.checks.trajectory import TrajectoryRow
    from engine.core.config.job import Job
    from engine.files.run_folder import RunFolder
    from engine.runtime.agent.run_view import Ending
    from engine.runtime.keeping.scribe import Scribe

# Errors of a run.json of another version, of one that is half written, and of a file that only has its name.
_UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)


def twin_rows(
    job: Job, folder: RunFolder, scribe: Scribe, run: Callable[[Job, RunFolder], Ending], say: Callable[[str], None]
) -> list[TrajectoryRow]:
    """Returns the rows of the twin of a run; `run` makes a new twin, whose files go to ``twin/`` in `folder`.

    The losses of the twin are added to the events of the run, because reports read only these. `say` gets a line about
    a kept twin that does not count, and about a new one that cannot be kept.

    Raises:
        BambooError: the twin did not finish.
    """
    from engine.core.history.verdict_records import TwinRecord
    from engine.files.trajectory_file import trajectory_rows, trajectory_text

    name = _naming()(job)
    twin = None
    if name:
        try:
            kept = scribe.ask("kept twin", job.results, name)
            twin = None if kept is None else trajectory_rows(kept, folder.twin.trajectory)
        except StorageError as error:
            say(f"the kept twin does not count: {error}")
    is_new = twin is None
    if twin is None:
        twin = _new_rows(job, folder, scribe, run)
    scribe.make_folder(folder.twin.path, folder.path)
    scribe.write(folder.twin.trajectory, trajectory_text(twin))
    if is_new and name:
        try:
            scribe.ask("keep twin", job.results, name, str(folder.twin.trajectory))
        except StorageError as error:
            say(f"the twin is not kept for later runs: {error}")
    losses = {row.step: row.loss for row in twin if row.loss is not None}
    scribe.add(folder.events, TwinRecord(losses=tuple(sorted(losses.items()))))
    return twin


def reusable_twins(runs: Iterable[RunFolder]) -> set[str]:
    """Returns the names of the twins that a new run of the job of one of these runs would use again."""
    from engine.core.config.job import Job
    from engine.files.atomic_write import open_to_read

    name_of, names = _naming(), set()
    for run in runs:
        with contextlib.suppress(*_UNREADABLE), open(open_to_read(run.run_json), "rb") as file:
            names.add(name_of(Job(**json.load(file)["job"])))
    return {name for name in names if name}


def _naming() -> Callable[[Job], str | None]:
    """Returns the function that names the twin of a job on this host."""
    from engine.core.checks.twin import fingerprint
    from engine.files.host_facts import host_facts
    from engine.files.jobs.data_files import data_files
    from engine.files.jobs.given_weights import with_weights_hash
    from engine.files.twin_file import own_sources

    facts, sources = host_facts(Path.cwd()), own_sources()
    return lambda job: fingerprint(with_weights_hash(job), facts, sources, data_files(job))


def _new_rows(
    job: Job, folder: RunFolder, scribe: Scribe, run: Callable[[Job, RunFolder], Ending]
) -> list[TrajectoryRow]:
    from engine.core.checks.twin import twin_of
    from engine.core.history.process_records import EndedRecord

    own = folder.twin
    scribe.make_folder(own.logs, folder.path)
    ending = run(twin_of(job), own)
    scribe.add(own.events, EndedRecord(outcome=ending.outcome, exit_code=ending.exit_code))
    if ending.exit_code:
        is_interrupted = ending.outcome == "interrupted"
        why = "interrupted in the twin" if is_interrupted else f"the fault-free twin did not finish: {ending.error}"
        raise BambooError(why, ending.exit_code)
    return ending.view.run_state.rows
