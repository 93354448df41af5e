"""Routes: who sends what to whom in a program, read off the program itself.

A worker that makes a value on the wire sends it to every other worker that needs it from there. So an action need not
name its peer, and a plan after a failure may let anybody send what it happens to hold.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.core.action import Action
from engine.core.ownership import Ownership
from engine.core.program.build import Program
from engine.core.program.dependencies import WIRE, Kind, Value, makes, needs

_SENT = frozenset({Kind.ACTIVATION, Kind.GRADIENT, Kind.STREAMED, Kind.STATE, Kind.REDUCED, Kind.LOGGED})


@dataclass(frozen=True, slots=True)
class Routes:
    """One worker's share of the transfers of a program."""

    targets: dict[Value, tuple[int, ...]] = field(default_factory=dict)  # of what this worker sends, in order
    sources: dict[Value, int] = field(default_factory=dict)  # of what it takes from the wire


def routes_of(worker: int, program: Program, ownership: Ownership) -> Routes:
    """Returns to whom `worker` sends, and from whom it receives; every value has one sender."""
    senders: dict[Value, int] = {}
    receivers: dict[Value, list[int]] = {}
    for each, actions in program.items():
        for action in actions:
            _note(each, action, ownership, senders, receivers)
    targets = {
        value: tuple(dict.fromkeys(target for target in receivers.get(value, ()) if target != worker))
        for value, sender in senders.items()
        if sender == worker
    }
    sources = {value: senders[value] for value, takers in receivers.items() if worker in takers and value in senders}
    return Routes(targets, sources)


def _note(
    worker: int, action: Action, ownership: Ownership, senders: dict[Value, int], receivers: dict[Value, list[int]]
) -> None:
    for place, value in makes(action, worker, ownership):
        if place == WIRE and value.kind in _SENT:
            senders[value] = worker
    for place, value in needs(action, worker, ownership):
        if place == WIRE and value.kind in _SENT:
            receivers.setdefault(value, []).append(worker)
