"""A wire without tags, with the rules of NCCL, that checks the key of each message.

- The n-th receive that worker b issues from worker a takes the n-th send that a issues to b.
- Each worker has one queue. A group begins when the groups that the worker issued before have ended, and ends when all
  of its operations have ended. The worker itself does not wait.
- A send may wait until its receive has begun, or end at once: `buffers` decides for each send.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class MismatchError(Exception):
    """A receive has met a send with another key."""


class Operation(NamedTuple):
    """One end of a message. `size` is all that a wire without tags knows of its content."""

    is_send: bool
    peer: int
    key: Hashable
    payload: Any = None
    size: int = 0


@dataclass(eq=False)
class _Group:
    worker: int
    left: int  # operations that have not ended
    operations: Sequence[Operation]


@dataclass
class _Pair:
    """The ends that have begun and have not met, in order, from one worker to another."""

    sends: deque[tuple[_Group, Operation]] = field(default_factory=deque)
    receives: deque[tuple[_Group, Operation]] = field(default_factory=deque)


class OrderedWire:
    """The queues of all workers. With `checks_keys` False a message is only compared by its size."""

    def __init__(self, buffers: Callable[[], bool] = lambda: False, checks_keys: bool = True):
        self._buffers = buffers
        self._checks_keys = checks_keys
        self._queues: dict[int, deque[_Group]] = defaultdict(deque)
        self._pairs: dict[tuple[int, int], _Pair] = defaultdict(_Pair)
        self.arrived: dict[tuple[int, Hashable], Any] = {}  # by taker and key that it asked for
        self.num_delivered = 0

    def issue(self, worker: int, operations: Sequence[Operation]) -> None:
        """Issues operations as one; raises MismatchError if a receive meets the wrong send."""
        self._queues[worker].append(_Group(worker, len(operations), operations))
        if len(self._queues[worker]) == 1:
            self._begin([worker])

    def waiting(self) -> list[tuple[int, Operation]]:
        """Returns the operations at the heads of the queues, with their workers: empty if nothing is under way."""
        return [(worker, each) for worker, queue in self._queues.items() if queue for each in queue[0].operations]

    def _begin(self, workers: list[int]) -> None:
        """Begins the groups at the heads of these queues, and those behind groups that end."""
        while workers:
            worker = workers.pop()
            queue = self._queues[worker]
            if not queue:
                continue
            group = queue[0]
            for operation in group.operations:
                ends = (worker, operation.peer) if operation.is_send else (operation.peer, worker)
                pair = self._pairs[ends]
                (pair.sends if operation.is_send else pair.receives).append((group, operation))
                if operation.is_send and self._buffers():
                    self._end(group, workers)
                    pair.sends[-1] = (_Group(worker, -1, ()), operation)
                self._meet(pair, ends[1], workers)

    def _meet(self, pair: _Pair, taker: int, workers: list[int]) -> None:
        while pair.sends and pair.receives:
            (sender, sent), (receiver, received) = pair.sends.popleft(), pair.receives.popleft()
            if sent.size != received.size or (self._checks_keys and sent.key != received.key):
                raise MismatchError(f"worker {taker} asked worker {sender.worker} for {received.key}: {sent.key} came")
            self.arrived[taker, received.key] = sent.payload
            self.num_delivered += 1
            self._end(receiver, workers)
            if sender.left > 0:
                self._end(sender, workers)

    def _end(self, group: _Group, workers: list[int]) -> None:
        group.left -= 1
        if group.left == 0:
            self._queues[group.worker].popleft()
            workers.append(group.worker)
