"""The page of what was measured on a GPU: date, hardware, versions and every figure; a pure function of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date
from typing import Any, NamedTuple


class Figure(NamedTuple):
    """One result of a test on a GPU: what was tried, what was found, and in which seconds."""

    what: str
    found: str
    seconds: float


def page(
    day: date, facts: Mapping[str, object], figures: list[Figure], command: str = "make test-gpu"
) -> tuple[str, str]:
    """Returns the name of the file in docs/hardware, one for each command, and its text."""
    gpu = str(facts.get("gpus") or "no GPU")
    kind = command.removeprefix("make ").removesuffix("-gpu")
    name = f"{day.isoformat()}-{re.sub('[^a-z0-9]+', '-', gpu.lower()).strip('-')}-{kind}.md"
    rows = [f"| {each.what} | {each.found} | {each.seconds:.1f} |" for each in figures]
    lines = [f"# {gpu}, {day.isoformat()}", "", f"Written by `{command}`.", "", "| fact | value |", "|---|---|"]
    lines += [f"| {key} | {value} |" for key, value in facts.items()]
    lines += ["", "| tried | found | seconds |", "|---|---|---|", *rows]
    return name, "\n".join(lines) + "\n"


def figure_of(row: Mapping[str, Any]) -> Figure:
    """Returns the figure of a row of a benchmark; `seconds` are those of its case, which the caller knows."""
    found = f"{row['ours']:.4g} beside {row['peer']:.4g} in {row['n']} rounds: {row['ratio']:.4g}"
    if row["goal"] is not None:
        verdict = "inconclusive" if row["met"] is None else "yes" if row["met"] else "no"
        found += f", goal {row['goal']:.4g}: {verdict}"
    return Figure(f"{row['case']}: {row['metric']}", found, 0.0)
