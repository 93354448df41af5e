"""The bytes of a link, over a Unix socket, TCP or TLS. Nothing here blocks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import select
import socket
import ssl
import struct
import termios
import threading
import time
from collections.abc import Callable, Sequence

from engine.core.errors import InvariantError
from engine.core.links import Disturbance, Flow, FrameCount

_MAX_RECORD = 16 << 10  # bytes of TLS that travel together
# What the kernel tells of a connection (linux/tcp.h): the bytes of a segment, the smoothed round trip in microseconds,
# the segments that may be under way, the least round trip, and the rate in bytes a second.
_TCP_INFO = struct.Struct("16xI48xI8xI64xI8xQ")
_NOT_FULL = 7  # the byte whose lowest bit says that the sender gave the link too little when the rate was measured
_AHEAD_US, _LEAST_BYTES = 5_000, 64 << 10  # that state may be ahead of an idle link
_GONE = (errno.EPIPE, errno.ECONNRESET, errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EBADF)

Pieces = Sequence[bytes | memoryview]


class Wire:
    """One end of a link, in clear text."""

    is_drained_short = True  # a read that does not fill its memory has read everything

    def __init__(self, end: socket.socket):
        end.setblocking(False)
        self._end = end

    def fileno(self) -> int:
        """Returns the descriptor, readable once data has arrived."""
        return self._end.fileno()

    def write(self, buffers: Pieces) -> int:
        """Returns the number of bytes sent. Raises BlockingIOError if none could be, OSError if the link is closed."""
        return self._end.sendmsg(buffers, (), socket.MSG_NOSIGNAL)

    def read_into(self, room: memoryview) -> int:
        """Returns the number of bytes read, 0 once the link is closed. Raises BlockingIOError if none are ready."""
        try:
            return self._end.recv_into(room)
        except BlockingIOError:
            raise
        except OSError as error:
            if error.errno in _GONE:
                return 0
            raise

    @property
    def has_room(self) -> bool:
        """Whether one more piece would travel at once, and not wait behind bytes that fill a link to another host.

        What is sent behind it would wait too. The kernel keeps the best of some rates, so longer round trips count too.
        """
        if self._end.family == socket.AF_UNIX:
            return True
        (waiting,) = struct.unpack("i", fcntl.ioctl(self._end.fileno(), termios.TIOCOUTQ, bytes(4)))
        info = self._end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)  # an old kernel tells less
        segment, now_us, segments, least_us, rate = _TCP_INFO.unpack(info.ljust(_TCP_INFO.size, b"\0"))
        most_us = 2 * least_us + _AHEAD_US
        most = min(segment * segments, rate * most_us / 1e6) if now_us <= most_us else 0
        return bool(waiting <= max(_LEAST_BYTES, most))

    @property
    def bytes_per_s(self) -> int:
        """The rate at which a link to another host took bytes when it was full; 0: on one host, or it never was."""
        if self._end.family == socket.AF_UNIX:
            return 0
        info = self._end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size).ljust(_TCP_INFO.size, b"\0")
        is_full = not info[_NOT_FULL] & 1
        return _TCP_INFO.unpack(info)[-1] if is_full else 0

    def close(self) -> None:
        """Closes this end."""
        self._end.close()


class TlsWire(Wire):
    """One end of a TLS link, after the handshake."""

    is_drained_short = False  # decrypted bytes may still be buffered

    def write(self, buffers: Pieces) -> int:
        """As in clear text."""
        total = 0
        if len(buffers) > 1 and sum(map(len, buffers)) <= _MAX_RECORD:
            buffers = [b"".join(buffers)]
        for piece in buffers:
            try:
                count = self._end.send(piece)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                if total:
                    return total
                raise BlockingIOError from error
            total += count
            if count < len(piece):
                return total
        return total

    def read_into(self, room: memoryview) -> int:
        """As in clear text."""
        try:
            return self._end.recv_into(room)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error
        except OSError:  # includes TLS errors: a corrupted link is a closed link
            return 0


# A disturbed link: a thread sits between a worker and the wire of its link and delays or drops bytes as the fault says.
#
#     worker   <-- socket pair -->   thread   <-- the wire -->   peer
#
# The socket pair replaces the wire, so a link without a fault pays nothing. Rings need no proxy: the header of a piece
# travels over the wire, and no piece is read before its header.

_READ_BYTES = 64 << 10
_AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER: a close resets the connection

Met = Callable[[int, int], None]  # called once, in the link's thread, with the frames disturbed there and back


def disturbed(wire: Wire, disturbance: Disturbance, rest: bytes, received: FrameCount, met: Met) -> Wire:
    """Returns the worker's new end in place of `wire`, which a thread takes over.

    `rest` is the unsent remainder of a frame: once TLS has begun a record, all of it has to follow.
    """
    near, far = socket.socketpair()
    began_ns = time.monotonic_ns()
    there, back = (
        Flow("there", disturbance, began_ns, FrameCount(left=len(rest))),
        Flow("back", disturbance, began_ns, received),
    )
    if rest:
        there.put(rest, began_ns)
    passage = _Passage(_Side(Wire(far), there, back), _Side(wire, back, there), met)
    threading.Thread(target=passage.run, name="disturbed link", daemon=True).start()
    return Wire(near)


class _Side:
    """One end of the proxy: bytes read from it enter `coming`; bytes of `going` are written to it when due."""

    def __init__(self, wire: Wire, coming: Flow, going: Flow):
        self.wire, self.coming, self.going = wire, coming, going
        self.has_ended = self.is_full = False
        self._room = memoryview(bytearray(_READ_BYTES))

    def pull(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while not self.has_ended and not self.coming.is_over:
                if count := self.wire.read_into(self._room):
                    self.coming.put(bytes(self._room[:count]), time.monotonic_ns())
                self.has_ended = not count

    def push(self) -> None:
        self.is_full = False
        try:
            while data := self.going.due(time.monotonic_ns()):
                self.going.passed(self.wire.write([data]))
        except BlockingIOError:
            self.is_full = True

    @property
    def awaited(self) -> int:
        return (0 if self.has_ended else select.POLLIN) | (select.POLLOUT if self.is_full else 0)


class _Passage:
    """The proxy thread between `near`, the worker's end, and `far`, the wire."""

    def __init__(self, near: _Side, far: _Side, met: Met):
        self._near, self._far, self._met = near, far, met
        self._is_told = False

    def run(self) -> None:
        with contextlib.suppress(OSError, InvariantError):
            while self._pass_on():
                self._wait()
        self._far.wire.close()  # first: the peer knows of a reset before the worker acts on it
        self._near.wire.close()

    def _pass_on(self) -> bool:
        """Forwards the bytes that are due; returns False once the link is closed."""
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
