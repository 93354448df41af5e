"""The page of a run of another launcher's job: the steps of its ranks over time, recoveries, blame, checks.

Rule: it needs no script; the picture is drawn here, of at most `MOST_POINTS` points for each process.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import cycle
from typing import Any

import pandas as pd

from engine.core.checks.external_report import ExternalRecovery, StrikeMade
from engine.core.checks.external_verdict import StepReport
from engine.core.texts import counted
from engine.report.external_tables import PHASES, ExternalTables, launcher_lines
from engine.report.pages.frame import BLUE, GREEN, ORANGE, PURPLE, SKY, Heading, Tile, rendered, table_of

MOST_POINTS = 2_000
_WIDTH, _HEIGHT, _LEFT, _BELOW = 1000.0, 260.0, 46.0, 22.0  # of the picture, and of its margins
_MOODS = {"passed": "good", "failed": "bad"}


def external_page(tables: ExternalTables, facts: Mapping[str, Any], evidence: Mapping[str, Any]) -> str:
    """Returns the page as HTML; `facts` are those of run.json, `evidence` is the comparison with the twin."""
    job, outcome = facts["external"], tables.tables["outcome"].iloc[0]
    mood = "bad" if tables.flaws else _MOODS.get(outcome["verdict"], "open")
    wrong = tables.code[1].partition(": ")[2]
    sentence = wrong[:1].upper() + wrong[1:] if wrong else "Passed: all expectations hold."
    begun = datetime.fromisoformat(facts["started"])
    when = f"{begun.day} {begun:%B %Y, %H:%M}"
    lines = [f"Job: {shlex.join(job['command']) or 'one that ran already'}; launcher {job['launcher']}.", job["about"]]
    weights = evidence.get("weights", {})
    on_weights = (
        {"same": "good", "different": "bad"}.get(weights.get("status"), "open"),
        f"Weights: {weights['text']}." if weights else "",
    )
    return rendered(
        "external.html",
        Heading("bamboo report", tables.name, mood, sentence, [*_tiles(outcome)], when, lines, on_weights),
        (),
        picture=_picture(tables),
        faults=job["faults"],
        checks=table_of(tables.tables["checks"].drop(columns="run").rename(columns={"name": "check"})),
        recoveries=tables.recoveries and table_of(_costs(tables.recoveries)),
        evidence=[(name, of["status"], of["text"]) for name, of in evidence.items() if _is_part(of)],
        words=table_of(launcher_lines(tables.run, tables.origin_ns)),
        workers=table_of(
            tables.tables["workers"].drop(columns="run").rename(columns=lambda name: name.replace("_", " "))
        ),
    )


def _is_part(of: object) -> bool:
    return isinstance(of, Mapping) and "status" in of


def _tiles(outcome: pd.Series) -> Iterator[Tile]:
    yield "steps", str(outcome["num_steps"]), ""
    if not pd.isna(outcome["stall_ms"]):
        yield "training stalled", f"{outcome['stall_ms'] / 1e3:.3g}", "s"
    yield "steps lost", str(outcome["lost_steps"]), ""
    if not pd.isna(outcome["step_ms"]):
        yield "median step", f"{outcome['step_ms']:.3g}", "ms"
        yield "goodput", f"{100 * outcome['goodput']:.1f}", "% of the time"


def _costs(recoveries: Sequence[ExternalRecovery]) -> pd.DataFrame:
    rows = []
    for recovery in recoveries:
        phases = recovery.phases_ns
        blame = [", ".join(map(str, ranks)) or "none" for ranks in (recovery.ended, recovery.blamed)]
        rows.append(
            {
                "what": " and ".join(recovery.faults),
                "step": recovery.step,
                "training stalled": str(recovery.stall or ""),
                **{f"{phase}, ms": round(phases[phase] / 1e6, 1) if phase in phases else None for phase in PHASES},
                "steps lost": recovery.lost_steps if recovery.resume_ns is not None else None,
                "ranks ended": blame[0],
                "blamed": blame[1],
            }
        )
    return pd.DataFrame(rows)


def _picture(tables: ExternalTables) -> dict[str, Any] | None:
    """Returns the lines of the picture in its coordinates: one for each process, strikes, stalls, and the axes."""
    reports: list[StepReport] = tables.run.of(StepReport)
    if not reports:
        return None
    origin_ns, end_ns = tables.origin_ns, tables.run.end.at_ns
    most = max(1, *(report.step for report in reports))

    def x(at_ns: float) -> float:
        part = min(1.0, max(0.0, (at_ns - origin_ns) / max(1, end_ns - origin_ns)))
        return round(_LEFT + part * (_WIDTH - _LEFT), 1)

    def y(step: int) -> float:
        return round((_HEIGHT - _BELOW) * (1 - step / most) + 4, 1)

    by_process: dict[tuple[int, str], list[StepReport]] = {}
    for report in reports:
        by_process.setdefault((-1 if report.rank is None else report.rank, report.process), []).append(report)
    colours = dict(
        zip(sorted({rank for rank, _ in by_process}), cycle((BLUE, ORANGE, GREEN, PURPLE, SKY)), strict=False)
    )
    lines = []
    for (rank, _), own in by_process.items():
        few = own[:: -(-len(own) // MOST_POINTS)]
        points = " ".join(f"{x(each.at_ns)},{y(each.step)}" for each in few)
        lines.append((f"rank {rank}" if rank >= 0 else "job", colours[rank], points))
    return {
        "size": (_WIDTH, _HEIGHT),
        "lines": lines,
        "strikes": [(x(each.at_ns), each.fault) for each in tables.run.of(StrikeMade)],
        "stalls": [(x(each.begin_ns), x(each.resume_ns or end_ns)) for each in tables.recoveries],
        "steps": [(y(step), step) for step in sorted({0, most // 2, most})],
        "seconds": [
            (x(origin_ns + part * (end_ns - origin_ns)), part * (end_ns - origin_ns) / 1e9) for part in (0, 0.5, 1)
        ],
        "legend": sorted({(name, colour) for name, colour, _ in lines}),
        "told": f"{counted(len(reports), 'report')} of steps",
    }
