"""The fork servers of all hosts of a run, as one: the agent of the coordinator's host starts workers on each of them.

A thread judges the other hosts: one whose stream has ended and is not back, or that is silent, is lost. Its lease is
revoked first, so it knows that it is out as soon as it asks the store; then all its workers count as ended at once.
Another thread waits for the store meanwhile, as the ticks to the other hosts go on.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from engine.core.errors import CoordinatorUnavailableError, WorkerFailedError
from engine.core.hosts.deal import deal, host_for_one_more
from engine.core.hosts.host_loss import LATER_NS, HostSight
from engine.core.message_codec import MAX_BYTES
from engine.core.store.kv import KV, Lease
from engine.core.texts import numbered
from engine.runtime.hosts.away_server import AwayServer
from engine.runtime.hosts.heard_results import KEPT, HeardResults
from engine.runtime.hosts.line_exchange import CoordinatorLines
from engine.runtime.process import descendants
from engine.runtime.process.fork_client import Child, ForkServer

_LOOK_S = 0.05
_TICK_S = 0.25
_SLEPT_NS = 500_000_000
_FIRST_NS = 60_000_000_000  # from the election until a host has to have connected


class HostServers(ForkServer):
    """The fork server of this host, and those of others by name. Each has room for some workers; 0: for any."""

    later_ns = LATER_NS

    def __init__(
        self,
        local: ForkServer,
        away: Sequence[AwayServer],
        kv: KV,
        room: int = 0,
        network: Mapping[str, str] = MappingProxyType({}),
    ):
        self.host, self.address, self.network = local.host, local.address, network
        self._local, self._away = local, {each.host: each for each in away}
        self.dealt: dict[int, str] = {}  # the host of each worker
        self._kv, self._room = kv, room
        self._lines = CoordinatorLines(self.host, self._away)
        self._num_decisions, self._counting = 0, threading.Lock()
        self._losing: dict[str, threading.Thread] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hosts", daemon=True)
        self._thread.start()

    def at(self, worker: int) -> ForkServer:
        """Returns the fork server of the host of a worker; one that comes later goes where the fewest are."""
        if worker not in self.dealt:
            self.dealt[worker] = host_for_one_more(self.dealt, self._living)
        return self._away.get(self.dealt[worker], self._local)

    @property
    def _living(self) -> list[str]:
        return [self.host, *(each.host for each in self._others if each.is_there)]

    def deal(self, workers: Sequence[int]) -> None:
        """Deals the workers of a start to the hosts that are left; raises WorkerFailedError if these lack the room."""
        living, gone = self._living, [name for name, each in self._away.items() if not each.is_there]
        if self._room and len(workers) > len(living) * self._room:
            left, lost = numbered("host", living, " and "), numbered("host", gone, " and ")
            room = f"{left} {'has' if len(living) == 1 else 'have'} room for {len(living) * self._room} workers"
            raise WorkerFailedError(f"{lost} {'is' if len(gone) == 1 else 'are'} lost, and {room}, of {len(workers)}")
        self.dealt = deal(workers, living)

    def _watch(self) -> None:
        began_ns = ticked_ns = time.monotonic_ns()
        looked_ns = began_ns
        while not self._is_over.wait(_LOOK_S):
            now_ns = time.monotonic_ns()
            has_slept, looked_ns = now_ns - looked_ns > _SLEPT_NS, now_ns
            if has_slept:  # this host stood still, and may not coordinate any more: it judges no host by that time
                began_ns = now_ns
                for each in self._away.values():
                    each.peer.heard_ns, each.peer.ended_ns = now_ns, each.peer.ended_ns and now_ns
            is_due = now_ns - ticked_ns >= _TICK_S * 1e9
            ticked_ns = now_ns if is_due else ticked_ns
            for each in self._away.values():
                if is_due:
                    each.tick()
                is_open = not each.peer.is_lost and each.host not in self._losing
                if is_open and (why := self._why_lost(each, began_ns, now_ns)):
                    self._losing[each.host] = threading.Thread(target=self._lose, args=(each, why), daemon=True)
                    self._losing[each.host].start()
            self._lines.look()

    def _why_lost(self, away: AwayServer, began_ns: int, now_ns: int) -> str:
        peer = away.peer
        if peer.broken:
            return f"it has sent what no host sends: {peer.broken}"
        if not peer.has_come:
            return "it did not connect" if now_ns - began_ns > _FIRST_NS else ""
        if peer.end.is_full:
            return "it does not read any more"
        return HostSight(peer.heard_ns, peer.ended_ns, peer.is_waiting).why_lost(now_ns)

    def _lose(self, away: AwayServer, why: str) -> None:
        with contextlib.suppress(CoordinatorUnavailableError):  # asked again at the next look
            if away.known.lease_id:
                self._kv.revoke(Lease(away.known.lease_id, 1))
            away.lose(why)
        self._losing.pop(away.host, None)

    def lose(self, host: str, why: str) -> None:
        """Counts a host as lost, because of `why`."""
        self._lose(self._away[host], why)

    def hear(self, record: object, line: str) -> None:
        """Lets all other hosts keep a decision."""
        if isinstance(record, KEPT) and len(line) < MAX_BYTES:  # no decision is longer; results of a user may be
            with self._counting:
                for each in self._others:
                    each.keep(self._num_decisions, line)
                self._num_decisions += 1

    @property
    def _others(self) -> list[AwayServer]:
        return [each for each in self._away.values() if each is not self._local]

    def go_on_after(self, heard: HeardResults) -> None:
        """Lets all other hosts keep what this one has heard before; one that lacks too much of it counts as lost."""
        self._num_decisions = heard.count
        for each in self._others:
            try:
                found = heard.since(each.heard)
            except CoordinatorUnavailableError as error:
                self._lose(each, f"it lacks results: {error}")
                continue
            for number, line in found.items():
                each.keep(number, line)

    def leave(self) -> None:
        """Lets the workers of other hosts go on without this one: nothing more is told to them."""
        self.stop_watching()
        self._lines.hand_over()
        for each in self._away.values():
            each.leave()

    def stop_watching(self) -> None:
        """Judges no host any more: the run has ended."""
        self._is_over.set()
        for each in (self._thread, *[*self._losing.values()]):
            each.join()

    def tell(self, code: int, words: str) -> None:
        """Tells all hosts the outcome of the run, and waits for their last records."""
        for each in self._away.values():
            each.tell(code, words)
        self._lines.finish()

    def records_in(self, run: Path) -> None:
        """Lets the other hosts ship their records to the folder of the run, and its own go to one of them."""
        self._lines.begin(run)

    @property
    def while_waiting(self) -> Callable[[], None]:
        """Is called each second in which a server does not answer."""
        return self._local.while_waiting

    @while_waiting.setter
    def while_waiting(self, call: Callable[[], None]) -> None:
        for each in (self._local, *self._away.values()):
            each.while_waiting = call

    @property
    def pid(self) -> int:
        """The pid of the fork server of this host."""
        return self._local.pid

    def has_ended(self) -> bool:
        """Returns whether the fork server of this host has ended."""
        return self._local.has_ended()

    @contextlib.contextmanager
    def forking(self) -> Iterator[None]:
        """As on one host."""
        with self._local.forking():
            yield

    @contextlib.contextmanager
    def adopting(self, preload: tuple[str, ...] = ()) -> Iterator[None]:
        """As on one host; the agents of the others do the same there."""
        with self._local.adopting(preload):
            yield

    def end_descendants(self, patience_s: float = descendants.PATIENCE_S) -> None:
        """As on one host."""
        self._local.end_descendants(patience_s)

    def fork(self, role: str, name: str, log_fd: int, fds: Sequence[int] = ()) -> Child:
        """Forks a process on this host."""
        return self._local.fork(role, name, log_fd, fds)

    def close(self) -> None:
        """Ends all processes."""
        for each in (*self._away.values(), self._local):
            each.close()
