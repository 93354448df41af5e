"""The world of one history: virtual time, channels with delays, and faults.

Rules: all random choices come from the case's seed, so a case has one history. The control plane keeps the order of
messages; the data plane does not. The last transfers of a dying worker may arrive or not. The clock ticks only when a
process waits for it: after a failed transfer, while a worker is stopped, and when nothing else happens.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Any

from engine.core.membership import events
from engine.core.membership.state import Phase
from engine.core.ownership import Grid
from tests.simulation.agent import Agent
from tests.simulation.case import Case, Fault, Violation
from tests.simulation.compiled import NAMES, VALUES, parts_of
from tests.simulation.judge import Judge
from tests.simulation.plans import shares_of
from tests.simulation.process import Process
from tests.simulation.replica import first_replica
from tests.simulation.worker import Worker

MS = 1_000_000
_COSTS = (MS, MS, 2 * MS, 2 * MS, MS)
_TICK = 500 * MS
_LONGEST = 400_000 * MS  # virtual time: several times every deadline of the protocol
_MOST_EVENTS = 400_000


class World:
    """One job and its faults."""

    def __init__(self, case: Case, tell: Callable[[str], None] | None = None):
        self.case = case
        self.tell_all = tell
        self.pick = Random(case.seed).random  # noqa: S311
        self.spread = case.spread
        self.now = 0
        self.heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self.serial = 0
        self.trace = 0
        self.turns: set[str] = set()  # the rare events that have happened
        self.next_tick = 0
        grid = Grid(case.stages, case.microbatches, case.pipelines, case.ties)
        self.retains = case.redundancy != "none" or case.pipelines > 1
        self.agent = Agent(self, case, grid)
        self.members = self.agent.state.members
        self.judge = Judge(self, grid)
        self.workers = [Worker(self, number) for number in self.members]
        self.heard_at = [0] * len(self.workers)
        self.said_at = [0] * len(self.workers)
        self.faults: list[list[Fault]] = [[] for _ in self.workers]
        for fault in case.faults:
            if fault.worker < len(self.workers):
                self.faults[fault.worker].append(fault)
        self.seen: dict[tuple[int, str], int] = {}
        self.struck: list[Fault] = []
        self.cut: dict[tuple[int, int], int] = {}  # broken links, until when
        self.exit_lag = MS // 10 if case.seed % 2 else MS
        self.loses = case.seed // 2 % 2
        self._begin()

    def _begin(self) -> None:
        ownership = self.agent.ownership
        shares = shares_of(self.case.schedule, ownership, self.case.redundancy, frozenset(), self.case.log_every)
        for worker in self.workers:
            self._watch(worker)
            for slot in ownership.held_by(worker.number):
                worker.replicas[slot] = first_replica(slot, self.case.pipelines)
            worker.enter(ownership, shares[worker.number])
            self.push(self.delay(), worker.wake)

    # Time

    def run(self) -> None:
        """Runs the history; raises Violation if a promise is broken."""
        heap = self.heap
        for _ in range(_MOST_EVENTS):
            if not heap:
                if self.is_over() or not self._wait_for_clock():
                    return
                continue
            self.now, _, what, words = heappop(heap)
            if self.now > _LONGEST:
                break
            what(*words)
        raise Violation(f"stuck while {self.agent.state.phase} in epoch {self.agent.state.epoch}")

    def is_over(self) -> bool:
        """Whether the job has ended."""
        return self.agent.state.phase in (Phase.FINISHED, Phase.HALTED)

    def _wait_for_clock(self) -> bool:
        self.tick_after(_TICK)
        return True

    def push(self, delay: int, what: Callable[..., None], *words: Any) -> None:
        """Schedules a call after a delay."""
        self.serial += 1
        heappush(self.heap, (self.now + delay, self.serial, what, words))

    def delay(self) -> int:
        """Returns the delay of a message."""
        if not self.spread:
            return MS // 10
        drawn = self.pick()
        return int(MS // 20 + drawn**4 * self.spread * MS)

    def cost(self, code: int) -> int:
        """Returns the time of an action."""
        return _COSTS[code] if not self.spread else int(_COSTS[code] * (0.5 + self.pick()))

    def planning(self) -> int:
        """Returns the time to make a plan."""
        return MS if not self.spread else int(self.pick() * 3 * MS)

    def lag(self) -> int:
        """Returns the time until a waiting worker notices a message."""
        return 0 if not self.spread or self.pick() < 0.5 else self.delay()

    def tick_after(self, delay: int) -> None:
        """Schedules a tick of the clock after a delay, unless an earlier one is scheduled."""
        at = self.now + delay
        if not self.now < self.next_tick <= at:
            self.next_tick = at
            self.push(delay, self._tick)

    def _tick(self) -> None:
        """Sends heartbeats and a tick to the coordinator; schedules the next tick while a worker is stopped."""
        if self.is_over():
            return
        for worker in self.workers:
            if worker.alive and not worker.paused:
                inside = (worker.step, worker.moments, worker.busy)
                self.agent.hear(events.Heartbeat(self.now, worker.number, worker.epoch, *inside))
        self.agent.hear(events.Tick(self.now))
        if self.agent.state.look or any(worker.alive and worker.paused for worker in self.workers):
            self.tick_after(_TICK)

    # Messages

    def tell(self, worker: Process, what: str, *words: Any) -> None:
        """Sends a message of the agent to a worker, after all earlier ones."""
        at = self.heard_at[worker.number] = max(self.heard_at[worker.number], self.now + self.delay())
        self.push(at - self.now, worker.told, what, *words)

    def say(self, what: str, *words: Any) -> None:
        """Sends a message of a worker to the agent, after all earlier ones."""
        number = words[1]
        at = self.said_at[number] = max(self.said_at[number], self.now + self.delay())
        self.push(at - self.now, self._hear, what, words)

    def _hear(self, what: str, words: tuple[Any, ...]) -> None:
        self.note(_WORDS[what], words[0], words[1])
        if what == "vote":
            self.agent.on_vote(*words)
            return
        epoch, worker, *more = words
        self.agent.hear(_EVENTS[what](self.now, worker, epoch, *more))

    def note(self, *numbers: int) -> None:
        """Adds to the hash of the history."""
        self.trace = hash((self.trace, self.now, *numbers))
        if self.tell_all:
            self.tell_all(f"{self.now / MS:10.3f} ms  {_in_words(numbers)}")

    def send(self, worker: Process, target: int, key: int, payload: Any) -> None:
        """Sends a transfer."""
        words = (worker, target, worker.epoch, worker.step, key, payload)
        self.push(self.delay(), self._arrive, *words)

    def _arrive(self, source: Process, target: int, epoch: int, step: int, key: int, payload: Any) -> None:
        taker = self.workers[target]
        until = self.cut.get((source.number, target), 0) if self.cut else 0
        if until > self.now:
            self.push(self.delay(), taker.lose_link, epoch, source.number)
        elif source.alive or not (self.loses if not self.spread else self.pick() < 0.5):
            self.note(key, target)
            taker.receive(epoch, step, source.number, key, payload)

    # Faults

    def strike(self, worker: Process, point: str) -> None:
        """Applies the faults that are due at a moment of a worker."""
        number, faults = worker.number, self.faults[worker.number]
        for fault in [each for each in faults if each.point == "moment" and each.at == worker.moments]:
            faults.remove(fault)
            self.hit(worker, fault)
        for each in (point, "replayed") if worker.epoch > 1 and point in _REPLAYED else (point,):
            count = self.seen[number, each] = self.seen.get((number, each), 0) + 1
            for fault in [one for one in faults if one.point == each and one.at == count]:
                faults.remove(fault)
                self.hit(worker, fault)
        self._watch(worker)

    def _watch(self, worker: Process) -> None:
        """Notes the next moment of a worker to check; if the moment is not known before, all of them."""
        faults = self.faults[worker.number]
        worker.watched = any(fault.point != "moment" for fault in faults)
        worker.trap = min((fault.at for fault in faults if fault.at > worker.moments), default=0)

    def decided(self, step: int) -> None:
        """Handles a decided commit that no worker knows yet."""
        for worker in self.workers:
            if worker.watched and worker.alive and not worker.paused:
                self.strike(worker, "decided")

    def hit(self, worker: Process, fault: Fault) -> None:
        """Applies a fault to a worker."""
        if not worker.alive:
            return
        self.struck.append(fault)
        self.note(_STRUCK, worker.number)
        self.judge.guilty(worker, fault)
        length = fault.length * 1000
        if fault.kind == "kill":
            self.end(worker, -9)
        elif fault.kind == "zombie":
            self.push(self.delay(), self.agent.hear, events.LeaseExpired(self.now, f"node-{worker.number}"))
            self.heard_at[worker.number] = self.now + length
        elif fault.kind == "pause":
            worker.paused = True
            self.push(length, worker.resume)
            self.tick_after(_TICK)
        elif fault.kind == "link":
            peer = (worker.number + 1) % len(self.workers)
            self.cut[worker.number, peer] = self.cut[peer, worker.number] = self.now + length
            self.judge.guilty(self.workers[peer], fault)
        elif fault.kind == "suspect":
            worker.suspect(None if fault.length == 0 else fault.length % len(self.workers))
        elif fault.kind == "stop":
            self.agent.hear(events.Notice(self.now, None, length))
        elif fault.kind == "notice":
            self.agent.hear(events.Notice(self.now, worker.number, length))

    def evict(self, worker: Process) -> None:
        """Kills an excluded worker for the agent; it cannot reach a worker whose lease has expired."""
        if worker.alive:
            self.push(self.delay(), self.end, worker, -9)

    def end(self, worker: Process, code: int) -> None:
        """Ends a process: its agent sees it, and its peers later."""
        if not worker.alive:
            return
        worker.alive = False
        if self.is_over():
            return
        self.push(self.exit_lag if not self.spread else self.delay(), self._seen, worker.number, code)
        for peer in self.workers:
            if peer.alive:
                self.push(MS // 2 if not self.spread else self.delay(), peer.lose_link, worker.epoch, worker.number)

    def _seen(self, number: int, code: int) -> None:
        self.note(_ENDED, number)
        self.agent.hear(events.ExitSeen(self.now, number, code))


def _in_words(numbers: tuple[int, ...]) -> str:
    """Returns noted numbers in words, for the replay of a case."""
    first, second, *third = numbers
    said = {code: what for what, code in _WORDS.items()}
    if first in said:
        return f"the agent hears of worker {third[0]}: {said[first]} in epoch {second}"
    if first < 0:
        return f"worker {second} is {'struck' if first == _STRUCK else 'seen to have ended'}"
    if third:
        return f"worker {first}: {NAMES[second]}, action {third[0]} of its program"
    kind, pipeline, stage, index = parts_of(first)
    return f"worker {second} receives {VALUES[kind]} {index} of slot {(pipeline, stage)}"


_STRUCK, _ENDED = -2, -3
_EVENTS = {
    "suspicion": events.Suspicion,
    "inventory": events.InventoryReceived,
    "planned": events.PlanAcknowledged,
    "done": events.Done,
}
_WORDS = {"suspicion": -10, "inventory": -11, "planned": -12, "done": -13, "vote": -14}
_REPLAYED = frozenset({"F", "f", "B", "I", "W", "HEAL", "REDUCE_GRAD", "LOG", "COMMIT"})
