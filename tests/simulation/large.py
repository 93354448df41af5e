"""Large jobs on many hosts of eight workers: workers die, or a whole host does, and all messages are counted.

``python -m tests.simulation --large N`` tries N cases at each of 64, 256 and 1,024 workers, and prints how many
messages and bytes the coordinator and the workers exchange beside those of the same job without a failure. A loss of a
host is one failure of eight workers. The cases of one size share their start; each has a process of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from random import Random
from statistics import mean
from time import monotonic, process_time
from typing import NamedTuple

from engine.codec.messages import encode
from engine.core.message_kinds import MAX_BYTES, Message, ToAgent, ToWorker
from engine.core.ownership import Ownership, with_shadows
from engine.core.program.build import baseline
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
_ENDED: list[LargeWorld] = []  # to take a world apart takes longer than to end its process
_CHECKED = 10  # of so many cases, one has its plans checked
LOSS = "host"  # of the worker; the lease of its agent expires


class LargeWorld(World):
    """A job on hosts of eight workers, with counts of its messages and of their bytes on the wire."""

    def __init__(self, case: Case):
        self.counts = Counter[str]()  # by class of message
        self.sizes = Counter[str]()
        self.largest = 0
        self._last: tuple[Message | None, int] = (None, 0)  # one message goes to many workers
        super().__init__(case)

    def takes(self, case: Case) -> None:
        """Takes a case; of most cases no oracle looks at the plans, which takes long: they show when they are run."""
        super().takes(case)
        self.checks_plans = case.seed % _CHECKED == 0

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
    case = replace(usual_case(workers), seed=number)
    kind, count = rng.choice((("kill", 1), ("kill", 1), ("kill", 2), (LOSS, 1)))
    struck = rng.sample(range(0, workers, 2 * _ON_A_HOST), count)  # on hosts that are no neighbours
    first = rng.randrange(_ON_A_HOST)
    return replace(case, faults=tuple(Fault(each + first, "moment", rng.randint(6, 20), kind) for each in struck))


def ran(case: Case, *, once: bool = False) -> tuple[LargeWorld, History]:
    """Returns the world of a case at its end, and its history; with `once` the process can try no other case."""
    world = begun(case, LargeWorld, once=once)
    _ENDED.extend([world] if once else [])
    return world, history_of(world)


class Usage(NamedTuple):
    """What the job of so many workers sends without a failure."""

    workers: int
    messages: int
    sizes: Mapping[str, int]  # by class of message


class Outcome(NamedTuple):
    """What a case cost, beside the same job without a failure."""

    broken: str  # promise, if one is
    kind: str = ""
    epochs: int = 0
    messages: int = 0
    sizes: Mapping[str, int] = {}  # by class of message
    largest: int = 0
    took_s: float = 0.0  # of a processor


def usual_case(workers: int) -> Case:
    """Returns the case of a job without a failure."""
    return Case(stages=workers, microbatches=2, steps=2)


def usage(workers: int) -> Usage:
    """Returns what a job sends without a failure; all its cases then share its start and its programs."""
    world, _ = ran(usual_case(workers))
    baseline(world.case.schedule, world.grid, world.ownership.owners)  # of which their first failures are repairs
    return Usage(workers, world.counts.total(), dict(world.sizes))


def outcome(usual: Usage, number: int, *, once: bool = False) -> Outcome:
    """Returns what the case of a number cost, in a job as large as one without a failure; `once` is that of `ran`."""
    begin = process_time()
    world, history = ran(case := large_case(usual.workers, number), once=once)
    if history.problem or history.phase is not Phase.FINISHED:
        return Outcome(f"{history.phase}: {history.problem}\nlarge_case({case.stages}, {number}): {case.text()}")
    return Outcome(
        "",
        "loss of a host" if any(fault.kind == LOSS for fault in history.struck) else "death",
        history.epoch - 1,
        world.counts.total() - usual.messages,
        {name: size - usual.sizes.get(name, 0) for name, size in world.sizes.items()},
        world.largest,
        process_time() - begin,
    )


def figures(workers: int, outcomes: Iterable[Outcome]) -> Iterator[str]:
    """Yields what the failures of all cases of a size cost, or the first case that broke a promise."""
    begin, cases = monotonic(), 0
    more: dict[str, list[tuple[int, int, int]]] = {"death": [], "loss of a host": []}
    by_class, largest, took_s = Counter[str](), 0, 0.0
    for cost in outcomes:
        cases += 1
        if cost.broken:
            yield cost.broken
            return
        largest, took_s = max(largest, cost.largest), took_s + cost.took_s
        if cost.epochs:
            size = sum(cost.sizes.values())
            more[cost.kind].append((cost.messages // cost.epochs, size // cost.epochs, cost.epochs))
            by_class.update(cost.sizes)
    for kind, costs in more.items():
        if costs:
            messages, size, epochs = (mean(column) for column in zip(*costs, strict=True))
            yield (
                f"{workers:>6,} workers, {kind}: {messages:,.0f} messages and {size / 1e6:,.2f} MB for each epoch, "
                f"{messages / workers:.2f} messages for each worker; {epochs:.2f} epochs in a case, {len(costs)} cases"
            )
    most = ", ".join(f"{name} {size / max(1, by_class.total()):.0%}" for name, size in by_class.most_common(3))
    yield (
        f"{workers:>6,} workers: {(monotonic() - begin) / cases:.2f} s for a case, {took_s / cases:.2f} s of a "
        f"processor; most bytes: {most}; the largest message has {largest:,} bytes, a real one at most {MAX_BYTES:,}"
    )
