"""A simulated replica of a slot, and the inventory of a worker."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from engine.core.messages import AuditMessage
from engine.core.ownership import Slot
from engine.core.program.inventory import Inventory, SavedResiduals, ValueRuns, to_json
from engine.core.value import Kind, Value
from tests.simulation import provenance
from tests.simulation.case import Violation
from tests.simulation.compiled import KINDS, parts_of

if TYPE_CHECKING:
    from tests.simulation.executor import Executor

_KINDS = {number: kind for kind, number in KINDS.items()}


Stream = tuple[
    int, int, tuple[tuple[int, int], ...]
]  # number of added gradients, their sum, buffers and losses before each


class Replica:
    """Weights, optimizer state and every pipeline's buffers as of the boundary, and the progress in the open step."""

    __slots__ = (
        *("slot", "version", "weights", "optimizer", "buffers"),
        *("running", "losses", "counted", "sums", "added", "logged", "forwards", "backwards", "befores"),
    )

    def __init__(self, slot: Slot, version: int, weights: int, optimizer: int, buffers: tuple[int, ...]):
        self.slot = slot
        self.version = version
        self.weights = weights
        self.optimizer = optimizer
        self.buffers = buffers
        self.begin()

    def begin(self) -> None:
        """Opens the next step."""
        self.running = self.buffers[self.slot[0]]
        self.losses = self.counted = self.sums = self.added = 0
        self.logged: tuple[int, tuple[int, ...], tuple[int, ...]] | None = None
        self.forwards: list[int] = []
        self.backwards: list[int] = []
        self.befores: list[tuple[int, int]] = []  # buffers and losses before each forward

    def state(self) -> tuple[int, int, tuple[int, ...]]:
        """Returns the state that a heal carries."""
        return self.weights, self.optimizer, self.buffers

    def take_step(self, clip: float) -> None:
        """Applies the optimizer step to the logged gradient."""
        if self.logged is None:
            raise Violation(f"a step of slot {self.slot} without its log")
        final, self.buffers, _ = self.logged
        self.weights, self.optimizer = provenance.stepped(self.weights, self.optimizer, final, clip)
        self.version += 1
        self.begin()

    def buffers_before(self, microbatch: int) -> int:
        """Returns the buffers that a forward reads, also after later forwards have counted."""
        if microbatch > self.counted:
            raise Violation(f"forward {microbatch} of slot {self.slot} where {self.counted} have been counted")
        return self.running if microbatch == self.counted else self.befores[microbatch][0]

    def count_forward(self, microbatch: int, given: int) -> None:
        """Counts a forward in the buffers; raises Violation if it is not the next."""
        if microbatch != self.counted:
            raise Violation(f"forward {microbatch} of slot {self.slot} after {self.counted} have been counted")
        self.counted += 1
        self.befores.append((self.running, self.losses))
        self.forwards.append(microbatch)
        self.running = provenance.counted(self.running, given)

    def add_backward(self, microbatch: int, kept: int, *given: int) -> None:
        """Adds a gradient to the accumulator; raises Violation if it is not the next."""
        if microbatch != self.added:
            raise Violation(f"backward {microbatch} of slot {self.slot} after {self.added} have been added")
        self.added += 1
        self.backwards.append(microbatch)
        self.sums = provenance.added(self.sums, kept, *given)

    def stream(self, microbatch: int) -> Stream:
        """Returns the accumulator after the backward of a microbatch, and the state before the next forward."""
        if self.added != microbatch + 1:
            raise Violation(f"slot {self.slot} streams {microbatch}, and {self.added} have been added")
        befores = (*self.befores, (self.running, self.losses))
        return self.added, self.sums, befores[: self.added + 1]

    def take_stream(self, stream: Stream) -> None:
        """Advances the replica to the state of its owner; never moves it back."""
        added, sums, befores = stream
        if added <= self.added:
            raise Violation(f"slot {self.slot} has added {self.added} and takes a stream of {added}")
        self.added, self.sums, self.backwards = added, sums, [*range(added)]
        if added > self.counted:
            self.counted, self.forwards = added, [*range(added)]
            *self.befores, (self.running, self.losses) = befores

    def after(self, microbatch: int) -> tuple[int, int]:
        """Returns the buffers and losses behind a forward."""
        return (*self.befores, (self.running, self.losses))[microbatch + 1]

    def take_forward(self, microbatch: int, after: tuple[int, int]) -> None:
        """Counts a forward that another replica has run, unless it has been counted."""
        if microbatch > self.counted:
            raise Violation(f"the residual of {microbatch} of slot {self.slot} after {self.counted} have been counted")
        if microbatch == self.counted:
            self.counted += 1
            self.befores.append((self.running, self.losses))
            self.forwards.append(microbatch)
            self.running, self.losses = after

    def part(self, microbatches: int) -> tuple[int, int, int]:
        """Returns its share of the reduction; the accumulator stays as it is."""
        if self.forwards != [*range(microbatches)] or self.backwards != [*range(microbatches)]:
            raise Violation(f"slot {self.slot} has counted {self.forwards} and added {self.backwards}")
        return self.sums, self.running, self.losses


def tell_hashes(worker: Executor, slot: Slot) -> None:
    """Sends the hashes of a replica after the last step, in a run on several hosts; a stage counts as a layer."""
    replica = worker.replicas[slot]
    if worker.case.hosts and replica.version:
        state, buffers = (replica.weights, replica.optimizer), replica.buffers[slot[0]]
        row = (slot[1], hashed(state), hashed(buffers), (), ())
        worker.world.say(worker.number, AuditMessage(replica.version - 1, slot[0], (row,)))


def hashed(value: object) -> str:
    """Returns a value as the text of a hash."""
    return f"{hash(value) & 0xFFFFFFFFFFFF:012x}"


def adopted(worker: Executor, slots: tuple[Slot, ...]) -> None:
    """Builds the replicas that a worker adopts from replicas of the same stage in other pipelines."""
    for slot in slots:
        if slot not in worker.replicas:
            pipelines = [pipeline for pipeline, stage in sorted(worker.replicas) if stage == slot[1]]
            if not pipelines or worker.case.fsdp:
                raise Violation(f"worker {worker.number} cannot adopt {slot}")
            worker.world.turns.add("replica is adopted")
            source = worker.replicas[pipelines[0], slot[1]]
            worker.replicas[slot] = Replica(slot, source.version, *source.state())
            tell_hashes(worker, slot)


def inventory_of(worker: Executor, *, offers: bool = False) -> str:
    """Returns the inventory of a worker as the text that it sends; it may offer all residuals of its slots."""
    replicas = sorted(worker.replicas.items())
    whole = tuple((slot, replica) for slot, replica in replicas if replica.version == worker.step)
    return _text(
        worker.number,
        worker.step,
        tuple(slot for slot, _ in whole),
        tuple((slot, replica.counted) for slot, replica in whole),
        tuple((slot, replica.added) for slot, replica in whole),
        tuple(slot for slot, replica in whole if replica.logged is not None),
        tuple(sorted(worker.values)),
        offers,
    )


@lru_cache(maxsize=4096)
def _text(
    worker: int,
    step: int,
    whole: tuple[Slot, ...],
    counted: tuple[tuple[Slot, int], ...],
    added: tuple[tuple[Slot, int], ...],
    logged: tuple[Slot, ...],
    keys: tuple[int, ...],
    offers: bool,
) -> str:
    values, saved = ValueRuns(map(_value, keys)), {}
    for slot in whole if offers else ():
        first, last = next(iter(values.runs(Kind.RESIDUAL, slot)), (0, -1))
        if first <= last:
            saved[slot] = SavedResiduals(first, (1000,) * (last + 1 - first), 10**6, 0)
    return to_json(Inventory(worker, step, whole, dict(counted), dict(added), logged, values, saved))


def _value(key: int) -> Value:
    kind, *place = parts_of(key)
    return Value(Kind(_KINDS[kind]), *place)


def first_replica(slot: Slot, pipelines: int) -> Replica:
    """Returns a replica at the beginning of a job."""
    stage = slot[1]
    buffers = tuple(provenance.first_buffers(each, stage) for each in range(pipelines))
    return Replica(slot, 0, provenance.first_weights(stage), provenance.first_optimizer(stage), buffers)
