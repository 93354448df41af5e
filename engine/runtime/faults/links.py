"""Links: a connection between two workers that goes silent, without an error at either end."""

from __future__ import annotations

from engine.core.faults.fault_kind import Parameter, at_once
from engine.runtime.faults.registry import WorkerFaultContext, fault_kind

_PEER = Parameter("peer", "count", "the worker at the other end", required=True)
_DIRECTION = Parameter(
    "direction",
    "choice",
    "there: what the worker sends is lost; back: what it should receive",
    "both",
    choices=("there", "back", "both"),
)
_FOR = Parameter("for", "duration", "how long, then all of it comes through; without it, for good")


@fault_kind("cut-link", "The connection to another worker goes silent.", "worker", at_once, _PEER, _DIRECTION, _FOR)
def cut_link(context: WorkerFaultContext) -> None:
    """Cuts the connection to the peer, if it is a member of the worker's group."""
    peer, direction = int(context.parameters["peer"]), str(context.parameters["direction"])
    for_ns = context.parameters.get("for_ns")
    if context.cut_link(peer, direction, None if for_ns is None else int(for_ns)):
        context.tell(f"the connection to worker {peer} is cut ({direction})")
