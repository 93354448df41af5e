"""The times of a step that a worker measures for the policies: of its forwards, backwards and transfers, by slot."""

from __future__ import annotations

from engine.core.action import Action, Op
from engine.core.ownership import Slot

BORDER_OPS = (Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B)
_MOST_PASSED = 32  # microbatches whose transfers are told


class ComputeTimes:
    """The times of a worker's forwards and backwards in the open step, by slot; redundant forwards do not count.

    Clock time counts (on a GPU, the time between events), less the wait for a core: a busy machine slows one worker
    now, another one later.
    """

    def __init__(self, microbatches: int):
        self._microbatches = microbatches
        self._known: dict[Slot, list[int]] = {}  # number and nanoseconds of forwards, then of backwards
        self._passed: dict[Slot, dict[tuple[Op, int], int]] = {}

    def add(self, action: Action, took_ns: int, *, has_ended: bool = True) -> None:
        """Adds the time of a compute action; without `has_ended` a part of it, below 0 for a wait for a core."""
        if action.op is not Op.REDO_F:
            known = self._known.setdefault((action.pipeline, action.stage), [0, 0, 0, 0])
            at = 0 if action.op is Op.F else 2
            known[at] += has_ended and action.op is not Op.I  # its second part is to come
            known[at + 1] += took_ns

    def of(self, slot: Slot) -> tuple[int, int]:
        """Returns the nanoseconds of all forwards and of all backwards; 0 if some were run elsewhere, or twice."""
        forwards, forward_ns, backwards, backward_ns = self._known.get(slot, (0, 0, 0, 0))
        is_whole = forwards == backwards == self._microbatches
        return (forward_ns, backward_ns) if is_whole else (0, 0)

    def forward_ns(self, slot: Slot) -> int:
        """Returns the mean nanoseconds of a forward of a slot in the open step; 0 if none has run."""
        forwards, forward_ns, *_ = self._known.get(slot, (0, 0))
        return forward_ns // forwards if forwards else 0

    def passes(self, action: Action, end_ns: int) -> None:
        """Notes the end of a transfer."""
        if action.microbatch < _MOST_PASSED:
            self._passed.setdefault((action.pipeline, action.stage), {})[action.op, action.microbatch] = end_ns

    def passed(self, slot: Slot) -> tuple[tuple[int, ...], ...]:
        """Returns the ends of the transfers of a slot, of each of `BORDER_OPS` by microbatch; empty without any."""
        if not (known := self._passed.get(slot, {})):
            return ()
        return tuple(tuple(end_ns for (op, _), end_ns in sorted(known.items()) if op is each) for each in BORDER_OPS)

    def clear(self) -> None:
        """Forgets the step."""
        self._known.clear()
        self._passed.clear()
