"""The links between the workers of a history: the transfers under way, the groups that form, and the faults of links.

Rules: a fault holds up, loses, delays or repeats what reaches its link, as `FaultyLinks` says. A group does not form
over a silent link; after a time, the ends of the link give up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from tests.doubles.faulty_links import FaultyLinks, Kind, LinkFault
from tests.simulation.case import FOR_EVER_US, LINK_KINDS, Fault

if TYPE_CHECKING:
    from tests.simulation.executor import Executor
    from tests.simulation.world import World

MS = 1_000_000
_FORMING_NS = 2_000 * MS
TICK = 500 * MS
_FLAPS = 6
_LATER = 20  # a late message takes this part of the fault longer
_AWAITED_NS = 1_000 * MS  # of a message that is held up: then its edge may be called dark
_KINDS: dict[str, tuple[Kind, str]] = {  # and whether it is the way there, the way back, or both
    "link": ("reset", "both"),
    "network": ("reset", "both"),
    "silent": ("silent", "both"),
    "flap": ("silent", "both"),
    "silent there": ("silent", "there"),
    "silent back": ("silent", "back"),
    "middle": ("middle", "there"),
    "late": ("late", "both"),
    "duplicated": ("duplicated", "both"),
}
assert {*_KINDS} == {*LINK_KINDS}
Transfer = tuple[int, int, int, int, int]  # source, target, group, step and key


class Links:
    """All links of one history. `counts` says whether the case has a fault of a link."""

    def __init__(self, world: World):
        self.world = world
        self.counts = False
        self.faults: FaultyLinks | None = None  # from the first fault on
        self.until = 0  # when the last fault ends
        self.struck: set[int] = set()  # workers with a fault of their links that hinders
        self.ends: set[int] = set()  # of those links
        self.held: dict[Transfer, int] = {}  # what a fault holds up, since when
        self.groups: dict[int, set[int]] = {}

    # Transfers

    def send(self, worker: Executor, target: int, key: int, payload: Any) -> None:
        """Sends a transfer."""
        if self.counts:
            worker.sent[target] += 1
        self.world.push(self.world.delay(), self._arrive, worker, target, worker.group, worker.step, key, payload)

    def _arrive(self, source: Executor, target: int, group: int, step: int, key: int, payload: Any) -> None:
        if self.faults is None:
            self._deliver(source, target, group, step, key, payload)
            return
        now = self.world.now
        fates = self.faults.fates(now, (source.number, target))
        if not any(fate.at == now and fate.what != "part" for fate in fates):
            self.held[source.number, target, group, step, key] = now
        for fate in fates:
            if fate.what == "whole":
                self.world.push(fate.at - now, self._deliver, source, target, group, step, key, payload)
            elif fate.what == "broken":
                if group == source.group:
                    source.lost.add(target)
                self.world.push(self.world.delay(), self.world.workers[target].lose_link, group, source.number)

    def _deliver(self, source: Executor, target: int, group: int, step: int, key: int, payload: Any) -> None:
        world = self.world
        if world.is_restarting or world.workers[source.number] is not source:
            return
        if self.faults is not None:
            self.held.pop((source.number, target, group, step, key), None)
        if source.alive or not (world.loses if not world.spread else world.pick() < 0.5):
            world.note(key, target)
            world.workers[target].receive(group, step, source.number, key, payload)

    def break_all(self, worker: Executor, groups: Iterable[int] = ()) -> None:
        """Breaks the links of a worker that has left groups, or all; a silent one does not tell its other end."""
        world = self.world
        left = tuple(groups) or (worker.group, *worker.next_groups)
        for peer in world.workers:
            if peer.alive and peer is not worker and not self._is_cut(worker.number, peer.number, "silent", "middle"):
                delay = MS // 2 if not world.spread else world.delay()
                for group in left:
                    world.push(delay, peer.lose_link, group, worker.number)

    # Groups

    def join(self, worker: Executor, group: int, members: tuple[int, ...]) -> None:
        """Lets a worker join a group: it is formed when all have joined."""
        joined = self.groups.setdefault(group, set())
        joined.add(worker.number)
        if len(joined) >= len(members) and joined.issuperset(members):
            self._form(group, members, self.world.now + _FORMING_NS)

    def _form(self, group: int, members: tuple[int, ...], until: int) -> None:
        world, workers = self.world, self.world.workers
        if self.faults is not None and world.now < until and self.faults.are_cut(world.now, members):
            world.turns.add("group waits for a silent link")
            world.tick_after(TICK)
            if any(workers[number].alive and workers[number].forms(group) for number in members):
                world.push(TICK, self._form, group, members, until)
            return
        for number in members:
            if self.faults is None:
                world.push(world.planning(), workers[number].formed, group, None)
                continue
            cut = (each for each in members if self._is_cut(number, each, "reset", "silent", "middle"))
            world.push(world.planning(), workers[number].formed, group, next(cut, None))

    def _is_cut(self, one: int, other: int, *kinds: Kind) -> bool:
        if self.faults is None or one == other:
            return False
        found = (self.faults.fault(self.world.now, way) for way in ((one, other), (other, one)))
        return any(fault is not None and fault.kind in kinds for fault in found)

    # Faults

    def strike(self, worker: Executor, fault: Fault) -> None:
        """Begins a fault of the links of a worker: of that to the next worker, or of all."""
        self.faults = self.faults or FaultyLinks()
        others = [each for each in self.world.numbers if each != worker.number]
        peers = others if fault.kind == "network" else [(worker.number + 1) % len(self.world.workers)]
        if fault.hinders:
            self.struck |= {worker.number, *(peers if fault.kind != "network" else ())}
            self.ends |= {worker.number, *peers}
        length = fault.length * 1000
        for flap in range(_FLAPS if fault.kind == "flap" else 1):
            self.world.push(2 * flap * length, self._begin, worker.number, peers, fault.kind, length)

    def _begin(self, worker: int, peers: list[int], name: str, length: int) -> None:
        assert self.faults is not None
        kind, which = _KINDS[name]
        until = None if length >= FOR_EVER_US * 1000 else self.world.now + length
        for peer in peers:
            for way, word in (((worker, peer), "there"), ((peer, worker), "back")):
                if which in (word, "both"):
                    self.faults.strike(way, LinkFault(kind, until, length // _LATER))
        self.until = max(self.until, self.world.now + length)
        self.world.tick_after(TICK // 2)

    # The truth, for the judge

    def dark_edges(self) -> Iterator[tuple[int, int]]:
        """Yields the pairs of workers with a message that a fault holds up and that its receiver awaits."""
        workers, now = self.world.workers, self.world.now
        for (source, target, group, step, key), since in self.held.items():
            taker = workers[target]
            is_open = taker.alive and workers[source].alive and (group, step) == (taker.group, taker.step)
            if is_open and now - since >= _AWAITED_NS and taker.awaited().get(key) == source:
                yield source, target
