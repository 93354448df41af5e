"""Routes: the sender and the takers of each value of a program, read off the program.

A worker that makes a value on the wire sends it to every other worker that needs it from there. So an action does not
name its peer, and in a plan after a failure any worker may send a value that it holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.core.action import OP_TABLE, Action, Program
from engine.core.op_row import Where
from engine.core.ownership import Ownership
from engine.core.program.dependencies import makes, needs
from engine.core.value import WIRE, Kind, Value

# Votes go to the agent.
_SENT = {term.kind for row in OP_TABLE.values() for term in row.makes if term.at is Where.WIRE} - {Kind.VOTED}


@dataclass(frozen=True, slots=True)
class Routes:
    """One worker's share of the transfers of a program."""

    targets: dict[Value, tuple[int, ...]] = field(
        default_factory=dict
    )  # of the values that this worker sends, in order
    sources: dict[Value, int] = field(default_factory=dict)  # of the values that it takes from the wire


def crosses(value: Value, ownership: Ownership) -> bool:
    """Whether the slots that make and use an activation or a gradient have different owners."""
    kind, pipeline, stage, _ = value
    following = stage + 1 if kind is Kind.ACTIVATION else stage - 1
    return ownership.owner(pipeline, stage) != ownership.owner(pipeline, following)


def routes_of(worker: int, program: Program, ownership: Ownership) -> Routes:
    """Returns the targets of the sends of `worker` and the sources of its receives; every value has one sender."""
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
