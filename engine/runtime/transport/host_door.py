"""Sets up links between hosts: one worker listens, the other connects, and both prove that they belong to the run.

    worker that wants the link    listens, and reports its port to the agent
    agent                         sends both a token, and the port to the other worker
    the other worker              connects, presents the run's certificate over TLS 1.3, and sends the token

Rules: both ends present the run's certificate and accept no other. A token is valid for one link. In a network that the
user has declared trusted there is no TLS, and the token is the only proof. Strangers get no answer and are disconnected
after `GREET_S`, or earlier when there are too many: the oldest goes first, because a real worker is quick.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from engine.core.messages import LinkMessage
from engine.files.atomic_write import closing_fd
from engine.runtime.transport.link_wire import TlsWire, Wire

GREET_S = 10.0  # for the handshake and the token of one connection
_TOKEN_BYTES = 16
_MOST_GREETED = 64  # connections at a time
_PAUSE_S = 0.05  # when no descriptor or thread is left
_SILENT_MS = 30_000  # bytes without an acknowledgement: the other host is gone

OnLink = Callable[[LinkMessage, Wire | None], None]  # called in another thread; None: the connection failed


class HostDoor:
    """Connects one worker to workers of other hosts; `network` holds the run's certificate, or is empty without TLS."""

    def __init__(self, address: str, network: Mapping[str, str], on_link: OnLink):
        self._address, self._on_link = address, on_link
        self._tls = (_context(network, ssl.PROTOCOL_TLS_SERVER), _context(network, ssl.PROTOCOL_TLS_CLIENT))
        self._awaited: dict[bytes, LinkMessage] = {}
        self._changed = threading.Condition()
        self._listener: socket.socket | None = None
        self._greeted: list[socket.socket] = []  # not authenticated yet

    def port(self) -> int:
        """Returns the port on which this worker listens; opens it at the first call."""
        if self._listener is None:
            family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
            self._listener = socket.create_server((self._address, 0), family=family, backlog=_MOST_GREETED)
            threading.Thread(target=self._accept, args=(self._listener,), name="door", daemon=True).start()
        return int(self._listener.getsockname()[1])

    def take(self, message: LinkMessage) -> None:
        """Starts a link: connects if the message has a port, and otherwise waits for a peer with its token."""
        if message.port:
            threading.Thread(target=self._connect, args=(message,), name="connecting", daemon=True).start()
            return
        with self._changed:
            self._awaited[bytes.fromhex(message.token)] = message
            self._changed.notify_all()

    def _accept(self, listener: socket.socket) -> None:
        while listener.fileno() >= 0:
            try:
                end, _ = listener.accept()
                threading.Thread(target=self._greet, args=(end,), name="greeting", daemon=True).start()
            except (OSError, RuntimeError):
                time.sleep(_PAUSE_S)

    def _greet(self, end: socket.socket) -> None:
        message: LinkMessage | None = None
        try:
            end = self._secured(end, is_server=True)
            with self._room_for(end):
                message = self._proven(end, time.monotonic() + GREET_S)
        except OSError:  # includes TimeoutError and TLS errors
            pass
        if message is None:
            end.close()
        else:
            self._on_link(message, _wire(end))

    @contextlib.contextmanager
    def _room_for(self, end: socket.socket) -> Iterator[None]:
        """Counts a stranger during the block; too many, and the oldest are disconnected."""
        with self._changed:
            self._greeted.append(end)
            late, self._greeted = self._greeted[:-_MOST_GREETED], self._greeted[-_MOST_GREETED:]
            self._changed.notify_all()
        for stranger in late:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(stranger, socket.SHUT_RDWR)  # not TLS's: another thread is inside that socket
        try:
            yield
        finally:
            with self._changed:
                if end in self._greeted:
                    self._greeted.remove(end)

    def _proven(self, end: socket.socket, until_s: float) -> LinkMessage | None:
        """Returns the link whose token the peer sends; raises OSError if it sends none in time."""
        _shake_hands(end)
        token = b""
        while len(token) < _TOKEN_BYTES:
            end.settimeout(max(0.001, until_s - time.monotonic()))
            if not (more := end.recv(_TOKEN_BYTES - len(token))):
                raise OSError("it ended before its token")
            token += more
        with self._changed:
            is_over = lambda: token in self._awaited or end not in self._greeted  # noqa: E731
            self._changed.wait_for(is_over, until_s - time.monotonic())
            return self._awaited.pop(token, None)

    def _connect(self, message: LinkMessage) -> None:
        wire: Wire | None = None
        with contextlib.suppress(OSError):
            end = self._secured(socket.create_connection((message.address, message.port), GREET_S), is_server=False)
            try:
                _shake_hands(end)
                end.sendall(bytes.fromhex(message.token))
                wire = _wire(end)
            except OSError:
                end.close()
        self._on_link(message, wire)

    def _secured(self, end: socket.socket, *, is_server: bool) -> socket.socket:
        end.settimeout(GREET_S)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_MS)
        context = self._tls[0 if is_server else 1]
        if context is None:
            return end
        return context.wrap_socket(end, server_side=is_server, do_handshake_on_connect=False)

    def close(self) -> None:
        """Stops listening."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # unblocks accept
            self._listener.close()


class _ClosingSocket(ssl.SSLSocket):
    """Closes the socket if the connection was reset before TLS began; `ssl` alone would leak it."""

    def getpeername(self) -> Any:
        try:
            return super().getpeername()
        except OSError:
            self.close()
            raise


def _shake_hands(end: socket.socket) -> None:
    if isinstance(end, ssl.SSLSocket):
        end.do_handshake()


def _wire(end: socket.socket) -> Wire:
    return TlsWire(end) if isinstance(end, ssl.SSLSocket) else Wire(end)


def _context(network: Mapping[str, str], protocol: int) -> ssl.SSLContext | None:
    """Returns the TLS settings: this certificate at both ends, and no other; None without a certificate."""
    if not network:
        return None
    context = ssl.SSLContext(protocol)
    context.sslsocket_class = _ClosingSocket
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # one certificate is accepted, under any name
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags &= ~getattr(ssl, "VERIFY_X509_STRICT", 0)  # for authorities of the world, not for one run's
    context.load_verify_locations(cadata=network["certificate"])
    with _file(network["certificate"]) as certificate, _file(network["key"]) as key:
        context.load_cert_chain(certificate, key)
    return context


@contextlib.contextmanager
def _file(text: str) -> Iterator[str]:
    """Yields the path of an in-memory file, for a library that only reads files."""
    with closing_fd(os.memfd_create("bamboo-tls", os.MFD_CLOEXEC)) as fd:
        os.write(fd, text.encode())
        yield f"/proc/self/fd/{fd}"
