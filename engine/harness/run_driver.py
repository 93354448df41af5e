"""Drives one run to its end, shows it meanwhile, and sums it up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.core.config.job import Job
    from engine.core.faults.fault import Fault
    from engine.files.run_folder import RunFolder
    from engine.runtime.agent.session import Ending, View
    from engine.runtime.process.children import ForkServer
    from engine.runtime.store.etcd_settings import EtcdSettings


@dataclass(frozen=True, slots=True)
class Screen:
    """What shows runs while they go on; the harness itself prints nothing.

    `say` shows a line. `picture` is called with a job and its events file; the function that it yields gets each view.
    """

    say: Callable[[str], None]
    picture: Callable[[Job, Path], AbstractContextManager[Callable[[View], None]]]


def lines_only(say: Callable[[str], None]) -> Screen:
    """Returns a screen without pictures."""
    return Screen(say, lambda job, events: nullcontext(lambda view: None))


def drive(
    job: Job,
    folder: RunFolder,
    screen: Screen,
    etcd: EtcdSettings | None,
    *,
    run_id: str = "",
    faults: Sequence[Fault] = (),
    grace_s: float = 120.0,
    server: ForkServer | None = None,
) -> Ending:
    """Runs a job in a run folder, whose name is the run's unless it has another.

    Raises:
        BambooError: it could not be started.
    """
    from engine.runtime.agent.session import run_session

    with screen.picture(job, folder.events) as show:
        return run_session(
            job,
            folder.events,
            folder.logs,
            show,
            run_id=run_id or folder.path.name,
            etcd=etcd,
            faults=faults,
            grace_s=grace_s,
            server=server,
        )


def summary_of(folder: RunFolder, ending: Ending, wall_s: float) -> dict[str, Any]:
    """Returns the result of a run, as run.json keeps it."""
    from engine.core.checks.trajectory import trajectory_hash

    account = ending.view.account
    last = max(account.validations, default=None)
    return {
        "run_dir": str(folder.path),
        "outcome": ending.outcome,
        "exit_code": ending.exit_code,
        "error": None if ending.error is None else str(ending.error),
        "steps": len(account.losses),
        "loss_first": account.losses[0] if account.losses else None,
        "loss_last": account.losses[-1] if account.losses else None,
        "validation_loss": None if last is None else account.validations[last][0],
        "validation_metric": None if last is None else account.validations[last][1],
        "trajectory": trajectory_hash(account.rows) if account.rows else None,
        "missing": list(ending.missing),
        "wall_s": round(wall_s, 3),
        "launch_s": round((account.going_at_ns - ending.started_at_ns) / 1e9, 3) if account.going_at_ns else None,
        "peak_stash": {each.worker: each.peak_stash for each in ending.view.workers},
        "peak_memory_mib": {each.worker: round(each.peak_memory_kib / 1024, 1) for each in ending.view.workers},
    }
