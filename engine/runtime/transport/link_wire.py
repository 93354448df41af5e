"""The bytes of a link: over a socket of one host, over TCP, or over TLS. Nothing here waits."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from engine.core.errors import InvariantError
from engine.core.links import Disturbance, Flow, FrameCount

_MAX_RECORD = 16 << 10  # bytes of TLS that travel together
_GONE = (errno.EPIPE, errno.ECONNRESET, errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EBADF)

Pieces = Sequence[bytes | memoryview]


class Wire(Protocol):
    """One end."""

    is_drained_short: bool  # whether a read that does not fill its memory has read all

    def fileno(self) -> int:
        """Returns the descriptor that is readable when something has come."""

    def write(self, buffers: Pieces) -> int:
        """Returns how many bytes have left; raises BlockingIOError for none, OSError at the end of the link."""

    def read_into(self, room: memoryview) -> int:
        """Returns how many bytes have come, 0 at the end of the link; raises BlockingIOError for none now."""

    def close(self) -> None:
        """Closes this end."""


class SocketWire:
    """An end in clear text."""

    is_drained_short = True

    def __init__(self, end: socket.socket):
        end.setblocking(False)
        self._end = end

    def fileno(self) -> int:
        """Returns the descriptor that is readable when something has come."""
        return self._end.fileno()

    def write(self, buffers: Pieces) -> int:
        """Returns how many bytes have left; raises BlockingIOError for none, OSError at the end of the link."""
        return self._end.sendmsg(buffers, (), socket.MSG_NOSIGNAL)

    def read_into(self, room: memoryview) -> int:
        """Returns how many bytes have come, 0 at the end of the link; raises BlockingIOError for none now."""
        try:
            return self._end.recv_into(room)
        except BlockingIOError:
            raise
        except OSError as error:
            if error.errno in _GONE:
                return 0
            raise

    def close(self) -> None:
        """Closes this end."""
        self._end.close()


class TlsWire(SocketWire):
    """An end whose handshake is over."""

    is_drained_short = False  # bytes may lie decrypted in memory

    def write(self, buffers: Pieces) -> int:
        """Returns how many bytes have left; raises BlockingIOError for none, OSError at the end of the link."""
        total = 0
        if len(buffers) > 1 and sum(map(len, buffers)) <= _MAX_RECORD:
            buffers = [b"".join(buffers)]
        for each in buffers:
            try:
                count = self._end.send(each)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                if total:
                    return total
                raise BlockingIOError from error
            total += count
            if count < len(each):
                return total
        return total

    def read_into(self, room: memoryview) -> int:
        """Returns how many bytes have come, 0 at the end of the link; raises BlockingIOError for none now."""
        try:
            return self._end.recv_into(room)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error
        except OSError:  # also of TLS: a link with a wrong byte has ended
            return 0


# A disturbed link: a thread stands between a worker and the wire of its link, and holds bytes up as a fault says.
#
#     worker   <-- socket pair -->   thread   <-- the wire -->   peer
#
# The link has an end of the pair in the place of its wire, so that a link without a fault pays nothing. Pieces in rings
# need no more: their headers come over the wire, and a reader takes no piece before its header.

_READ_BYTES = 64 << 10
_AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER: a close resets the connection

Met = Callable[[int, int], None]  # gets the frames that were met, there and back, once; in the thread of the link


def disturbed(wire: Wire, disturbance: Disturbance, rest: bytes, received: FrameCount, met: Met) -> Wire:
    """Returns the end for a worker in the place of `wire`, which a thread has from now on.

    `rest` are the bytes that are left of a frame that is leaving: TLS takes it as a whole, once it has begun with it.
    """
    near, far = socket.socketpair()
    began_ns = time.monotonic_ns()
    there, back = (
        Flow("there", disturbance, began_ns, FrameCount(left=len(rest))),
        Flow("back", disturbance, began_ns, received),
    )
    if rest:
        there.put(rest, began_ns)
    passage = _Passage(_Side(SocketWire(far), there, back), _Side(wire, back, there), met)
    threading.Thread(target=passage.run, name="disturbed link", daemon=True).start()
    return SocketWire(near)


class _Side:
    """One end of the passage: bytes from it go into `coming`, and those of `going` leave by it when they are due."""

    def __init__(self, wire: Wire, coming: Flow, going: Flow):
        self.wire, self.coming, self.going = wire, coming, going
        self.has_ended = self.is_full = False
        self._room = memoryview(bytearray(_READ_BYTES))

    def pull(self) -> None:
        """Reads all that has come."""
        with contextlib.suppress(BlockingIOError):
            while not self.has_ended and not self.coming.is_over:
                if count := self.wire.read_into(self._room):
                    self.coming.put(bytes(self._room[:count]), time.monotonic_ns())
                self.has_ended = not count

    def push(self) -> None:
        """Writes the bytes that are due."""
        self.is_full = False
        try:
            while data := self.going.due(time.monotonic_ns()):
                self.going.passed(self.wire.write([data]))
        except BlockingIOError:
            self.is_full = True

    @property
    def awaited(self) -> int:
        """The events that this end waits for."""
        return (0 if self.has_ended else select.POLLIN) | (select.POLLOUT if self.is_full else 0)


class _Passage:
    """The thread between `near`, the end of the worker, and `far`, the wire."""

    def __init__(self, near: _Side, far: _Side, met: Met):
        self._near, self._far, self._met = near, far, met
        self._is_told = False

    def run(self) -> None:
        """Passes bytes on until one end has ended."""
        with contextlib.suppress(OSError, InvariantError):
            while self._pass_on():
                self._wait()
        self._near.wire.close()
        self._far.wire.close()

    def _pass_on(self) -> bool:
        """Passes on the bytes that may pass now; returns False at the end of the link."""
        near, far = self._near, self._far
        for side in (near, far):
            side.pull()
        if not self._is_told and (num_met := (near.coming.num_met, far.coming.num_met)) != (0, 0):
            self._is_told = True
            self._met(*num_met)
        for side in (near, far):
            side.push()
        if near.coming.is_over or far.coming.is_over:
            with socket.socket(fileno=os.dup(far.wire.fileno())) as same:
                same.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
            return False
        return not near.has_ended and (not far.has_ended or far.coming.keeps_end)

    def _wait(self) -> None:
        poll = select.poll()
        for side in (self._near, self._far):
            if side.awaited:
                poll.register(side.wire.fileno(), side.awaited)
        due_ns = min((side.going.due_ns for side in (self._near, self._far) if not side.is_full), default=math.inf)
        poll.poll(None if due_ns == math.inf else max(0, math.ceil((due_ns - time.monotonic_ns()) / 1e6)))
