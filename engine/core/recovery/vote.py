"""Votes for the commit of a step: one message of each worker, with the votes of all its replicas.

In every program the COMMITs of a worker stand together behind its last LOG, and no action but STEP needs a vote. So the
one message can be sent with the last COMMIT: no other worker waits for it sooner, and the commit needs the last vote in
any case. Only the marks of very many microbatches need a second message.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.message_codec import ToAgent, message


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


@message
class VoteMessage(ToAgent):
    """All replicas of a worker are ready for the optimizer, or some of them if one message cannot have all votes."""

    epoch: int
    step: int
    slots: tuple[SlotVote, ...]
