"""The bytes of a link: over a socket of one host, over TCP, or over TLS. Nothing here waits."""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Sequence
from typing import Protocol

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
