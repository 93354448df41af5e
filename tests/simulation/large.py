"""Large jobs on many hosts of eight workers: workers die, or a whole host does, and all messages are counted.

``python -m tests.simulation --large N`` tries N cases at each of 64, 256 and 1,024 workers, and prints how many
messages and bytes the coordinator and the workers exchange beside those of the same job without a failure. A loss of a
host is one failure of eight workers. The cases of one size share their start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from statistics import mean
from time import process_time

from engine.codec.messages import encode
from engine.core.message_kinds import MAX_BYTES, Message, ToAgent, ToWorker
from engine.core.ownership import Ownership, with_shadows
from engine.core.protocol.events import LeaseExpired
from engine.core.protocol.state import Phase
from tests.simulation.beginning import begun
from tests.simulation.case import Case, Fault
from tests.simulation.executor import Executor
from tests.simulation.run import History, history_of
from tests.simulation.worker import Worker
from tests.simulation.world import World

SIZES = (64, 256, 1024)
_ON_A_HOST = 8
LOSS = "host"  # of the worker; the lease of its agent expires


class LargeWorld(World):
    """A job on hosts of eight workers, with counts of its messages and of their bytes on the wire."""

    def __init__(self, case: Case):
        self.counts = Counter[str]()  # by class of message
        self.sizes = Counter[str]()
        self.largest = 0
        self._last: tuple[Message | None, int] = (None, 0)  # one message goes to many workers
        super().__init__(case)

    def placed(self, ownership: Ownership, case: Case) -> Ownership:
        """Returns the ownership with shadows on other hosts."""
        members = ownership.workers()
        host_of = {each: self.node_of(each) for each in members}
        return with_shadows(replace(ownership, shadows=()), case.redundancy, case.level, members, host_of=host_of)

    def tell(self, worker: Worker, message: ToWorker) -> None:
        """Counts a message, and sends it."""
        self._count(message)
        super().tell(worker, message)

    def say(self, number: int, message: ToAgent) -> None:
        """Counts a message, and sends it."""
        self._count(message)
        super().say(number, message)

    def _count(self, message: Message) -> None:
        if self._last[0] is not message:
            self._last = message, len(encode(message))
            self.largest = max(self.largest, self._last[1])
        name = type(message).__name__
        self.counts[name] += 1
        self.sizes[name] += self._last[1]

    def hit(self, worker: Executor, fault: Fault) -> None:
        """Applies a fault; the loss of a host ends all its workers, which no agent sees."""
        if fault.kind != LOSS:
            super().hit(worker, fault)
            return
        self.struck.append(fault)
        node = self.node_of(worker.number)
        for each in self.workers:
            if each.alive and self.node_of(each.number) == node:
                self.judge.guilty(each, replace(fault, kind="kill"))
                each.alive = False
                self.links.break_all(each)
        self.push(self.delay(), self.coordinator.take, LeaseExpired, node)

    def node_of(self, number: int) -> str:
        """Returns the host of a worker."""
        return f"host-{number // _ON_A_HOST}"


def large_case(workers: int, number: int) -> Case:
    """Returns the random case of a number: one or two deaths, or the loss of a host, in the first step or the next."""
    rng = Random(f"large {workers} {number}")  # noqa: S311
    case = Case(stages=workers, microbatches=2, steps=2, seed=number)
    kind, count = rng.choice((("kill", 1), ("kill", 1), ("kill", 2), (LOSS, 1)))
    struck = rng.sample(range(0, workers, 2 * _ON_A_HOST), count)  # on hosts that are no neighbours
    first = rng.randrange(_ON_A_HOST)
    return replace(case, faults=tuple(Fault(each + first, "moment", rng.randint(6, 20), kind) for each in struck))


def ran(case: Case) -> tuple[LargeWorld, History]:
    """Returns the world of a case at its end, and its history."""
    world = begun(case, LargeWorld)
    return world, history_of(world)


def figures(workers: int, cases: int) -> Iterator[str]:
    """Tries the cases of a size; yields what their failures cost, or the first case that broke a promise."""
    usual, _ = ran(Case(stages=workers, microbatches=2, steps=2))
    more: dict[str, list[tuple[int, int, int]]] = {"death": [], "loss of a host": []}
    by_class, begin, largest = Counter[str](), process_time(), 0
    for number in range(cases):
        world, history = ran(large_case(workers, number))
        if history.problem or history.phase is not Phase.FINISHED:
            yield f"{history.phase}: {history.problem}\nlarge_case({workers}, {number}): {history.case.text()}"
            return
        epochs, largest = history.epoch - 1, max(largest, world.largest)
        if not epochs:
            continue
        kind = "loss of a host" if history.struck[0].kind == LOSS else "death"
        counts, sizes = world.counts.total() - usual.counts.total(), world.sizes.total() - usual.sizes.total()
        more[kind].append((counts // epochs, sizes // epochs, epochs))
        by_class.update({name: world.sizes[name] - usual.sizes[name] for name in world.sizes})
    took_s = (process_time() - begin) / cases
    for kind, found in more.items():
        if found:
            messages, size, epochs = (mean(column) for column in zip(*found, strict=True))
            yield (
                f"{workers:>6,} workers, {kind}: {messages:,.0f} messages and {size / 1e6:,.2f} MB for each epoch, "
                f"{messages / workers:.2f} messages for each worker; {epochs:.2f} epochs in a case, {len(found)} cases"
            )
    most = ", ".join(f"{name} {size / max(1, by_class.total()):.0%}" for name, size in by_class.most_common(3))
    yield (
        f"{workers:>6,} workers: {took_s:.2f} s for a case; most bytes: {most}; the largest message has {largest:,} "
        f"bytes, a real one at most {MAX_BYTES:,}"
    )
