"""The data that workers load: the same microbatch has the same bits, whichever worker loads it, and whenever.

The first stage loads inputs and the last stage loads targets, each on its own. They belong together only if the source
gives both the same microbatch. So each worker tells the mark of each whole microbatch with its vote, also of one that
it loads again in a recovery, and the marks are compared before the step is committed.

Rule: the marks of a step stay until its commit, also those of workers that die before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.core.checks.trajectory import MARK_DIGITS
from engine.core.errors import Problem, UserError

LoadedMarks = Mapping[int, str]  # microbatch -> its mark: `MARK_DIGITS` of its inputs, then of its targets
SEE = "or give --no-check-pure; docs/what-a-layer-may-do.md says more"


def impure_data(source: str, found: str) -> Problem:
    """Returns the problem of a source of data; `found` says which microbatch differs, and how."""
    hint = (
        "inputs and targets would not belong together: give a data set that draws in __getitem__ as indexed(..., "
        "draws=True) (docs/data.md), draw in another source from keyed_generator(seed, step, pipeline, microbatch) of "
        f"engine.models.data, and keep no counter, iterator, file position or buffer between two calls, {SEE}"
    )
    return Problem("data", "a microbatch with the same bits whenever it is loaded", f"{source}: {found}", hint)


def another(source: str, name: str, marks: tuple[str, str], how: str) -> Problem:
    """Returns the problem of a microbatch that has two different marks; `how` says between which loads."""
    one, other = marks
    places = {"inputs": slice(MARK_DIGITS), "targets": slice(MARK_DIGITS, None)}
    parts = " and ".join(part for part, place in places.items() if one[place] != other[place])
    return impure_data(source, f"the {parts} of {name} differ {how}")


def named(microbatch: int, pipeline: int, step: int) -> str:
    """Returns the name of a microbatch for messages."""
    return f"microbatch {microbatch} of pipeline {pipeline} in step {step}"


@dataclass(slots=True)
class LoadedBook:
    """The marks of one step at a time; `refuses` says whether a difference is an error."""

    source: str
    refuses: bool = True
    _known: dict[tuple[int, int], tuple[str, int]] = field(default_factory=dict)  # the first mark and its worker

    def add(self, step: int, worker: int, pipeline: int, marks: LoadedMarks) -> None:
        """Adds marks of a worker; raises UserError if another worker has told another mark of a microbatch."""
        for microbatch, mark in marks.items():
            known, first = self._known.setdefault((pipeline, microbatch), (mark, worker))
            if known != mark and self.refuses:
                name, how = named(microbatch, pipeline, step), f"between worker {first} and worker {worker}"
                raise UserError([another(self.source, name, (known, mark), how)])

    def close(self) -> list[tuple[str, str]]:
        """Returns for each microbatch its name and a mark of it in `MARK_DIGITS`; begins the next step."""
        known, self._known = self._known, {}
        half = MARK_DIGITS // 2
        return [
            (f"microbatch {microbatch} of pipeline {pipeline}", mark[:half] + mark[MARK_DIGITS:][:half])
            for (pipeline, microbatch), (mark, _) in sorted(known.items())
        ]
