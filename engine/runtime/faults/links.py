"""Links: what two workers send each other is lost in silence, late or held up, or their link ends.

A fault counts once a frame or a message has met it.
"""

from __future__ import annotations

from typing import Any

from engine.core.faults.fault_kind import Parameter, at_once
from engine.core.links.disturbance import Disturbance
from engine.core.texts import counted
from engine.runtime.faults.registry import WorkerFaultContext, fault_kind

_PEER = Parameter("peer", "count", "the worker at the other end", required=True)
_DIRECTION = Parameter(
    "direction",
    "choice",
    "there: what the worker sends; back: what it should receive",
    "both",
    choices=("there", "back", "both"),
)
_FOR = Parameter("for", "duration", "how long, then all of it comes through; without it, for good")
_BY = Parameter("by", "duration", "how much later each frame arrives", required=True)


@fault_kind("cut-link", "The connection to another worker goes silent.", "worker", at_once, _PEER, _DIRECTION, _FOR)
def cut_link(context: WorkerFaultContext) -> None:
    """Cuts the connection to the peer, if it is a member of the worker's group."""
    given = context.parameters
    peer, direction, for_ns = int(given["peer"]), str(given["direction"]), given.get("for_ns")

    def met(way: str) -> None:
        context.tell(f"the connection to worker {peer} is cut ({direction}): it held up a message {way}")

    context.links.cut(peer, direction, None if for_ns is None else int(for_ns), met)


@fault_kind("delay-link", "A link brings all frames late.", "worker", at_once, _PEER, _DIRECTION, _BY, _FOR)
def delay_link(context: WorkerFaultContext) -> None:
    """Delays the frames of the link to the peer, if there is one."""
    _disturb(context, "delay")


@fault_kind("stall-link", "A link takes all frames and delivers none.", "worker", at_once, _PEER, _DIRECTION, _FOR)
def stall_link(context: WorkerFaultContext) -> None:
    """Holds the frames of the link to the peer, if there is one."""
    _disturb(context, "stall")


@fault_kind("reset-link", "A link ends inside its next frame.", "worker", at_once, _PEER, _DIRECTION)
def reset_link(context: WorkerFaultContext) -> None:
    """Resets the link to the peer inside its next frame, if there is one."""
    _disturb(context, "reset")


def _disturb(context: WorkerFaultContext, kind: Any) -> None:
    given = dict(context.parameters)
    peer = int(given.pop("peer"))
    fields: dict[str, Any] = given

    def met(there: int, back: int) -> None:
        context.tell(f"the {kind} of the link to worker {peer} met {counted(there, 'frame')} there and {back} back")

    context.links.disturb(peer, Disturbance(kind, **fields), met)
