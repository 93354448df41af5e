"""The page of what was measured on a GPU: date, hardware, versions and every figure; a pure function of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date
from typing import NamedTuple


class Figure(NamedTuple):
    """One result of a test on a GPU: what was tried, what was found, and in which seconds."""

    what: str
    found: str
    seconds: float


def page(day: date, facts: Mapping[str, object], figures: list[Figure]) -> tuple[str, str]:
    """Returns the name of the file in docs/hardware and its text."""
    gpu = str(facts.get("gpus") or "no GPU")
    name = f"{day.isoformat()}-{re.sub('[^a-z0-9]+', '-', gpu.lower()).strip('-')}.md"
    rows = [f"| {each.what} | {each.found} | {each.seconds:.1f} |" for each in figures]
    lines = [f"# {gpu}, {day.isoformat()}", "", "Written by `make test-gpu`.", "", "| fact | value |", "|---|---|"]
    lines += [f"| {key} | {value} |" for key, value in facts.items()]
    lines += ["", "| tried | found | seconds |", "|---|---|---|", *rows]
    return name, "\n".join(lines) + "\n"
