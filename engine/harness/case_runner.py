"""A case: one run of a scenario with its faults, its fault-free twin, and what came of each expectation."""

from __future__ import annotations

import math
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.core.checks.expectations import Check, Observed, Result, check, exit_code, verdict
from engine.core.checks.recovery_times import Recovery
from engine.core.checks.strike_accuracy import precision
from engine.core.errors import BambooError, ExitCode, UserError
from engine.core.faults.fault import to_plain

if TYPE_CHECKING:
    from engine.core.checks.trajectory import Row
    from engine.files.run_folder import RunFolder
    from engine.files.scenarios.scenario_file import Loaded
    from engine.harness.run_driver import Screen
    from engine.runtime.agent.session import Ending
    from engine.runtime.process.children import ForkServer
    from engine.runtime.store.etcd_settings import EtcdSettings


@dataclass(frozen=True, slots=True)
class Case:
    """What came of one run of a scenario."""

    folder: Path
    checks: tuple[Check, ...]
    exit_code: ExitCode
    recoveries: tuple[Recovery, ...]

    @property
    def verdict(self) -> Result:
        """The verdict over all checks."""
        return verdict(self.checks)

    def as_dict(self) -> dict[str, Any]:
        """Returns the case as plain values."""
        return {
            "run_dir": str(self.folder),
            "verdict": self.verdict,
            "exit_code": int(self.exit_code),
            "checks": [asdict(each) for each in self.checks],
            "recoveries": [each.as_dict() for each in self.recoveries],
        }


def case_of(loaded: Loaded, folder: Path, seen: Observed) -> Case:
    """Returns what came of the expectations of a scenario, and whether its faults struck where it says."""
    from engine.runtime.faults.registry import kinds

    scenario = loaded.scenario
    checks = check(scenario.expect, scenario.job, loaded.faults, kinds(), seen)
    checks = (*checks, precision(scenario.job, loaded.faults, seen.events))
    return Case(folder, checks, exit_code(checks, seen), tuple(seen.recoveries()))


def run_case(loaded: Loaded, etcd: EtcdSettings | None, server: ForkServer, screen: Screen) -> Case:
    """Runs a scenario in a run folder of its own, then its twin if something is expected of the weights.

    Both are forked by `server`, which was started after `mark_processes`.

    Raises:
        BambooError: it could not be started.
    """
    from engine.files.atomic_write import write_atomically
    from engine.files.events_file import add_event, read_events
    from engine.files.run_folder import create_run_folder
    from engine.files.trajectory_file import write_trajectory
    from engine.harness.run_driver import drive, summary_of
    from engine.models.offer import unreadable_data
    from engine.runtime.doctor.leak_check import Traces

    started_s = time.monotonic()
    scenario = loaded.scenario
    job = scenario.job
    if problems := unreadable_data(job):
        raise UserError(problems)
    folder = create_run_folder(Path(job.results), _folder_name(scenario.name), datetime.now(), secrets.token_hex(2))
    copy = folder.path / "scenario.yaml"
    write_atomically(copy, loaded.path.read_text(encoding="utf-8"))
    _write_facts(folder, loaded)
    traces = Traces()
    ending = drive(job, folder, screen, etcd, faults=loaded.faults, server=server)
    left = traces.left(folder.logs, folder.path.name, etcd, server.pid) if scenario.expect.leftovers else None
    add_event(folder.events, "scenario", **scenario_facts(loaded, copy))
    rows = ending.view.account.rows
    write_trajectory(folder.trajectory, rows)
    error = "" if ending.error is None else str(ending.error)
    twin = _twin(loaded, folder, ending, etcd, server, screen)
    case = case_of(
        loaded, folder.path, Observed(ending.exit_code, error, list(read_events(folder.events)), rows, twin, left)
    )
    summary = summary_of(folder, ending, time.monotonic() - started_s)
    _write_facts(folder, loaded, summary | {"case": case.as_dict()})
    return case


def _twin(
    loaded: Loaded, folder: RunFolder, ending: Ending, etcd: EtcdSettings | None, server: ForkServer, screen: Screen
) -> list[Row] | None:
    """Returns the rows of the twin, or None where nobody asks for them or there are none."""
    from engine.harness.twin_run import twin_rows

    if loaded.scenario.expect.trajectory is None or ending.outcome == "interrupted":
        return None
    try:
        return twin_rows(loaded.scenario.job, folder, etcd, screen, server)
    except BambooError as error:
        screen.say(f"bamboo: {error}")
        return None


def scenario_facts(loaded: Loaded, copy: Path) -> dict[str, Any]:
    """Returns what it takes to run the scenario again: its text, and what was said beside it.

    The text is that of the `copy` that the run began with: whose file it is may have changed it, or be done with it.
    """
    from engine.files.scenarios.scenario_file import library

    name = loaded.scenario.name
    return {
        "scenario": name if loaded.path == library() / f"{name}.yaml" else "scenario.yaml",
        "text": copy.read_text(encoding="utf-8"),
        "seed": loaded.seed,
        "settings": [each for each in loaded.settings if not each.startswith("results=")],
    }


def _folder_name(name: str) -> str:
    return re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-._")[:40] or "case"


def _write_facts(folder: RunFolder, loaded: Loaded, result: dict[str, Any] | None = None) -> None:
    from engine.files.host_facts import host_facts

    scenario = loaded.scenario
    folder.write_run_json(
        {
            "job": asdict(scenario.job),
            "origins": {},
            "host": host_facts(Path.cwd()),
            "scenario": {
                "name": scenario.name,
                "file": str(loaded.path),
                "seed": loaded.seed,
                "faults": [to_plain(fault) for fault in loaded.faults],
            },
            "result": result,
        }
    )


def pauses_ms(cases: Sequence[Case]) -> dict[str, float]:
    """Returns quantiles of the pause over all recoveries of some cases, nearest rank, in milliseconds."""
    pauses = sorted(each.pause_ns for case in cases for each in case.recoveries if each.pause_ns is not None)
    parts = {"p50": 0.5, "p95": 0.95, "max": 1.0} if pauses else {}
    return {name: round(pauses[math.ceil(part * len(pauses)) - 1] / 1e6, 3) for name, part in parts.items()}
