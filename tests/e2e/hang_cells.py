"""The results of `bamboo matrix matrix-hangs --json --keep`: how long each hang lasted, and what the verdicts say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from engine.codec.values import value_of
from engine.core.exclusion import Cause, Exclusion, Verdict
from tests.e2e.recorded import events_of

NUM_CELLS = 36
CAUSES = {"in": Cause.SILENCE}  # of the other rows: a hang
DEADLINE_MS = 10_000.0


class Found(NamedTuple):
    """The verdict on the worker that stopped in a cell, and the time from its last sign of life to it."""

    cell: str
    verdict: Exclusion
    ms: float

    @property
    def row(self) -> str:
        """Where it stopped."""
        return self.cell.partition("/")[0]


def found_in(runs: Path, cell: Mapping[str, Any]) -> Found:
    """Returns the last verdict of the run of a cell, by its events."""
    epochs = [each for each in events_of(runs / cell["run"] / "events.jsonl") if each["event"] == "epoch"]
    at_ns, verdict = [
        (each["at_ns"], out) for each in epochs for out in value_of(each["verdict"], Verdict, "it") if out.is_loss
    ][-1]
    return Found(cell["cell"], verdict, (at_ns - (verdict.alive_ns or 0)) / 1e6)


def wrong(found: Found, gpu: str) -> str:
    """Returns what is wrong with a cell; `gpu` is a part of the name of the GPU of a kernel that does not end."""
    if found.verdict.cause != CAUSES.get(found.row, Cause.HANG) or not 0 < found.ms < DEADLINE_MS:
        return str(found)
    names_it = f"hangs in a kernel of {gpu}" in found.verdict.why
    return "" if names_it == (found.row == "kernel") else str(found)


def slowest_of_rows(all_found: Iterable[Found]) -> str:
    """Returns the longest time of each row in words."""
    rows: dict[str, float] = {}
    for each in all_found:
        rows[each.row] = max(rows.get(each.row, 0.0), each.ms)
    return ", ".join(f"{row} {ms:.0f} ms" for row, ms in rows.items())
