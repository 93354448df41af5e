"""A watch on etcd that mends itself: after a break it goes on from the revision that it has come to.

Rules: the thread that follows etcd never gives up silently; what ends it is raised by `take`. Before each new stream
the store is asked who and how far it is: one that has lost data would else be watched for ever in vain.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import grpc

from engine.core.errors import CoordinatorUnavailableError
from engine.core.store.exactly_once import is_receipt
from engine.core.store.kv import EventKind, WatchEvent
from engine.runtime.store.etcd_calls import PAUSE_S, EtcdCalls, rpc
from engine.runtime.store.etcd_keys import KeySpace

# A stream needs no end; that it has one puts the mending to the test several times an hour.
_STREAM_S = 900.0
_DELETE = 1  # of mvccpb.Event.EventType


class EtcdWatch:
    """The changes under a prefix; readable (`fileno`) when there is something to take."""

    def __init__(self, calls: EtcdCalls, keys: KeySpace, prefix: str, from_revision: int):
        assert from_revision >= 1, "a watch starts at a revision: read the prefix first"
        calls.check_process()
        self._calls = calls
        self._keys = keys
        self._prefix = prefix
        self._next = from_revision
        self._cluster_id = 0
        self._store_revision = 0
        self._until_s = time.monotonic() + calls.deadline_s  # when the link must be mended; infinite while it holds
        self._arrived: deque[WatchEvent] = deque()
        self._error: CoordinatorUnavailableError | None = None
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._stream: Any = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="etcd-watch", daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._ended.is_set()

    def fileno(self) -> int:
        """Returns the descriptor to wait on."""
        return self._fd

    def take(self) -> Sequence[WatchEvent]:
        """Returns what has arrived, without waiting; raises what ended the watch, when everything is taken."""
        self._calls.check_process()
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        events = [self._arrived.popleft() for _ in range(len(self._arrived))]
        if self._error is not None:
            if not events:
                raise self._error
            os.eventfd_write(self._fd, 1)
        return events

    def close(self) -> None:
        """Ends the watch; a second time nothing happens."""
        with self._lock:
            if self.closed:
                return
            self._ended.set()
            if self._stream is not None:
                self._stream.cancel()
        self._thread.join()
        os.close(self._fd)

    def _run(self) -> None:
        try:
            while not self.closed:
                self._ask_store()
                self._follow()
        except CoordinatorUnavailableError as error:
            self._error = error
            os.eventfd_write(self._fd, 1)

    def _ask_store(self) -> None:
        """Waits for the store to answer, and makes sure that it is the one that was watched."""
        start, end = self._keys.far_range(self._prefix)
        reply = None
        while reply is None:
            if self.closed:
                return
            request = rpc.RangeRequest(key=start, range_end=end, count_only=True)
            reply = self._calls.attempt("Range", request, self._until_s)
        self._cluster_id = self._cluster_id or reply.header.cluster_id
        if reply.header.cluster_id != self._cluster_id or reply.header.revision < self._next - 1:
            raise CoordinatorUnavailableError("etcd has come back without what it held: it is not the same store")
        self._store_revision = reply.header.revision

    def _follow(self) -> None:
        """Takes in one stream until it breaks."""
        done = threading.Event()
        try:
            with self._lock:
                if self.closed:
                    return
                self._stream = self._calls.open_watch(self._requests(done), _STREAM_S)
            reason = self._take_in(self._stream)
        except grpc.RpcError as error:
            reason = error.details()
        finally:
            done.set()
            if self._stream is not None:
                self._stream.cancel()
        # Why it broke is found out when the store is asked; but streams that break at once must come to an end too.
        now_s = time.monotonic()
        self._until_s = min(self._until_s, now_s + self._calls.deadline_s)
        if now_s >= self._until_s:
            raise CoordinatorUnavailableError(f"etcd refuses to be watched: {reason}")
        self._ended.wait(PAUSE_S)

    def _requests(self, done: threading.Event) -> Iterator[Any]:
        start, end = self._keys.far_range(self._prefix)
        # Of the very revision that it was compacted at, etcd brings what it still has and calls that everything. So a
        # watch of the past starts one revision early. One of the future need not, and then etcd serves it at once.
        first = self._next if self._next > self._store_revision else max(1, self._next - 1)
        create = rpc.WatchCreateRequest(key=start, range_end=end, start_revision=first)
        yield rpc.WatchRequest(create_request=create)
        done.wait()  # etcd's proxy ends a stream when its requests end

    def _take_in(self, stream: Any) -> str:
        """Hands on what a stream brings; returns why etcd ended the watch."""
        for reply in stream:
            if reply.compact_revision:
                self._hand_on([WatchEvent(EventKind.GAP, self._prefix, reply.compact_revision)])
                self._next = reply.compact_revision + 1
            if reply.canceled:
                return str(reply.cancel_reason)
            self._until_s = math.inf
            if reply.events:
                # All changes of a revision come in one reply.
                events = [self._event(each) for each in reply.events if each.kv.mod_revision >= self._next]
                self._next = max(self._next, reply.events[-1].kv.mod_revision + 1)
                self._hand_on([event for event in events if not is_receipt(event.key)])
        return "the stream has ended"

    def _event(self, each: Any) -> WatchEvent:
        kind = EventKind.DELETE if each.type == _DELETE else EventKind.PUT
        return WatchEvent(kind, self._keys.near(each.kv.key), each.kv.mod_revision, each.kv.value)

    def _hand_on(self, events: Sequence[WatchEvent]) -> None:
        if events:
            self._arrived.extend(events)
            os.eventfd_write(self._fd, 1)
