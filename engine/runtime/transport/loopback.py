"""The transport inside one process: the members of a group are threads, and a message is a copy in memory.

Rules: a message is there as soon as it is sent. It goes to the oldest receive of its key, which must have its epoch and
its specs. The end of a worker reaches the others as it does over sockets: what it has sent arrives, and a receive of
more fails. A worker that waits for the others of its group lets other threads have its turn.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from engine.core.errors import EnvironmentLacksError, TransferFailedError, ensure
from engine.models.layers import Tensors
from engine.runtime.device.device import HOST, Device
from engine.runtime.transport.group_end import EndChannel, GroupEnd
from engine.runtime.transport.link_cuts import LinkCuts
from engine.runtime.transport.tensor_spec import Border, difference
from engine.runtime.transport.transfer_key import AsideKey, ProgramKey
from engine.runtime.transport.transport import AnyKey, CutLink

_Address = tuple[int, ProgramKey | AsideKey]  # the other end, and the key


class Groups:
    """The groups of one run, each from its first member on."""

    def __init__(self) -> None:
        self.lock = threading.Condition()  # of everything that several workers reach
        self._gathering: dict[tuple[int, int, tuple[int, ...]], dict[int, LoopbackTransport]] = {}

    def ends(self, epoch: int, members: Sequence[int], attempt: int = 0) -> dict[int, LoopbackTransport]:
        """Returns the ends of a group by member, of those that have come so far."""
        return self._gathering.setdefault((epoch, attempt, tuple(members)), {})


class LoopbackBackend:
    """The groups of `worker`; `paused` gives up its thread's turn for the time of a block."""

    def __init__(
        self,
        groups: Groups,
        cuts: LinkCuts,
        worker: int,
        paused: Callable[[], AbstractContextManager[None]],
        device: Device = HOST,
    ):
        self._device = device
        self.cut: CutLink = cuts.cut
        self._cuts, self._groups, self._worker, self._paused = cuts, groups, worker, paused
        self._ends: list[LoopbackTransport] = []
        self._has_left = False

    def joining(self, epoch: int, members: Sequence[int], attempt: int = 0) -> LoopbackJoining:
        """Returns the attempt to join the group of an epoch; with a number it is one in advance."""
        ends = self._groups.ends(epoch, members, attempt)
        end = LoopbackTransport(self._cuts, self._worker, members, epoch, ends, self._groups.lock, self._device)
        self._ends.append(end)
        if self._has_left:
            end.abandon()
        return LoopbackJoining(end, self._paused, in_advance=attempt > 0)

    def open_collectives(self, name: str, workers: Sequence[int]) -> None:
        """Raises EnvironmentLacksError: torch has one process group for each process."""
        raise EnvironmentLacksError("sharded stages need a process for each worker, and this job runs in one process")

    def leave(self) -> None:
        """Breaks off all that this worker has begun or begins, as the end of its process would; any thread may call."""
        self._has_left = True
        for end in list(self._ends):
            end.abandon()


class LoopbackJoining:
    """One attempt to join a group."""

    def __init__(
        self, end: LoopbackTransport, paused: Callable[[], AbstractContextManager[None]], *, in_advance: bool = False
    ):
        self._end, self._paused, self._in_advance = end, paused, in_advance

    def join(self) -> LoopbackTransport:
        """Waits until all members have joined; raises TransferFailedError after `abandon`."""
        end = self._end
        end.cuts.await_whole(end.num_sent, lambda: end.is_closed)
        with self._paused(), end.lock:
            end.ends[end.worker] = end
            end.lock.notify_all()
            end.lock.wait_for(lambda: end.is_closed or len(end.ends) == len(end.num_sent))
        if end.is_closed:
            raise TransferFailedError("joining the others failed: it was abandoned")
        if not self._in_advance:
            end.begin()
        return end

    def abandon(self) -> None:
        """Ends a `join` in another thread, or leaves the group."""
        self._end.abandon()


class LoopbackTransport(GroupEnd):
    """The end of one worker in a group; `ends` has those of all members that have joined, `lock` guards them all."""

    def __init__(
        self,
        cuts: LinkCuts,
        worker: int,
        members: Sequence[int],
        epoch: int,
        ends: dict[int, LoopbackTransport],
        lock: threading.Condition,
        device: Device,
    ):
        super().__init__(cuts, members, epoch, device)
        self.worker, self.ends, self.lock = worker, ends, lock
        self.is_closed = False
        self.posted: dict[_Address, deque[tuple[int, Border]]] = {}
        self.early: dict[_Address, deque[tuple[int, Tensors]]] = {}  # sent, and not posted yet
        self.in_order: _LoopbackChannel[ProgramKey] = _LoopbackChannel(self)
        self.aside: _LoopbackChannel[AsideKey] = _LoopbackChannel(self)

    def match(self, address: _Address) -> None:
        """Hands the oldest message of an address to its oldest receive, if both are there."""
        posted, early = self.posted.get(address), self.early.get(address)
        if posted and early:
            (epoch, border), (sent_epoch, tensors) = posted.popleft(), early.popleft()
            source, key = address
            wrong = difference(tuple(spec.as_gradient() for spec in border), tensors)
            ensure(not wrong, f"{key} from worker {source} to {self.worker} has {wrong}")
            ensure(epoch == sent_epoch, f"{key} from worker {source} is of epoch {sent_epoch}, wanted in {epoch}")
            self.arrives(source, key, tensors)

    def lose(self, source: int) -> None:
        """Fails if a message of worker `source`, which has left, is still wanted."""
        if any(posted for (other, _), posted in self.posted.items() if other == source):
            self.fails(broken("from", source))

    def release_sent(self) -> None:
        """Does nothing: a message is a copy."""

    def abandon(self) -> None:
        """Leaves the group; a wait of another member for a message of this one fails."""
        self.cuts.leave(self)
        with self.lock:
            if not self.is_closed:
                self.is_closed = True
                for end in self.ends.values():
                    if not end.is_closed:
                        end.lose(self.worker)
                self.lock.notify_all()

    def close(self) -> None:
        """Leaves the group, in which no message is under way."""
        self.abandon()


class _LoopbackChannel(EndChannel[AnyKey]):
    """One of the two channels of an end."""

    def __init__(self, end: LoopbackTransport):
        super().__init__(end)
        self._end = end

    def post(self, source: int, key: AnyKey, border: Border) -> None:
        """Posts the receive of one message."""
        end, address = self._end, (source, key)
        with end.lock:
            if not end.early.get(address) and (end.is_closed or end.ends[source].is_closed):
                raise broken("from", source)
            end.posted.setdefault(address, deque()).append((end.epoch, border))
            end.num_posted[source] += 1
            end.match(address)

    def _begin(self, target: int, key: AnyKey, tensors: Tensors) -> None:
        """Copies one message to its target."""
        end, copies = self._end, tuple(tensor.detach().contiguous().clone() for tensor in tensors)
        with end.lock:
            other = end.ends[target]
            if end.is_closed or other.is_closed:
                raise broken("to", target)
            other.early.setdefault((end.worker, key), deque()).append((end.epoch, copies))
            other.match((end.worker, key))


def broken(direction: str, peer: int) -> TransferFailedError:
    """Returns the error of a transfer whose other end has left."""
    return TransferFailedError(f"transfer {direction} worker {peer} failed: its other end has left", peer)
