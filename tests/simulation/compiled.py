"""Programs in the form in which the simulated workers run them: small tuples of numbers, with peers filled in.

The routes of values are found here once for all workers, from the effects of actions and not by the engine's rule.
`tests/simulation/test_simulation.py` compares them with the engine's routes, so an error in one of them shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any, NamedTuple

from engine.core.action import LEAVE_OPS, RECEIVE_OPS, SEND_OPS, SHARD_OPS, STASH_OPS, Action, Op, Program
from engine.core.ownership import Ownership, Slot
from engine.core.program.dry_run import stash_of
from engine.core.program.offload import line_with_offloads
from engine.core.value import Kind, Value
from tests.simulation.case import Violation

ACTIVATION, GRADIENT, RESIDUAL, STATE, REDUCED, LOGGED, PART, STREAMED, PENDING, SHARD, CARRY = range(11)
KINDS = {
    Kind.ACTIVATION: ACTIVATION,
    Kind.GRADIENT: GRADIENT,
    Kind.RESIDUAL: RESIDUAL,
    Kind.STATE: STATE,
    Kind.REDUCED: REDUCED,
    Kind.LOGGED: LOGGED,
    Kind.STREAMED: STREAMED,
    Kind.PENDING: PENDING,
    Kind.CARRY: CARRY,
}
NOTHING = -1
# Codes of actions; computations first, because they take time.
FORWARD, REDO, BACKWARD, INPUT, WEIGHTS, SEND, RECEIVE, GIVE, HEAL, REDUCE = range(10)
MAKE_LOG, TAKE_LOG, VOTE, STREAM, TAKE_STREAM, HAND, TAKE_HAND, UNSHARD, RESHARD, SHIP, TAKE_SHIP, OFFLOAD, RELOAD = (
    range(10, 23)
)
COMPUTE = WEIGHTS
POINT_OF = (
    "F",
    "f",
    "B",
    "I",
    "W",
    "",
    "",
    "HEAL",
    "HEAL",
    "REDUCE_GRAD",
    "LOG",
    "LOG",
    "COMMIT",
    *("STREAM",) * 4,
    "UNSHARD",
    "RESHARD",
    *("STREAM",) * 2,
    "OFFLOAD",
    "RELOAD",
)
NAMES = (
    "F",
    "f",
    "B",
    "I",
    "W",
    "SEND",
    "RECV",
    "HEAL (gives)",
    "HEAL (takes)",
    "REDUCE_GRAD",
    "LOG",
    "LOG (takes)",
    "COMMIT",
    "STREAM",
    "STREAM (takes)",
    "HAND",
    "HAND (takes)",
    "UNSHARD",
    "RESHARD",
    "SHIP",
    "SHIP (takes)",
    "OFFLOAD",
    "RELOAD",
)
VALUES = (
    *("activation", "gradient", "residual", "state", "reduced gradient", "log", "share of the reduction", "stream"),
    *("pending", "shard", "carry"),
)
CARRIED = (TAKE_STREAM, TAKE_HAND)
OPS = {FORWARD: Op.F, BACKWARD: Op.B, WEIGHTS: Op.W, STREAM: Op.STREAM, TAKE_STREAM: Op.STREAM} | {
    code: op for op, codes in ((Op.HAND, (HAND, TAKE_HAND)), (Op.SHIP, (SHIP, TAKE_SHIP))) for code in codes
}  # of the codes whose actions have a part in the sums of a slot
_COMPUTE = {Op.F: FORWARD, Op.REDO_F: REDO, Op.B: BACKWARD, Op.I: INPUT, Op.W: WEIGHTS}
_COMPUTE |= {op: OFFLOAD if op in LEAVE_OPS else RELOAD for op in STASH_OPS}  # beside computing


def key_of(kind: int, pipeline: int, stage: int, index: int = 0) -> int:
    """Returns the number of a value."""
    return kind << 36 | pipeline << 24 | stage << 12 | index


def parts_of(key: int) -> tuple[int, int, int, int]:
    """Returns kind, pipeline, stage and index of a value."""
    return key >> 36, key >> 24 & 4095, key >> 12 & 4095, key & 4095


class Compiled(NamedTuple):
    """One worker's share of a program."""

    actions: tuple[tuple[Any, ...], ...]
    steps: tuple[Slot, ...]  # the replicas that take the optimizer step
    line: tuple[Action, ...] = ()  # of which they were made


class _Routes:
    def __init__(self) -> None:
        self.sender: dict[int, int] = {}
        self.takers: dict[int, list[int]] = {}

    def sends(self, worker: int, key: int) -> None:
        if self.sender.setdefault(key, worker) != worker:
            raise Violation(f"{parts_of(key)} is sent by worker {self.sender[key]} and by worker {worker}")

    def takes(self, worker: int, key: int) -> None:
        self.takers.setdefault(key, []).append(worker)

    def targets(self, worker: int, key: int) -> tuple[int, ...]:
        return tuple(dict.fromkeys(each for each in self.takers.get(key, ()) if each != worker))

    def source(self, key: int) -> int:
        if key not in self.sender:
            raise Violation(f"nobody sends {parts_of(key)}")
        return self.sender[key]


def compiled(program: Program, ownership: Ownership) -> dict[int, Compiled]:
    """Returns every worker's share of a program."""
    routes = routed(program, ownership)
    found = {}
    for worker, actions in program.items():
        done = tuple(_compiled(action, worker, ownership, routes) for action in actions if action.op is not Op.STEP)
        done = _numbered(done)
        if any(action.op is Op.STEP for action in actions[: len(done)]):
            raise Violation(f"worker {worker} steps before its last vote")
        votes = [place for place, each in enumerate(done) if each[0] == VOTE]
        if votes and votes != [*range(votes[0], len(done))]:
            raise Violation(f"worker {worker} does something else between its first vote and its last")
        steps = tuple((each.pipeline, each.stage) for each in actions if each.op is Op.STEP)
        found[worker] = Compiled(done, steps, actions)
    return found


def with_copies(
    share: Compiled, ownership: Ownership, copy_time: float, here: Collection[int], away: Collection[int]
) -> tuple[tuple[Any, ...], ...]:
    """Returns the actions of a plan with the copies of residuals to the host and back, as workers add them."""
    others = iter(share.actions)
    stashes = ([_stash(key) for key in keys] for keys in (here, away))
    line = line_with_offloads(share.line, copy_time, ownership.grid.slices, *stashes)
    return tuple(
        _computed(action, ownership) if action.op in STASH_OPS else next(others)
        for action in line
        if action.op is not Op.STEP
    )


def _stash(key: int) -> Value:
    kind, *at = parts_of(key)
    return Value(Kind.RESIDUAL if kind == RESIDUAL else Kind.PENDING, *at)


def carried_key(action: Action) -> int:
    """Returns the number of the value in a transfer."""
    stage, op, microbatch, pipeline = action
    if op is Op.SEND_F or op is Op.RECV_F:
        return key_of(ACTIVATION, pipeline, stage - (op is Op.RECV_F), microbatch)
    return key_of(GRADIENT, pipeline, stage + (op is Op.RECV_B), microbatch)


def routed(program: Program, ownership: Ownership) -> _Routes:
    """Returns the sender and the receivers of each value."""
    routes = _Routes()
    for worker, actions in program.items():
        for action in actions:
            stage, op, _, pipeline = action
            if op in SEND_OPS:
                routes.sends(worker, carried_key(action))
            elif op in RECEIVE_OPS:
                routes.takes(worker, carried_key(action))
            elif op is Op.REDUCE_GRAD:
                for each in ownership.pipelines_of(worker, stage):
                    routes.sends(worker, key_of(REDUCED, each, stage))
            elif op in _TO_REPLICAS:
                key = _key_to_replicas(action)
                if not _gives(action, worker, ownership):
                    routes.takes(worker, key)
                    continue
                routes.sends(worker, key)
                if op is Op.LOG:
                    for other in ownership.grid.tied_to(stage):
                        if ownership.owner(pipeline, other) != worker:
                            routes.takes(worker, key_of(REDUCED, pipeline, other))
    return routes


_TO_REPLICAS = {Op.HEAL: STATE, Op.LOG: LOGGED, Op.STREAM: STREAMED, Op.HAND: STREAMED, Op.SHIP: RESIDUAL}


_CARRYING = {Op.STREAM: (STREAM, TAKE_STREAM), Op.HAND: (HAND, TAKE_HAND), Op.SHIP: (SHIP, TAKE_SHIP)}


def _gives(action: Action, worker: int, ownership: Ownership) -> bool:
    """Whether a worker sends the value: the owner of its slot, save for what the owner gets of a worker that leaves."""
    return (ownership.owner(action.pipeline, action.stage) == worker) is (action.op not in (Op.HAND, Op.SHIP))


def _key_to_replicas(action: Action) -> int:
    """Returns the number of the value that goes from a replica of a slot to others."""
    return key_of(_TO_REPLICAS[action.op], action.pipeline, action.stage, max(0, action.microbatch))


def _compiled(action: Action, worker: int, ownership: Ownership, routes: _Routes) -> tuple[Any, ...]:
    if action.op in _COMPUTE:
        return _computed(action, ownership)
    if action.op in SEND_OPS:
        key = carried_key(action)
        return SEND, key, routes.targets(worker, key)
    if action.op in RECEIVE_OPS:
        key = carried_key(action)
        return RECEIVE, key, routes.source(key)
    if action.op is Op.REDUCE_GRAD:
        stage = action.stage
        mine = ownership.pipelines_of(worker, stage)
        owners = tuple(ownership.owner(each, stage) for each in range(ownership.grid.pipelines))
        sends = tuple((each, routes.targets(worker, key_of(REDUCED, each, stage))) for each in mine)
        return REDUCE, stage, mine, owners, sends
    if action.op in SHARD_OPS:
        stage, mine = action.stage, ownership.pipelines_of(worker, action.stage)
        owners = tuple(ownership.owner(each, stage) for each in range(ownership.grid.pipelines))
        return (UNSHARD, stage, mine, owners) if action.op is Op.UNSHARD else (RESHARD, stage)
    return _of_replica(action, worker, ownership, routes)


def _numbered(actions: tuple[tuple[Any, ...], ...]) -> tuple[tuple[Any, ...], ...]:
    """Returns actions whose gathers of a stage have a number each, so that their messages are told apart."""
    if not any(action[0] == UNSHARD for action in actions):
        return actions
    counts = Counter[int]()
    found = []
    for action in actions:
        if action[0] == UNSHARD:
            found.append((*action, counts[action[1]]))
            counts[action[1]] += 1
        else:
            found.append(action)
    return tuple(found)


def _computed(action: Action, ownership: Ownership) -> tuple[Any, ...]:
    stage, op, microbatch, pipeline = action
    code = _COMPUTE[op]
    if op in STASH_OPS:
        return code, key_of(KINDS[stash_of(action).kind], pipeline, stage, microbatch)
    if code == WEIGHTS:
        return (
            code,
            (pipeline, stage),
            microbatch,
            NOTHING,
            NOTHING,
            key_of(PENDING, pipeline, stage, microbatch),
            False,
        )
    made = key_of(ACTIVATION if code <= REDO else GRADIENT, pipeline, stage, microbatch)
    slices, number = ownership.grid.slices, microbatch % ownership.grid.slices
    opposite = microbatch + slices - 1 - 2 * number  # the backward of the last slice comes first
    kept = key_of(RESIDUAL, pipeline, stage, microbatch if code <= REDO else opposite)
    given = NOTHING
    following = stage + 1 if code <= REDO else stage - 1
    goes_elsewhere = 0 <= following < ownership.grid.stages and ownership.owner(pipeline, following) != ownership.owner(
        pipeline, stage
    )
    if code <= REDO and stage > 0:
        given = key_of(ACTIVATION, pipeline, stage - 1, microbatch)
    elif code > REDO and stage < ownership.grid.stages - 1:
        given = key_of(GRADIENT, pipeline, stage + 1, microbatch)
    return code, (pipeline, stage), microbatch, given, made, kept, goes_elsewhere


def _of_replica(action: Action, worker: int, ownership: Ownership, routes: _Routes) -> tuple[Any, ...]:
    stage, op, microbatch, pipeline = action
    slot = (pipeline, stage)
    owns = ownership.owner(*slot) == worker
    if op in _CARRYING:
        key, gives, takes = _key_to_replicas(action), *_CARRYING[op]
        if _gives(action, worker, ownership):
            return gives, slot, microbatch, key, routes.targets(worker, key)
        return takes, slot, microbatch, key, routes.source(key)
    if op is Op.HEAL:
        key = key_of(STATE, *slot)
        return (GIVE, slot, key, routes.targets(worker, key)) if owns else (HEAL, slot, key, routes.source(key))
    if op is Op.LOG:
        key = key_of(LOGGED, *slot)
        if not owns:
            return TAKE_LOG, slot, key, routes.source(key)
        return MAKE_LOG, slot, key, routes.targets(worker, key), _uses(slot, worker, ownership, routes)
    assert op is Op.COMMIT, f"the simulation does not know {action}"
    return VOTE, slot, owns


def _uses(slot: Slot, worker: int, ownership: Ownership, routes: _Routes) -> tuple[tuple[int, int, int], ...]:
    """Returns (stage, key, sender) of every use of a stage's shared parameters; empty if it shares none.

    A local value has no sender. A log that is only sent again reads no values, so there may be no sender either.
    """
    pipeline, stage = slot
    others = ownership.grid.tied_to(stage)
    if not others:
        return ()
    uses = []
    for use in sorted((stage, *others)):
        key = key_of(REDUCED, pipeline, use)
        here = ownership.owner(pipeline, use) == worker
        uses.append((use, key, NOTHING if here else routes.sender.get(key, NOTHING)))
    return tuple(uses)
