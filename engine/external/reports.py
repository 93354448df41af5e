"""The steps that a job reports: in files, as `bamboo.progress` writes them, or in its output."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.core.checks.external_report import StepEnded
from engine.core.faults.external import ANY_RANK

VARIABLE = "BAMBOO_PROGRESS"  # names the folder of the files to the processes of a job
_MOST_BYTES = 1 << 20  # of a file that are read at once


@dataclass(slots=True)
class ReportFiles:
    """The files of a folder, one for each process, which grow."""

    folder: Path
    _open: dict[str, int] = field(default_factory=dict)
    _rest: dict[str, bytes] = field(default_factory=dict)

    def new(self) -> list[StepEnded]:
        """Returns the reports since the last call; a line that is none is left out."""
        reports: list[StepEnded] = []
        for name in os.listdir(self.folder):
            if name.endswith(".jsonl") and not name.endswith(".fingerprints.jsonl"):
                if name not in self._open:
                    self._open[name] = os.open(self.folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                *lines, self._rest[name] = (self._rest.get(name, b"") + self._data(name)).split(b"\n")
                reports += [report for line in lines if (report := _report(line)) is not None]
        return reports

    def close(self) -> None:
        """Closes the files."""
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def _data(self, name: str) -> bytes:
        return b"".join(iter(lambda: os.read(self._open[name], _MOST_BYTES), b""))


def _report(line: bytes) -> StepEnded | None:
    try:
        entry: Any = json.loads(line)
        rank = ANY_RANK if entry.get("rank") is None else int(entry["rank"])
        samples = tuple(entry.get("samples") or ())
        return StepEnded(int(entry["t_ns"]), rank, int(entry["pid"]), int(entry["step"]), entry.get("loss"), samples)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def report_of(pattern: str, line: str, at_ns: int) -> StepEnded | None:
    """Returns the report in a line of output: the groups `step`, and `rank` and `loss` if there are any."""
    match = re.search(pattern, line)
    if match is None:
        return None
    groups = match.groupdict()
    try:
        loss = None if groups.get("loss") is None else float(groups["loss"])
        return StepEnded(at_ns, int(groups.get("rank") or ANY_RANK), -1, int(groups["step"]), loss)
    except ValueError:
        return None
