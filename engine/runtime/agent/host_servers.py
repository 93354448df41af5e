"""The fork servers of all hosts of a run, as one: the agent of the coordinator's host starts workers on each of them.

A thread judges the other hosts: one whose stream has ended and is not back, or that is silent, is lost. Its lease is
revoked first, so it knows that it is out as soon as it asks the store; then all its workers count as ended at once.
Another thread waits for the store meanwhile, as the ticks to the other hosts go on.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from engine.codec.messages import decode
from engine.codec.records import decoded, encoded
from engine.core.checkpoint_rules import KeptMessage, UnkeptMessage
from engine.core.deadlines import LATER_NS
from engine.core.errors import BambooError, CoordinatorUnavailableError, WorkerFailedError, ensure
from engine.core.faults.injection import InheritedFaults
from engine.core.history.process_records import (
    DeadlyRecord,
    ExitRecord,
    NetworkRecord,
    RequestRecord,
    ResumedRecord,
    StartedRecord,
)
from engine.core.history.run_records import (
    AGENT,
    AuditRecord,
    CommitRecord,
    ConfirmedRecord,
    EpochRecord,
    FaultRecord,
    GoRecord,
    HeirsRecord,
    KeptRecord,
    NormsRecord,
    PartitionRecord,
    PlanRecord,
    PreparedRecord,
    Record,
    StampedRecord,
    StoppedEarlyRecord,
    UnconfirmedRecord,
    ValidationRecord,
)
from engine.core.hosts.ends import HostSight, deal, host_for_one_more, missing_decisions
from engine.core.job.job import Job
from engine.core.kv import KV, Lease
from engine.core.message_kinds import MAX_BYTES, Message, head_of
from engine.core.messages import (
    AuditMessage,
    BorderMessage,
    BordersMessage,
    CutMessage,
    Evaluation,
    FailedMessage,
    FaultEffectMessage,
    NoticeMessage,
    PartitionMessage,
    RaisedMessage,
    ReadyMessage,
    RefusedMessage,
    StrikeMessage,
    WaitingMessage,
    WelcomeMessage,
)
from engine.core.texts import numbered
from engine.runtime.agent.remote_workers import CoordinatorLines, RemoteSpawner
from engine.runtime.agent.run_state import RunState, audit_record
from engine.runtime.agent.wire import MOST_WAITING_BYTES
from engine.runtime.process import descendants
from engine.runtime.process.clock import TICK_S
from engine.runtime.process.spawner import Spawner

# The words of a worker that the next coordinator has to hear again: the borders behind its stages, that it has joined,
# its notice, its last words.
#
# It hears too what the workers of a host were told, as a newcomer is told the same.
#
# Rule: in the epoch of a take-over all members report again, and vote again; the rest is said once only. The hashes of
# the last steps may not have been told to other hosts when a host was lost, and no worker writes a part of a checkpoint
# a second time. A worker that has come to the moment of a fault stands still until it is answered.


_ONCE = tuple(
    head_of(kind)
    for kind in (
        BorderMessage,
        ReadyMessage,
        WaitingMessage,
        NoticeMessage,
        StrikeMessage,
        FaultEffectMessage,
        RaisedMessage,
        FailedMessage,
        RefusedMessage,
    )
)
_PARTS = tuple(map(head_of, (KeptMessage, UnkeptMessage)))
_HASHES = head_of(AuditMessage)
_WELCOME = head_of(WelcomeMessage)
_PLACE = tuple(map(head_of, (PartitionMessage, BordersMessage)))
_MOST_HASHES = 64  # messages: those of two steps, of a worker with many slots


class ReplayBuffer:
    """The words of one worker that are said again."""

    def __init__(self) -> None:
        self._once: list[bytes] = []
        self._hashes: deque[bytes] = deque(maxlen=_MOST_HASHES)
        self._parts: list[bytes] = []
        self._step = -1  # of these parts

    def add(self, packet: bytes) -> None:
        """Takes a control message of the worker."""
        if packet.startswith(_HASHES):
            self._hashes.append(packet)
        elif packet.startswith(_ONCE):
            self._once.append(packet)
        elif packet.startswith(_PARTS) and isinstance(message := decode(packet), KeptMessage | UnkeptMessage):
            if message.step > self._step:
                self._step, self._parts = message.step, []
            self._parts += [packet] * (message.step == self._step)

    @property
    def packets(self) -> list[bytes]:
        """The words, each kind in its order."""
        return [*self._once, *self._hashes, *self._parts]


class WelcomeCache:
    """What the workers of a host were told since their last start: their welcomes, the cut and the borders."""

    def __init__(self) -> None:
        self._start = ""
        self._packets: dict[bytes, None] = {}

    def add(self, packet: bytes) -> None:
        """Takes a control message to a worker."""
        if packet.startswith(_WELCOME) and isinstance(welcome := decode(packet), WelcomeMessage):
            if welcome.start != self._start:
                self._start = welcome.start
                self._packets.clear()
        elif not packet.startswith(_PLACE):
            return
        self._packets[packet] = None

    @property
    def packets(self) -> list[bytes]:
        """The messages, each once, in their order."""
        return [*self._packets]


# The results of a run as a host hears them that does not coordinate it: the next one goes on with these.
#
# Rules: each decision has a number, and is heard in the order in which it was recorded, so the results are those of the
# host that recorded. The last ones are kept as lines, as many as may wait in a stream: a host that is not lost lacks no
# more, so hosts can complete each other at a take-over.

KEPT = (
    AuditRecord,
    CommitRecord,
    ConfirmedRecord,
    DeadlyRecord,
    EpochRecord,
    FaultRecord,
    GoRecord,
    HeirsRecord,
    KeptRecord,
    NormsRecord,
    PartitionRecord,
    PlanRecord,
    PreparedRecord,
    RequestRecord,
    ResumedRecord,
    StartedRecord,
    StoppedEarlyRecord,
    ExitRecord,
    UnconfirmedRecord,
    ValidationRecord,
)  # of these every host hears


def hashes_of(packet: bytes) -> AuditMessage | None:
    """Returns a control message of a worker that has hashes; None for another one."""
    message: Message | None = decode(packet) if packet.startswith(_HASHES) else None
    return message if isinstance(message, AuditMessage) else None


class ReplicatedResults:
    """The results of one run, of which this host hears; `count` decisions so far."""

    def __init__(self, job: Job):
        self.results = RunState(job)
        self.faults = InheritedFaults()
        self.count = 0
        self._lines: deque[str] = deque()  # the last ones
        self._bytes = 0

    def take(self, number: int, line: str) -> Record | None:
        """Takes the next decision; returns it, or None for one that was heard before."""
        if number < self.count:
            return None
        ensure(number == self.count, f"decision {number} was told where {self.count} comes next")
        record = decoded(line)
        self._keep(line)
        self.hear(record)
        return record

    def _keep(self, line: str) -> None:
        self.count += 1
        self._lines.append(line)
        self._bytes += len(line)
        while self._bytes > MOST_WAITING_BYTES:
            self._bytes -= len(self._lines.popleft())

    @property
    def _first(self) -> int:
        return self.count - len(self._lines)

    def last_since(self, number: int) -> dict[int, str]:
        """Returns the decisions from a number on, as far as they are kept."""
        return {each: line for each, line in enumerate(self._lines, self._first) if each >= number}

    def since(self, number: int) -> dict[int, str]:
        """Returns the decisions from a number on; raises CoordinatorUnavailableError if older ones are needed."""
        if number < self._first:
            raise CoordinatorUnavailableError(f"the decisions {number} to {self._first - 1} are not kept any more")
        return self.last_since(number)

    def complete(self, stored: Iterable[Mapping[int, str]]) -> list[tuple[str, Record | None]]:
        """Takes what other hosts have heard, and this one has not; returns these lines with their decisions."""
        return [(line, self.take(self.count, line)) for line in missing_decisions(self.count, stored)]

    def hear(self, record: object) -> None:
        """Takes a decision. Results that contradict each other are for the host that coordinates to judge."""
        self.faults.hear(record)
        results = self.results
        with contextlib.suppress(BambooError):
            match record:
                case ResumedRecord(step=step):
                    self.results = results.again(step) if results.losses else RunState(results.job, step)
                case PartitionRecord(starts=starts, layers=layers, samples=samples):  # of each start of the workers
                    self.results = results = results.again(results.committed)
                    results.cut(CutMessage(starts, layers, samples))
                case AuditRecord(of=worker, step=step, pipeline=pipeline, rows=rows):
                    results.audit(worker, AuditMessage(step, pipeline, tuple((*row, (), ()) for row in rows)))
                case ValidationRecord(step=step, name=name, samples=samples, loss=loss, metrics=metrics):
                    others = [each for each in results.validations.get(step, ()) if each.name != name]
                    results.validations[step] = (*others, Evaluation(name, samples, loss, metrics))
                case KeptRecord(step=step):
                    results.kept = step
                case StampedRecord():
                    results.books(record)

    def hear_again(self, worker: int, packet: bytes) -> None:
        """Takes hashes of a worker that the host which is lost may not have told; raises ReplicasDifferError."""
        message = hashes_of(packet)
        if message is not None and message.step == self.results.committed:
            self.results.audit(worker, message)
            self._keep(encoded(replace(audit_record(worker, message), worker=AGENT)))  # other hosts lack it too


_LOOK_S = 0.05
_SLEPT_NS = 500_000_000
_FIRST_NS = 60_000_000_000  # from the election until a host has to have connected


class HostServers(Spawner):
    """The spawner of this host, and those of others by name. Each has room for some workers; 0: for any."""

    later_ns = LATER_NS

    def __init__(
        self,
        local: Spawner,
        away: Sequence[RemoteSpawner],
        kv: KV,
        room: int = 0,
        network: Mapping[str, str] = MappingProxyType({}),
    ):
        self.host, self.address, self.network = local.host, local.address, network
        self._local, self._away = local, {each.host: each for each in away}
        self.news = [each.mailbox for each in away]
        self.dealt: dict[int, str] = {}  # the host of each worker
        self._kv, self._room = kv, room
        self._lines = CoordinatorLines(self.host, self._away)
        self._num_decisions, self._counting = 0, threading.Lock()
        self._losing: dict[str, threading.Thread] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hosts", daemon=True)
        self._thread.start()

    def at(self, worker: int) -> Spawner:
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
                for spawner in self._away.values():
                    spawner.peer.heard_ns, spawner.peer.ended_ns = now_ns, spawner.peer.ended_ns and now_ns
            is_due = now_ns - ticked_ns >= TICK_S * 1e9
            ticked_ns = now_ns if is_due else ticked_ns
            for spawner in self._away.values():
                if is_due:
                    spawner.tick()
                is_open = not spawner.peer.is_lost and spawner.host not in self._losing
                if is_open and (why := self._why_lost(spawner, began_ns, now_ns)):
                    self._losing[spawner.host] = threading.Thread(target=self._lose, args=(spawner, why), daemon=True)
                    self._losing[spawner.host].start()
            self._lines.look()

    def _why_lost(self, away: RemoteSpawner, began_ns: int, now_ns: int) -> str:
        peer = away.peer
        if peer.broken:
            return f"it sent an invalid frame: {peer.broken}"
        if not peer.has_come:
            return "it did not connect" if now_ns - began_ns > _FIRST_NS else ""
        if peer.end.is_full:
            return "it stopped reading"
        return HostSight(peer.heard_ns, peer.ended_ns, peer.is_waiting, away.round_trips.worst_ns).why_lost(now_ns)

    def network_records(self) -> list[NetworkRecord]:
        """Returns the records of round trips that have changed."""
        living = [each for each in self._others if each.is_there]
        news = [record for each in living if (record := each.network_record()) is not None]
        self.round_trip_ns = max((each.reported_ns or 0 for each in living), default=0)
        return news

    def _lose(self, away: RemoteSpawner, why: str) -> None:
        with contextlib.suppress(CoordinatorUnavailableError):  # asked again at the next look
            if away.registered.lease_id:
                self._kv.revoke(Lease(away.registered.lease_id, 1))
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
    def _others(self) -> list[RemoteSpawner]:
        return [each for each in self._away.values() if each is not self._local]

    def go_on_after(self, results: ReplicatedResults) -> None:
        """Lets all other hosts keep what this one has heard before; one that lacks too much of it counts as lost."""
        self._num_decisions = results.count
        for spawner in self._others:
            try:
                lines = results.since(spawner.num_decisions)
            except CoordinatorUnavailableError as error:
                self._lose(spawner, f"it lacks results: {error}")
                continue
            for number, line in lines.items():
                spawner.keep(number, line)

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
    def adopting(
        self, preload: tuple[str, ...] = (), while_waiting: Callable[[], object] = lambda: None
    ) -> Iterator[None]:
        """As on one host; the agents of the others do the same there."""
        with contextlib.ExitStack() as stack:
            for each in {self._local, *self._away.values()}:
                stack.enter_context(each.adopting(preload, while_waiting))
            yield

    def end_descendants(self, patience_s: float = descendants.PATIENCE_S) -> None:
        """As on one host."""
        self._local.end_descendants(patience_s)

    def close(self) -> None:
        """Ends all processes."""
        for each in (*self._away.values(), self._local):
            each.close()
