"""The tables of a run of another launcher's job, in the form of those of bamboo's own runs.

Rules: times are milliseconds since the first event. Goodput is the part of the time from the first reported step to the
last one that the steps would take at their median pace, each counted once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from engine.core.checks.external_report import ExternalRecovery, ExternalRun, LauncherLine, RankBegan, RankEnded
from engine.core.checks.external_verdict import StepReport
from engine.core.errors import ExitCode
from engine.core.texts import numbered

PHASES = ("still", "notice", "end", "begin", "step")
_COLUMNS = {
    "recovery": [
        *("what", "outcome", "step", "struck", "ended", "blamed", "at_ms", "stall_ms", "stall_most_ms"),
        *("stall_bound", *(f"{phase}_ms" for phase in PHASES), "lost_steps"),
    ],
    "steps": ["step", "rank", "process", "at_ms", "loss", "num_samples"],
    "workers": ["rank", "pid", "begin_ms", "end_ms", "num_steps"],
    "checks": ["name", "result", "text"],
    "outcome": ["verdict", "exit_code", "code", "num_steps", "step_ms", "seconds", "stall_ms", "lost_steps", "goodput"],
}


@dataclass(frozen=True)  # tables have no equality
class ExternalTables:
    """A run and its tables by name; `origin_ns` is the time of its first event, `flaws` those of its evidence."""

    name: str
    run: ExternalRun
    twin_loss: Mapping[int, float]
    recoveries: tuple[ExternalRecovery, ...]
    tables: Mapping[str, pd.DataFrame]
    origin_ns: int
    flaws: tuple[str, ...]
    is_over: bool

    @property
    def code(self) -> tuple[ExitCode, str]:
        """The exit code of a check of the run itself, and why it has not passed; an empty text if it has."""
        if self.flaws:
            return ExitCode.EXPECTATION_FAILED, f"{self.name}: its evidence is not complete: {self.flaws[0]}"
        outcome = self.tables["outcome"].iloc[0]
        if not self.is_over:
            return ExitCode.NOTHING_MATCHED, f"{self.name} has no verdict: it is still running, or its launcher is gone"
        if outcome["verdict"] == "passed":
            return ExitCode.OK, ""
        checks = self.tables["checks"]
        worst = checks.sort_values("result", key=lambda results: results != "failed", kind="stable")
        wrong = [f"{row.name}: {row.text}" for row in worst.itertuples(index=False) if row.result != "passed"]
        has_failed = outcome["verdict"] != "invalid"
        code = ExitCode.EXPECTATION_FAILED if has_failed else ExitCode.NOTHING_MATCHED
        return code, f"{self.name} is {outcome['verdict']}: {'; '.join(wrong[:1])}"

    @property
    def figures(self) -> dict[str, np.ndarray]:
        """The times of steps and recoveries, for a comparison."""
        columns = {"step": pd.Series(np.diff([at for _, at in new_steps(self.run)]) / 1e6)}
        for column in ("stall_ms", *(f"{phase}_ms" for phase in PHASES)):
            columns[f"recovery: {column.removesuffix('_ms')}"] = self.tables["recovery"][column]
        figures = {name: series.dropna().to_numpy(dtype="float64") for name, series in columns.items()}
        return {name: values for name, values in figures.items() if len(values)}


def external_tables(
    name: str, run: ExternalRun, twin: ExternalRun, result: Mapping[str, Any], flaws: tuple[str, ...]
) -> ExternalTables:
    """Returns the tables of a run; `result` is that of `bamboo inject`, empty for a run without one."""
    origin_ns = min((event.at_ns for event in run.events), default=0)
    recoveries = tuple(run.recoveries())
    rows: dict[str, list[dict[str, Any]]] = {
        "recovery": [_recovery(each, origin_ns) for each in recoveries],
        "steps": [_step(each, origin_ns) for each in run.of(StepReport)],
        "workers": _workers(run, origin_ns),
        "checks": list(result.get("checks", ())),
        "outcome": [_outcome(run, recoveries, result)],
    }
    tables = {key: pd.DataFrame(rows[key], columns=columns) for key, columns in _COLUMNS.items()}
    for table in tables.values():
        table.insert(0, "run", name)
    losses = {each.step: each.loss for each in twin.of(StepReport) if each.loss is not None}
    return ExternalTables(name, run, losses, recoveries, tables, origin_ns, flaws, bool(result))


def joined(runs: Sequence[ExternalTables]) -> dict[str, pd.DataFrame]:
    """Returns the tables of several runs, one below the other."""
    return {name: pd.concat([run.tables[name] for run in runs], ignore_index=True) for name in _COLUMNS}


def new_steps(run: ExternalRun) -> list[tuple[int, int]]:
    """Returns the steps that were the newest of all when they were reported, with their times in nanoseconds."""
    newest, steps = -1, []
    for report in run.of(StepReport):
        if report.step > newest:
            newest = report.step
            steps.append((report.step, report.at_ns))
    return steps


def _recovery(recovery: ExternalRecovery, origin_ns: int) -> dict[str, Any]:
    stall = recovery.stall
    return {
        "what": " and ".join(recovery.faults),
        "outcome": "recovered" if recovery.resume_ns is not None else "not recovered",
        "step": recovery.step,
        **{name: _ranks(getattr(recovery, name)) for name in ("struck", "ended", "blamed")},
        "at_ms": (recovery.begin_ns - origin_ns) / 1e6,
        "stall_ms": None if stall is None else stall.least_ns / 1e6,
        "stall_most_ms": None if stall is None or stall.most_ns is None else stall.most_ns / 1e6,
        "stall_bound": stall.bound if stall else "",
        **{f"{phase}_ms": time_ns / 1e6 for phase, time_ns in recovery.phases_ns.items()},
        "lost_steps": recovery.lost_steps if recovery.resume_ns is not None else None,
    }


def _step(report: StepReport, origin_ns: int) -> dict[str, Any]:
    samples = None if report.samples is None else len(report.samples)
    at_ms = (report.at_ns - origin_ns) / 1e6
    return {**report._asdict(), "at_ms": at_ms, "num_samples": samples}


def _workers(run: ExternalRun, origin_ns: int) -> list[dict[str, Any]]:
    """Returns one row for each process that was a rank."""
    ends = {each.pid: each.at_ns for each in run.of(RankEnded)}
    steps = pd.Series([each.process for each in run.of(StepReport)], dtype=object).value_counts()
    return [
        {
            "rank": began.rank,
            "pid": began.pid,
            "begin_ms": (began.at_ns - origin_ns) / 1e6,
            "end_ms": (ends[began.pid] - origin_ns) / 1e6 if began.pid in ends else None,
            "num_steps": int(steps.get(str(began.pid), 0)),
        }
        for began in run.of(RankBegan)
    ]


def _outcome(run: ExternalRun, recoveries: tuple[ExternalRecovery, ...], result: Mapping[str, Any]) -> dict[str, Any]:
    steps = new_steps(run)
    paces = [later - earlier for (_, earlier), (_, later) in pairwise(steps)]
    usual_ns = median(paces) if paces else None
    stalls = [each.stall.least_ns for each in recoveries if each.stall is not None]
    begin_ns = min((event.at_ns for event in run.events), default=0)
    return {
        "verdict": result.get("verdict", "no verdict"),
        "exit_code": result.get("exit_code"),
        "code": run.end.code,
        "num_steps": len(steps),
        "step_ms": None if usual_ns is None else usual_ns / 1e6,
        "seconds": (run.end.at_ns - begin_ns) / 1e9,
        "stall_ms": sum(stalls) / 1e6 if stalls else None,
        "lost_steps": sum(each.lost_steps for each in recoveries),
        "goodput": None if usual_ns is None else min(1.0, usual_ns * len(paces) / (steps[-1][1] - steps[0][1])),
    }


def launcher_lines(run: ExternalRun, origin_ns: int) -> pd.DataFrame:
    """Returns the lines with which the launcher noticed a failure, and the rank that each blames."""
    rows = [
        {"at ms": (line.at_ns - origin_ns) / 1e6, "blames": "" if line.blames is None else f"rank {line.blames}"}
        | {"text": line.text}
        for line in run.of(LauncherLine)
    ]
    return pd.DataFrame(rows, columns=["at ms", "blames", "text"])


def _ranks(numbers: tuple[int, ...]) -> str:
    return numbered("rank", numbers, " and ") if numbers else ""
