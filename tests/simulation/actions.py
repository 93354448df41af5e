"""Runs the actions of a simulated worker: one function for each op, which returns whether the action is done.

Rules: a worker that lacks an input which no transfer will bring has a wrong program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from engine.core.program.ballot import SlotVote, VoteMessage
from tests.simulation import provenance
from tests.simulation.case import Violation
from tests.simulation.compiled import (
    BACKWARD,
    CARRIED,
    CARRY,
    FORWARD,
    HEAL,
    MAKE_LOG,
    NOTHING,
    OFFLOAD,
    PART,
    PENDING,
    REDO,
    REDUCE,
    REDUCED,
    RESIDUAL,
    SHARD,
    TAKE_LOG,
    UNSHARD,
    VOTE,
    key_of,
    parts_of,
)
from tests.simulation.replica import Replica, tell_hashes

if TYPE_CHECKING:
    from tests.simulation.executor import Executor

Action = tuple[Any, ...]


def perform(worker: Executor, action: Action) -> bool:
    """Runs an action; returns whether it is done. If not, the worker waits for a transfer."""
    return _DO[action[0]](worker, action)


def _replica(worker: Executor, slot: tuple[int, int]) -> Replica:
    replica = worker.replicas.get(slot)
    if replica is None or replica.version != worker.step:
        raise Violation(f"worker {worker.number} has no whole replica of {slot} in step {worker.step}")
    return replica


def _use(worker: Executor, key: int) -> int:
    """Returns a value that an action reads; it is dropped with its use, unless it was made here and goes elsewhere."""
    if key not in worker.values:
        raise Violation(f"worker {worker.number} in step {worker.step} lacks {parts_of(key)}")
    kept = worker.retains and key in worker.lasting
    value: int = worker.values[key] if kept else worker.values.pop(key)
    return value


def _keep(worker: Executor, key: int, value: Any, goes_elsewhere: bool = False) -> None:
    worker.values[key] = value
    if goes_elsewhere:
        worker.lasting.add(key)


def _whole(worker: Executor, slot: tuple[int, int]) -> Replica:
    if worker.case.fsdp and slot[1] not in worker.whole:
        raise Violation(f"worker {worker.number} computes slot {slot} with a shard of its weights")
    return _replica(worker, slot)


def _copy(worker: Executor, action: Action) -> bool:
    """Copies a residual to the host or back."""
    code, key = action
    leaves = code == OFFLOAD
    if key not in worker.values or leaves is (key in worker.away):
        place = "on the host" if key in worker.away else "on the device" if key in worker.values else "nowhere"
        raise Violation(f"worker {worker.number} copies {parts_of(key)}, which is {place}")
    (worker.away.add if leaves else worker.away.remove)(key)
    worker.world.turns.add("residual leaves for the host" if leaves else "residual comes back")
    return True


def _on_device(worker: Executor, key: int) -> None:
    if key in worker.away:
        raise Violation(f"worker {worker.number} uses {parts_of(key)}, which is on the host")


def _forward(worker: Executor, action: Action) -> bool:
    code, slot, microbatch, source, made, kept, goes_elsewhere = action
    replica = _whole(worker, slot)
    given = provenance.data(worker.step, slot[0], microbatch) if source == NOTHING else _use(worker, source)
    before = replica.buffers_before(microbatch)
    inputs = given, *_states(worker, slot, microbatch)
    output = provenance.activation(replica.weights, before, *inputs)
    if code == FORWARD:
        if replica.logged is not None:
            worker.world.turns.add("forward of a logged slot counts")
        replica.count_forward(microbatch, given)
        if slot[1] == worker.case.stages - 1:
            replica.losses = provenance.lost(replica.losses, output)
    else:
        worker.world.turns.add("forward is redone")
        if microbatch >= replica.counted:
            raise Violation(f"forward {microbatch} of slot {slot} is redone and has not counted")
    _keep(worker, made, output, goes_elsewhere)
    _keep(worker, kept, provenance.residual(replica.weights, before, *inputs))
    worker.away.discard(kept)
    return True


def _states(worker: Executor, slot: tuple[int, int], microbatch: int) -> tuple[int, ...]:
    """Returns the states that a slice reads: the residual of the slice before, which stays; of the first one none."""
    if microbatch % worker.case.slices == 0:
        return ()
    key = key_of(RESIDUAL, *slot, microbatch - 1)
    _on_device(worker, key)
    if key not in worker.values:
        raise Violation(f"worker {worker.number} has no state for slice {microbatch} of slot {slot}")
    return (worker.values[key],)


def _carries(worker: Executor, slot: tuple[int, int], microbatch: int) -> tuple[int, ...]:
    """Returns the gradients of the states behind a slice, which are used once; of the last slice there are none."""
    if microbatch % worker.case.slices == 0:
        return ()
    key = key_of(CARRY, *slot, microbatch - 1)
    if key not in worker.values:
        raise Violation(f"worker {worker.number} has no gradient of the state for backward {microbatch} of slot {slot}")
    return (worker.values.pop(key),)


def _backward(worker: Executor, action: Action) -> bool:
    code, slot, microbatch, source, made, kept, goes_elsewhere = action
    replica = _whole(worker, slot)
    if kept not in worker.values:
        raise Violation(f"worker {worker.number} has no residual for {code} {microbatch} of slot {slot}")
    _on_device(worker, kept)
    memory = worker.values.pop(kept)
    given = 0 if source == NOTHING else _use(worker, source)
    inputs = given, *_carries(worker, slot, microbatch)
    if code == BACKWARD:
        replica.add_backward(microbatch, memory, *inputs)
    elif microbatch < replica.added or replica.logged is not None:
        worker.world.turns.add("backward is redone")
    else:
        pending = key_of(PENDING, slot[0], slot[1], microbatch)
        _keep(worker, pending, (memory, *inputs))
        worker.away.discard(pending)
    _keep(worker, made, provenance.gradient(memory, *inputs), goes_elsewhere)
    if (microbatch + 1) % worker.case.slices:
        _keep(worker, key_of(CARRY, slot[0], slot[1], microbatch), provenance.carry(memory, *inputs))
    return True


def _weights(worker: Executor, action: Action) -> bool:
    """The part of a backward for the weights: it adds the same gradient as the whole backward."""
    _, slot, microbatch, _, _, pending, _ = action
    if pending not in worker.values:
        raise Violation(f"worker {worker.number} in step {worker.step} lacks {parts_of(pending)}")
    _on_device(worker, pending)
    _whole(worker, slot).add_backward(microbatch, *worker.values.pop(pending))
    return True


def _send(worker: Executor, action: Action) -> bool:
    _, key, targets = action
    if key not in worker.values:
        raise Violation(f"worker {worker.number} in step {worker.step} sends {parts_of(key)}, which it lacks")
    if not targets:
        raise Violation(f"worker {worker.number} sends {parts_of(key)} to nobody")
    _send_to(worker, targets, key, worker.values[key])
    if not worker.retains:
        del worker.values[key]
    return True


def _send_to(worker: Executor, targets: tuple[int, ...], key: int, payload: Any) -> None:
    for target in targets:
        worker.world.links.send(worker, target, key, payload)


def _receive(worker: Executor, action: Action) -> bool:
    _, key, source = action
    payload = worker.take(key, source)
    if payload is None:
        return False
    if worker.values.setdefault(key, payload) != payload:
        raise Violation(f"worker {worker.number} has received another {parts_of(key)} than it holds")
    return True


def _give(worker: Executor, action: Action) -> bool:
    _, slot, key, targets = action
    _send_to(worker, targets, key, healing(_replica(worker, slot)))
    return True


def healing(replica: Replica) -> tuple[Any, ...]:
    """Returns the payload of a heal."""
    return replica.version, replica.state()


def _heal(worker: Executor, action: Action) -> bool:
    _, slot, key, source = action
    payload = worker.take(key, source)
    if payload is None:
        return False
    version, state = payload
    worker.replicas[slot] = Replica(slot, version, *state)
    tell_hashes(worker, slot)
    worker.world.turns.add("shadow is healed")
    return True


def _reduce(worker: Executor, action: Action) -> bool:
    """Each owner sends its part to all others, and adds all parts in the order of pipelines."""
    _, stage, mine, owners, sends = action
    if worker.parted != worker.cursor:
        worker.parted = worker.cursor
        for pipeline in mine:
            part = _replica(worker, (pipeline, stage)).part(worker.case.microbatches)
            others = tuple(dict.fromkeys(each for each in owners if each != worker.number))
            _send_to(worker, others, key_of(PART, pipeline, stage), part)
    keys = [(key_of(PART, pipeline, stage), owner) for pipeline, owner in enumerate(owners) if owner != worker.number]
    if not _all_there(worker, keys):
        return False
    taken = {key: worker.take(key, owner) for key, owner in keys}
    parts = [
        taken.get(key_of(PART, each, stage)) or worker.replicas[each, stage].part(worker.case.microbatches)
        for each in range(len(owners))
    ]
    worker.reduced[stage] = reduction(parts, owners)
    for pipeline, targets in sends:
        _send_to(worker, targets, key_of(REDUCED, pipeline, stage), worker.reduced[stage][0])
    return True


def _unshard(worker: Executor, action: Action) -> bool:
    """Each owner sends the shards of its slots to all others, and must get those of the same step."""
    _, stage, mine, owners, number = action
    if worker.parted != worker.cursor:
        worker.parted = worker.cursor
        for pipeline in mine:
            replica = _replica(worker, (pipeline, stage))
            others = tuple(dict.fromkeys(each for each in owners if each != worker.number))
            _send_to(worker, others, key_of(SHARD, pipeline, stage, number), (replica.version, replica.weights))
    awaited = list(inputs_of(action, worker.number).items())
    if not _all_there(worker, awaited):
        return False
    here = _replica(worker, (mine[0], stage))
    for key, owner in awaited:
        if worker.take(key, owner) != (here.version, here.weights):
            raise Violation(f"worker {worker.number} gathers stage {stage} from shards of several steps")
    worker.whole.add(stage)
    return True


def _reshard(worker: Executor, action: Action) -> bool:
    worker.whole.remove(action[1])
    return True


def reduction(parts: list[Any], owners: tuple[int, ...]) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Returns the sum in the order of pipelines, and the buffers and the losses of all of them."""
    sums, buffers, losses = zip(*parts, strict=True)
    return provenance.summed(sums), buffers, losses


def inputs_of(action: Action, worker: int) -> dict[int, int]:
    """Returns the transfers that an action waits for beside those of a program, each with its source."""
    code = action[0]
    if code in (HEAL, TAKE_LOG):
        return {action[2]: action[3]}
    if code == MAKE_LOG:
        return {key: source for _, key, source in action[4] if source != NOTHING}
    if code == UNSHARD:
        _, stage, _, owners, number = action
        return {key_of(SHARD, each, stage, number): owner for each, owner in enumerate(owners) if owner != worker}
    if code == REDUCE:
        owners = enumerate(action[3])
        return {key_of(PART, pipeline, action[1]): owner for pipeline, owner in owners if owner != worker}
    return {}


def _all_there(worker: Executor, keys: list[tuple[int, int]]) -> bool:
    for key, source in keys:
        if key not in worker.inbox:
            if source in worker.broken:
                worker.transfer_failed(source)
            return False
    return True


def _make_log(worker: Executor, action: Action) -> bool:
    _, slot, key, targets, uses = action
    replica = _replica(worker, slot)
    stage = slot[1]
    if stage in worker.reduced:
        others = [(other, source) for _, other, source in uses if source != NOTHING]
        if not _all_there(worker, others):
            return False
        final, buffers, losses = worker.reduced[stage]
        if uses:
            final = provenance.summed(tuple(_reduced_use(worker, use) for use in uses))
        replica.logged = (final, buffers, losses)
    elif replica.logged is not None:
        worker.world.turns.add("log is sent again")
    else:
        raise Violation(f"worker {worker.number} logs slot {slot} without its reduced gradient")
    _send_to(worker, targets, key, replica.logged)
    return True


def _reduced_use(worker: Executor, use: tuple[int, int, int]) -> int:
    stage, key, source = use
    if source != NOTHING:
        taken: int = worker.take(key, source)
        return taken
    if stage not in worker.reduced:
        raise Violation(f"worker {worker.number} lacks the gradient of stage {stage}, which it shares")
    own: int = worker.reduced[stage][0]
    return own


def _take_log(worker: Executor, action: Action) -> bool:
    _, slot, key, source = action
    payload = worker.take(key, source)
    if payload is None:
        return False
    _replica(worker, slot).logged = payload
    return True


def _stream(worker: Executor, action: Action) -> bool:
    _, slot, microbatch, key, targets = action
    _send_to(worker, targets, key, _replica(worker, slot).stream(microbatch))
    return True


def _take_stream(worker: Executor, action: Action) -> bool:
    _, slot, _, key, source = action
    payload = worker.take(key, source)
    if payload is None:
        return False
    _replica(worker, slot).take_stream(payload)
    worker.world.turns.add("stream is taken")
    return True


def _ship(worker: Executor, action: Action) -> bool:
    _, slot, microbatch, key, targets = action
    if key not in worker.values:
        raise Violation(f"worker {worker.number} sends {parts_of(key)}, which it lacks")
    _send_to(worker, targets, key, (worker.values[key], _replica(worker, slot).after(microbatch)))
    return True


def _take_ship(worker: Executor, action: Action) -> bool:
    _, slot, microbatch, key, source = action
    payload = worker.take(key, source)
    if payload is None:
        return False
    kept, after = payload
    _replica(worker, slot).take_forward(microbatch, after)
    _keep(worker, key, kept)
    worker.world.turns.add("residual is taken")
    return True


def take_arrived(worker: Executor) -> None:
    """Takes the streams that have arrived completely at the fence, for each slot up to the first gap."""
    missing = set()
    for action in worker.actions[worker.cursor :]:
        if action[0] in CARRIED and action[1] not in missing:
            if action[3] in worker.inbox:
                _take_stream(worker, action)
                worker.world.turns.add("stream is taken by the fence")
            else:
                missing.add(action[1])


def _vote(worker: Executor, action: Action) -> bool:
    _, slot, owns = action
    replica = _replica(worker, slot)
    if replica.logged is None:
        raise Violation(f"worker {worker.number} votes for slot {slot}, whose log it lacks")
    final, _, losses = replica.logged
    loss = provenance.loss(losses[slot[0]]) if owns and slot[1] == worker.case.stages - 1 else None
    norm = provenance.norm(final) if owns else None
    layers, norms = (() if norm is None else (slot[1],)), (() if norm is None else (norm,))
    worker.votes.append(SlotVote(slot[0], slot[1], layers, norms, loss))
    if all(each[0] != VOTE for each in worker.actions[worker.cursor + 1 :]):
        worker.world.say(worker.number, VoteMessage(worker.epoch, worker.step, tuple(worker.votes)))
    return True


_DO: tuple[Callable[[Executor, Action], bool], ...] = (
    *(_forward, _forward, _backward, _backward, _weights),
    *(_send, _receive, _give, _heal, _reduce, _make_log, _take_log, _vote, _stream, _take_stream),
    *(_stream, _take_stream),
    *(_unshard, _reshard, _ship, _take_ship, _copy, _copy),
)
assert REDO == 1, "the table stands in the order of the codes"
