"""Votes for the commit of a step: one message of each worker, with the votes of all its replicas.

In every program the COMMITs of a worker stand together behind its last LOG, and no action but STEP needs a vote. So the
one message can be sent with the last COMMIT: no other worker waits for it sooner, and the commit needs the last vote in
any case. Only the marks of very many microbatches need a second message. The measured times and sizes in a vote decide
nothing about the step: the policy goes by them later.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.action import Action, Op
from engine.core.message_codec import ToAgent, message
from engine.core.ownership import Slot


@dataclass(frozen=True, slots=True)
class SlotVote:
    """A replica holds all that its optimizer step reads; an owner adds norms, the owner of a last stage the loss."""

    pipeline: int
    stage: int
    layers: tuple[int, ...] = ()
    squared_norms: tuple[float, ...] = ()  # of the gradients of these layers
    loss: float | None = None
    loaded: tuple[int, ...] = ()  # microbatches, in a step with an audit
    marks: tuple[str, ...] = ()  # of these microbatches
    took_ns: tuple[int, ...] = ()  # of an owner: its forwards and backwards, 0 unless it ran those of all microbatches
    sizes: tuple[int, ...] = ()  # the `StageBytes` of an owned slot, in the first steps of a program
    heal_ns: int = 0  # of a new shadow: from the first word of its owner to the whole replica


@message
class VoteMessage(ToAgent):
    """All replicas of a worker are ready for the optimizer, or some of them if one message cannot have all votes."""

    epoch: int
    step: int
    slots: tuple[SlotVote, ...]


class ComputeTimes:
    """The times of a worker's forwards and backwards in the open step, by slot; redundant forwards do not count.

    It is the time on the clock, and not that of a processor; on a GPU, that between its events. Only the time that the
    worker waits for a core is taken off: on a busy machine it falls to one worker now, to another one later.
    """

    def __init__(self, microbatches: int):
        self._microbatches = microbatches
        self._known: dict[Slot, list[int]] = {}  # number and nanoseconds of forwards, then of backwards

    def add(self, action: Action, took_ns: int) -> None:
        """Adds a compute action that has ended."""
        if action.op is Op.REDO_F:
            return
        known = self._known.setdefault((action.pipeline, action.stage), [0, 0, 0, 0])
        at = 0 if action.op is Op.F else 2
        known[at] += action.op is not Op.I  # its second part is to come
        known[at + 1] += took_ns

    def take_off(self, action: Action, waited_ns: int) -> None:
        """Takes the time off that a compute action has waited for a core."""
        if action.op is not Op.REDO_F:
            known = self._known.setdefault((action.pipeline, action.stage), [0, 0, 0, 0])
            known[1 if action.op is Op.F else 3] -= waited_ns

    def of(self, slot: Slot) -> tuple[int, int]:
        """Returns the nanoseconds of all forwards and of all backwards; 0 if some were run elsewhere, or twice."""
        forwards, forward_ns, backwards, backward_ns = self._known.get(slot, (0, 0, 0, 0))
        is_whole = forwards == backwards == self._microbatches
        return (forward_ns, backward_ns) if is_whole else (0, 0)

    def clear(self) -> None:
        """Forgets the step."""
        self._known.clear()
