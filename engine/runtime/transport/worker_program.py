"""One worker's part of a program, with the routes, receives and keys that are computed before its first action.

It is a pure function of program and ownership, so that a background thread can compute it in advance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from engine.core.action import RECEIVE_OPS, SEND_OPS, Action, Op, Program
from engine.core.ownership import Ownership, Slot
from engine.core.program.dependencies import carried
from engine.core.program.issue_order import issued_by
from engine.core.program.routes import Routes, routes_of
from engine.runtime.transport.tensor_spec import Border
from engine.runtime.transport.transfer_key import Issued, ProgramKey, carrier_key, value_key
from engine.runtime.transport.transfers import Receive, border_of_value, receives_of


@dataclass(frozen=True, slots=True)
class WorkerProgram:
    """The actions of one worker in a program, in order, with their transfers."""

    ownership: Ownership
    owned: frozenset[Slot]
    actions: tuple[tuple[Action, str], ...]  # (action, its text)
    routes: Routes
    receives: Sequence[Receive[ProgramKey]]
    targets: Mapping[Action, tuple[tuple[int, ...], ProgramKey]]  # send -> (target workers, key)
    next_forwards: Mapping[Action, Action]
    issued: tuple[Issued, ...]  # its transfers, in the order for a backend without tags, if that was asked for
    is_awaited: bool  # it begins with an own forward: the other workers wait for its first SEND

    def received_bytes(self) -> set[int]:
        """Returns the sizes of the tensors in the messages that it receives."""
        return {spec.num_bytes for receive in self.receives for spec in receive.border}


def worker_program(
    worker: int, program: Program, ownership: Ownership, borders: Sequence[Border], *, has_tags: bool = True
) -> WorkerProgram:
    """Returns the part of `worker` in the program of all workers; a backend without tags needs the order of all."""
    actions = program.get(worker, ())
    routes = routes_of(worker, program, ownership)
    owned = frozenset(ownership.slots_of(worker))
    key_of = partial(carrier_key, ownership.grid)
    return WorkerProgram(
        ownership,
        owned,
        tuple((action, str(action)) for action in actions),
        routes,
        receives_of(actions, routes, borders, key_of),
        {
            action: (routes.targets.get(carried(action), ()), key_of(action))
            for action in actions
            if action.op in SEND_OPS
        },
        _next_forwards(actions),
        () if has_tags else _issued(worker, program, ownership, borders),
        bool(actions) and actions[0].op is Op.F and (actions[0].pipeline, actions[0].stage) in owned,
    )


def _issued(worker: int, program: Program, ownership: Ownership, borders: Sequence[Border]) -> tuple[Issued, ...]:
    ends = []
    for value, source, target in issued_by(worker, program, ownership):
        peer = target if source == worker else source
        border = border_of_value(value, borders)
        ends.append(Issued(source == worker, peer, value_key(ownership.grid, value), border))
    return tuple(ends)


def _next_forwards(actions: Sequence[Action]) -> dict[Action, Action]:
    """Returns for each receive the next forward behind it in the list, which may belong to another value."""
    found: dict[Action, Action] = {}
    forward = None
    for action in reversed(actions):
        if action.op is Op.F:
            forward = action
        elif action.op in RECEIVE_OPS and forward is not None:
            found[action] = forward
    return found
