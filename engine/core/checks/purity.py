"""Purity: a layer makes the same bits from the same inputs, weights and buffers, in any copy and in any process.

Rules: what a layer made is told by marks, one for each thing, and the same thing made again has the same mark. What
has another one is a mistake of the model's author, for nothing replicates what made the difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from engine.core.errors import Problem, UserError

Marks = Mapping[str, str]  # of what was made, such as "output of microbatch 0": a digest of its bits

INPUT = "input"  # its mark; where it differs, somebody before the layer is to blame
DATA = "data"  # stands for the source of data where layers are named
_SEE = "or give --no-check-pure; docs/what-a-layer-may-do.md says more"


def impure(name: str, found: str) -> Problem:
    """Returns the mistake of a layer, or of the data, of which `found` says what it did."""
    if name == DATA:
        hint = f"let it depend on seed, step, pipeline and microbatch alone, {_SEE}"
        return Problem(DATA, "a microbatch with the same bits whenever it is loaded", found, hint)
    hint = (
        "no replica has what made the difference, so a failover would change the bits: keep state in buffers that "
        f"forwards alone change, draw from torch's default generator, {_SEE}"
    )
    return Problem("model", "layers that make the same bits again", f"{name}: {found}", hint)


@dataclass(slots=True)
class PurityBook:
    """What the processes say of the layers that they have tried."""

    _said: dict[str, tuple[int, Marks]] = field(default_factory=dict)  # by name of the layer: who was first, and what

    def add(self, worker: int, rows: Iterable[tuple[str, Marks]]) -> None:
        """Takes in the marks of some layers; raises UserError for those that another process marked otherwise."""
        problems = []
        for name, marks in rows:
            first, known = self._said.setdefault(name, (worker, marks))
            differing = (what for what, mark in marks.items() if known.get(what, mark) != mark)
            if (what := next(differing, INPUT)) != INPUT:
                problems.append(impure(name, f"its {what} differs between worker {first} and worker {worker}"))
        if problems:
            raise UserError(problems)
