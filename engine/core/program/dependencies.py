"""The happens-before rule: the values that an action needs and makes, and their places, read off the table of ops.

Verification, the dry run, the passes, the routes of transfers, the recovery planner and the tests all ask `needs` and
`makes`. No other module states the rule again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

from engine.core.action import (
    ALL,
    OP_TABLE,
    SEND_OPS,
    Action,
    By,
    Op,
    OpRow,
    Program,
    Slicing,
    StepPosition,
    Term,
    Where,
)
from engine.core.ownership import Ownership
from engine.core.value import WIRE, Held, Kind, Value

_new = tuple.__new__

# kind, whether it is here, stages further, microbatches further, what slices change
_Flat = tuple[Kind, bool, int, int, Slicing | None]


class _Terms(NamedTuple):
    """The terms of one op, by the role of the worker; `uneven` if a term stands for more or other values than one."""

    of_owner: tuple[_Flat, ...]
    of_shadow: tuple[_Flat, ...]
    uneven: tuple[Term, ...] = ()


def needs(action: Action, worker: int, ownership: Ownership) -> tuple[Held, ...]:
    """Returns the values that must be there before `worker` may run `action`, each with its place."""
    return _values(_NEEDS[action.op], action, worker, ownership)


def makes(action: Action, worker: int, ownership: Ownership) -> tuple[Held, ...]:
    """Returns the values that are there after `worker` has run `action`, each with its place."""
    return _values(_MAKES[action.op], action, worker, ownership)


def needed(action: Action, kind: Kind) -> Value:
    """Returns the value of a kind that an action needs, or would need if the pipeline went on there."""
    stage, op, microbatch, pipeline = action
    return _new(Value, (kind, pipeline, stage + _FURTHER[op, kind], microbatch))


def carried(action: Action) -> Value:
    """Returns the value that a SEND or RECV carries."""
    stage, op, microbatch, pipeline = action
    kind, further = _CARRIES[op]
    return _new(Value, (kind, pipeline, stage + further, microbatch))


def rendezvous(action: Action, worker: int, ownership: Ownership) -> tuple[tuple[int, Action], ...]:
    """Returns the actions of other workers that run together with this one: each waits until all have begun.

    A worker that owns the stage in several pipelines runs the action once, with the first of them.
    """
    if not OP_TABLE[action.op].meets:
        return ()
    return tuple(
        (other, Action(action.stage, action.op, pipeline=ownership.pipelines_of(other, action.stage)[0]))
        for other in ownership.owners_of(action.stage)
        if other != worker
    )


def _values(of: _Terms, action: Action, worker: int, ownership: Ownership) -> tuple[Held, ...]:
    terms, of_shadow, uneven = of
    if uneven:
        return tuple(_uneven(uneven, action, worker, ownership))
    stage, _, microbatch, pipeline = action
    if of_shadow is not terms and ownership.owner(pipeline, stage) != worker:
        terms = of_shadow
    values: list[Held] = []
    for kind, is_here, further, later, slicing in terms:
        if (not later or microbatch) and (not further or 0 <= stage + further < ownership.grid.stages):
            index = microbatch + later
            if slicing is Slicing.TURNED:
                index = ownership.grid.turned(microbatch)
            elif slicing and (ownership.grid.slices == 1 or (later and microbatch % ownership.grid.slices == 0)):
                continue
            value = _new(Value, (kind, pipeline, stage + further, index))
            values.append((worker if is_here else WIRE, value))
    return tuple(values)


def _uneven(terms: tuple[Term, ...], action: Action, worker: int, ownership: Ownership) -> Iterator[Held]:
    stage, op, _, first = action
    other_role = By.SHADOW if ownership.owner(first, stage) == worker else By.OWNER
    for pipeline in ownership.pipelines_of(worker, stage) if OP_TABLE[op].per_pipeline else (first,):
        for kind, at, _, later, by, _ in terms:
            if by is other_role:
                continue
            if at is Where.TIED:
                yield from _tied(kind, action, worker, ownership)
            elif at is Where.VOTERS:
                yield from _all_votes(ownership)
            else:
                index = worker if kind is Kind.VOTED else ownership.grid.microbatches - 1 if later == ALL else -1
                yield worker if at is Where.HERE else WIRE, Value(kind, pipeline, stage, index)


def _tied(kind: Kind, action: Action, worker: int, ownership: Ownership) -> list[Held]:
    pipeline = action.pipeline
    return [
        (worker if ownership.owner(pipeline, other) == worker else WIRE, Value(kind, pipeline, other))
        for other in ownership.grid.tied_to(action.stage)
    ]


@lru_cache(maxsize=8)  # the same for every STEP
def _all_votes(ownership: Ownership) -> tuple[Held, ...]:
    return tuple(
        (WIRE, Value(Kind.VOTED, *slot, replica))
        for slot in ownership.grid.slots()
        for replica in ownership.replicas(*slot)
    )


def _by_role(terms: tuple[Term, ...], row: OpRow) -> _Terms:
    if row.per_pipeline or any(each.at in (Where.TIED, Where.VOTERS) or each.kind is Kind.VOTED for each in terms):
        return _Terms((), (), terms)
    owner, shadow = (
        tuple(
            (term.kind, term.at is Where.HERE, term.stage, term.microbatch, term.slicing)
            for term in terms
            if term.by is not other
        )
        for other in (By.SHADOW, By.OWNER)
    )
    return _Terms(owner, owner if owner == shadow else shadow)


_FURTHER = {(op, term.kind): term.stage for op, row in OP_TABLE.items() for term in reversed(row.needs)}  # the first
_NEEDS = {op: _by_role(row.needs, row) for op, row in OP_TABLE.items()}
_MAKES = {op: _by_role(row.makes, row) for op, row in OP_TABLE.items()}
_NEED_ALL_VOTES = {op for op, row in OP_TABLE.items() if {term.at for term in row.needs} == {Where.VOTERS}}
_CARRIES = {
    op: (row.needs[0].kind, row.needs[0].stage) for op, row in OP_TABLE.items() if row.stands is StepPosition.BORDER
}
SENDS: dict[Kind, Op] = {_CARRIES[op][0]: op for op in SEND_OPS}  # by the kind that they carry
RECEIVES: dict[Kind, Op] = {_CARRIES[op][0]: op for op in _CARRIES.keys() - SEND_OPS}

# The happens-before rule in numbers, for walks over programs of a million actions.
#
# The numbers are read off `needs`, `makes` and `rendezvous`. The actions of one op on one slot of one worker need and
# make the same values, further by the microbatch; the first microbatch may need fewer. So the rule is asked twice for
# all of them, and the rest is an addition: the values of one place, kind and slot have successive numbers. In a step of
# slices it is asked for each slice of a microbatch.
#
#     1F0  needs 40     makes 80 120 160     activation 0 of stage 0 is 40, residual 0 of stage 1 is 120
#     1F3  needs 43 162 makes 83 123 163     1F3 also needs counter 2 of stage 1: 160 + 2

Thing = tuple[int, Value | Action]  # a value at a place, or an action that its worker has begun


class IndexedActions(NamedTuple):
    """The values that the actions of one op on one slot need and make: numbers, less the microbatch of the action.

    An action begins when all its `needs` are there. It then makes its `begins`, and runs when its `meets` are there.
    """

    needs: tuple[int, ...]
    begins: tuple[int, ...]
    meets: tuple[int, ...]
    makes: tuple[int, ...]


def line_number(microbatch: int, slices: int) -> int:
    """Returns the number of an action's line: microbatch 0 has one for itself, and so has each slice of the others."""
    return microbatch % slices if microbatch else -1


class DependencyIndex:
    """Gives a number below `len` to each value that was asked for."""

    def __init__(self, program: Mapping[int, tuple[Action, ...]], ownership: Ownership):
        self._ownership = ownership
        most = max(map(itemgetter(2), chain.from_iterable(program.values())), default=0)
        self._width = 2 + max(most, ownership.grid.microbatches)  # an index is -1 or more
        self._rows: dict[tuple[int, Kind | Op, int, int, int], int] = {}
        self._same: dict[tuple[Op, int], IndexedActions] = {}  # of ops that need all votes, by microbatch

    def __len__(self) -> int:
        return self._width * len(self._rows)

    def of(self, thing: Thing) -> int:
        """Returns the number of a thing."""
        place, content = thing
        if isinstance(content, Value):
            kind, pipeline, stage, index = content
            if kind is Kind.VOTED:  # a row as long as there are workers would be empty but for the voter
                return self._row(place, kind, pipeline, stage, index)
            return self._row(place, kind, pipeline, stage) + index
        stage, op, index, pipeline = content
        return self._row(place, op, pipeline, stage) + index

    def _row(self, place: int, kind: Kind | Op, pipeline: int, stage: int, voter: int = -1) -> int:
        return self._rows.setdefault((place, kind, pipeline, stage, voter), len(self._rows)) * self._width + 1

    def thing(self, number: int) -> Thing:
        """Returns the thing that has a number."""
        row, above = divmod(number, self._width)
        place, kind, pipeline, stage, voter = list(self._rows)[row]
        if isinstance(kind, Kind):
            return place, Value(kind, pipeline, stage, voter if kind is Kind.VOTED else above - 1)
        return place, Action(stage, kind, above - 1, pipeline)

    def line(self, action: Action, worker: int) -> IndexedActions:
        """Returns the line of a worker's actions that differ from `action` in the microbatch alone (`line_number`)."""
        key = action.op, action.microbatch
        if key in self._same:
            return self._same[key]
        needed, made = needs(action, worker, self._ownership), makes(action, worker, self._ownership)
        met: tuple[Thing, ...] = rendezvous(action, worker, self._ownership)
        begun: tuple[Thing, ...] = ((worker, action),) if met else ()

        def numbers(things: Iterable[Thing]) -> tuple[int, ...]:
            return tuple(self.of(thing) - action.microbatch for thing in things)

        line = IndexedActions(numbers(needed), numbers(begun), numbers(met), numbers(made))
        if action.op in _NEED_ALL_VOTES:
            self._same[key] = line
        return line


# Routes: the sender and the takers of each value of a program, read off the program.
#
# A worker that makes a value on the wire sends it to every other worker that needs it from there. So an action does not
# name its peer, and in a plan after a failure any worker may send a value that it holds.


# Votes go to the agent.
_SENT = {term.kind for row in OP_TABLE.values() for term in row.makes if term.at is Where.WIRE} - {Kind.VOTED}


def _is_elsewhere(term: Term) -> bool:
    return term.kind in _SENT and term.at is not Where.HERE


_MAKE_SENT = {op for op, row in OP_TABLE.items() if any(map(_is_elsewhere, row.makes))}
_NEED_SENT = {op for op, row in OP_TABLE.items() if any(map(_is_elsewhere, row.needs))}


@dataclass(frozen=True, slots=True)
class Routes:
    """One worker's share of a program's transfers: targets of the values that it sends, sources of those it takes."""

    targets: dict[Value, tuple[int, ...]] = field(default_factory=dict)
    sources: dict[Value, int] = field(default_factory=dict)


def crosses(value: Value, ownership: Ownership) -> bool:
    """Whether the slots that make and use an activation or a gradient have different owners."""
    kind, pipeline, stage, _ = value
    place, owners = pipeline * ownership.grid.stages + stage, ownership.owners
    return owners[place] != owners[place + 1 if kind is Kind.ACTIVATION else place - 1]


def peers_of(worker: int, ownership: Ownership) -> tuple[int, ...]:
    """Returns `worker` and all that it exchanges values with in a step of owners and shadows, in order.

    They own the slots beside its own, have replicas of its slots, or own stages that share a parameter with one of its
    own. In a plan, where any member may send what it held, there may be more.
    """
    grid, owned = ownership.grid, ownership.slots_of(worker)
    beside = {(d, stage + more) for d, stage in owned for more in (-1, 1) if 0 <= stage + more < grid.stages}
    beside |= {(d, other) for d, stage in owned for other in grid.tied_to(stage)}
    replicas = {replica for slot in ownership.held_by(worker) for replica in ownership.replicas(*slot)}
    return tuple(sorted({worker, *replicas, *(ownership.owner(*slot) for slot in beside)}))


def peers_program(worker: int, program: Program, ownership: Ownership) -> Program:
    """Returns the programs of `worker` and its peers."""
    return {peer: program[peer] for peer in peers_of(worker, ownership) if peer in program}


def routes_of(worker: int, program: Program, ownership: Ownership) -> Routes:
    """Returns the targets of the sends of `worker` and the sources of its receives; every value has one sender."""
    senders: dict[Value, int] = {}
    receivers: dict[Value, list[int]] = {}
    for peer, actions in program.items():
        for action in actions:  # most of them neither send nor take, which is cheaper to see by their op
            if action.op in _MAKE_SENT:
                for place, value in makes(action, peer, ownership):
                    if place == WIRE and value.kind in _SENT:
                        senders[value] = peer
            if action.op in _NEED_SENT:
                for place, value in needs(action, peer, ownership):
                    if place == WIRE and value.kind in _SENT:
                        receivers.setdefault(value, []).append(peer)
    targets = {
        value: tuple(dict.fromkeys(target for target in receivers.get(value, ()) if target != worker))
        for value, sender in senders.items()
        if sender == worker
    }
    sources = {value: senders[value] for value, takers in receivers.items() if worker in takers and value in senders}
    return Routes(targets, sources)
