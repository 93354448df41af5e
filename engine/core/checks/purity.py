"""Purity: a layer makes the same bits from the same inputs, weights and buffers, in any copy and in any process.

Rules: each value that a layer makes has a mark, a digest of its bits. The same value, made again, must have the same
mark. A different mark is a mistake of the model's author: the state that made the difference is on no replica.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from engine.core.checks.loaded_data import SEE, another
from engine.core.errors import Problem, ReplicasDifferError, UserError

DigestByName = Mapping[str, str]  # name of a value, such as "output of microbatch 0" -> digest of its bits

INPUT = "input"  # the layer's input; if it differs, an earlier layer or the data is the cause
DATA = "data"  # the source of data, in place of a layer's name
EITHER = "Either may be the wrong one: a bit may have flipped in a memory or a processor"
ONCE = "a difference that the next start does not show may be a flipped bit of this machine"
OPTIMIZER = "optimizer "  # before the name of the optimizer, in place of a layer's name


def impure_layer(name: str, found: str) -> Problem:
    """Returns the problem of a layer; `found` says which value differs."""
    hint = (
        "no replica has what made the difference, so a failover would change the bits: keep state in buffers that "
        f"forwards alone change, draw from torch's default generator, {SEE}; {ONCE}"
    )
    return Problem("model", "layers that make the same bits again", f"{name}: {found}", hint)


def impure_optimizer(name: str, found: str) -> Problem:
    """Returns the problem of an optimizer; `found` says which result differs, and when."""
    hint = (
        "no replica has what made the difference, so a failover would change the bits: keep all state in "
        "`self.state` by parameter, as tensors and numbers; draw no random numbers; look at one parameter alone; "
        f"--no-check-pure leaves out this check; {ONCE}"
    )
    return Problem("optimizer", "an optimizer that makes the same bits again", f"{name!r}: {found}", hint)


def once_only(found: str) -> ReplicasDifferError:
    """Returns the error of replicas that differ in one trial, and have the same bits in the next one."""
    return ReplicasDifferError(
        f"{found}; a second trial gives both the same bits. {EITHER}; an optimizer that keeps something outside of "
        "`self.state` when it is first used would show the same"
    )


@dataclass(slots=True)
class PurityBook:
    """The marks of the layers that the workers have tried, and of the data that they have loaded from `source`."""

    source: str = ""
    # layer -> value -> the first worker that told it, and its mark
    _first: dict[str, dict[str, tuple[int, str]]] = field(default_factory=dict)

    def add(self, worker: int, rows: Iterable[tuple[str, DigestByName]]) -> None:
        """Adds a worker's marks of some layers; raises UserError if another worker has other marks for a layer."""
        problems = []
        for name, marks in rows:
            known = self._first.setdefault(name, {})
            first = {value: known.setdefault(value, (worker, mark)) for value, mark in marks.items()}
            differing = (value for value, mark in marks.items() if first[value][1] != mark)
            if (value := next(differing, INPUT)) != INPUT:
                teller, mark = first[value]
                how = f"between worker {teller} and worker {worker}"
                if name.startswith(OPTIMIZER):
                    problems.append(impure_optimizer(name.removeprefix(OPTIMIZER), f"its {value} differs {how}"))
                elif name == DATA:
                    problems.append(another(self.source, value, (mark, marks[value]), how))
                else:
                    problems.append(impure_layer(name, f"its {value} differs {how}"))
        if problems:
            raise UserError(problems)
