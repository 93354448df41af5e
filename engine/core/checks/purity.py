"""Purity: a layer makes the same bits from the same inputs, weights and buffers, in any copy and in any process.

Rules: each value that a layer makes has a mark, a digest of its bits. The same value, made again, must have the same
mark. A different mark is a mistake of the model's author: the state that made the difference is on no replica.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from engine.core.errors import Problem, UserError

DigestByName = Mapping[str, str]  # name of a value, such as "output of microbatch 0" -> digest of its bits

INPUT = "input"  # the layer's input; if it differs, an earlier layer or the data is the cause
DATA = "data"  # the source of data, in place of a layer's name
_SEE = "or give --no-check-pure; docs/what-a-layer-may-do.md says more"


def impure(name: str, found: str) -> Problem:
    """Returns the problem of a layer, or of the data; `found` says which value differs."""
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
    """The marks of layers that the workers have tried."""

    _first: dict[str, tuple[int, DigestByName]] = field(default_factory=dict)  # layer -> its first worker and marks

    def add(self, worker: int, rows: Iterable[tuple[str, DigestByName]]) -> None:
        """Adds a worker's marks of some layers; raises UserError if another worker has other marks for a layer."""
        problems = []
        for name, marks in rows:
            first, known = self._first.setdefault(name, (worker, marks))
            differing = (value for value, mark in marks.items() if known.get(value, mark) != mark)
            if (value := next(differing, INPUT)) != INPUT:
                problems.append(impure(name, f"its {value} differs between worker {first} and worker {worker}"))
        if problems:
            raise UserError(problems)
