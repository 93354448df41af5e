"""Where links between hosts begin: one worker listens, the other connects, and both prove that they are of the run.

    worker that wants the link    listens; tells the agent its port
    agent                         tells both a token, and the other one the port
    the other worker              connects, shows the run's certificate over TLS 1.3, and says the token

Rules: both ends show the certificate of the run and take no other one, and a token is good for one link. In a network
that the user trusts by name there is no TLS, and the token alone is the proof. Strangers get no answer and are closed
after `GREET_S`, or before if others come: the one that has been here for longest makes room, as a worker is quick.
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
from engine.runtime.transport.link_wire import SocketWire, TlsWire, Wire

GREET_S = 10.0  # for the handshake and the token of one connection
_TOKEN_BYTES = 16
_MOST_GREETED = 64  # connections at a time
_PAUSE_S = 0.05  # when no descriptor or thread is left
_SILENT_MS = 30_000  # bytes without an acknowledgement: the other host is gone

OnLink = Callable[[LinkMessage, Wire | None], None]  # is called in another thread; None: there is no connection


class HostDoor:
    """The links of one worker to workers of other hosts; `network` has the certificate of the run, or nothing."""

    def __init__(self, address: str, network: Mapping[str, str], given: OnLink):
        self._address, self._given = address, given
        self._tls = (_context(network, ssl.PROTOCOL_TLS_SERVER), _context(network, ssl.PROTOCOL_TLS_CLIENT))
        self._awaited: dict[bytes, LinkMessage] = {}
        self._changed = threading.Condition()
        self._listener: socket.socket | None = None
        self._greeted: list[socket.socket] = []  # which have not shown yet that they are of the run

    def port(self) -> int:
        """Returns the port on which this worker listens, from its first link on."""
        if self._listener is None:
            family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
            self._listener = socket.create_server((self._address, 0), family=family, backlog=_MOST_GREETED)
            threading.Thread(target=self._accept, args=(self._listener,), name="door", daemon=True).start()
        return int(self._listener.getsockname()[1])

    def take(self, told: LinkMessage) -> None:
        """Begins a link: connects if there is a port, and otherwise awaits its token."""
        if told.port:
            threading.Thread(target=self._connect, args=(told,), name="connecting", daemon=True).start()
            return
        with self._changed:
            self._awaited[bytes.fromhex(told.token)] = told
            self._changed.notify_all()

    def _accept(self, listener: socket.socket) -> None:
        while listener.fileno() >= 0:
            try:
                end, _ = listener.accept()
                threading.Thread(target=self._greet, args=(end,), name="greeting", daemon=True).start()
            except (OSError, RuntimeError):
                time.sleep(_PAUSE_S)

    def _greet(self, end: socket.socket) -> None:
        told: LinkMessage | None = None
        try:
            end = self._secured(end, is_server=True)
            with self._room_for(end):
                told = self._proven(end, time.monotonic() + GREET_S)
        except OSError:  # TimeoutError and the errors of TLS are some too
            pass
        if told is None:
            end.close()
        else:
            self._given(told, _wire(end))

    @contextlib.contextmanager
    def _room_for(self, end: socket.socket) -> Iterator[None]:
        """Counts a stranger inside the block; those who have been here for longest are hung up for it."""
        with self._changed:
            self._greeted.append(end)
            late, self._greeted = self._greeted[:-_MOST_GREETED], self._greeted[-_MOST_GREETED:]
            self._changed.notify_all()
        for each in late:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(each, socket.SHUT_RDWR)  # not that of TLS, which another thread is in
        try:
            yield
        finally:
            with self._changed:
                if end in self._greeted:
                    self._greeted.remove(end)

    def _proven(self, end: socket.socket, until_s: float) -> LinkMessage | None:
        """Returns the link whose token a connection says; raises OSError if it says none in time."""
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

    def _connect(self, told: LinkMessage) -> None:
        wire: Wire | None = None
        with contextlib.suppress(OSError):
            end = self._secured(socket.create_connection((told.address, told.port), GREET_S), is_server=False)
            try:
                _shake_hands(end)
                end.sendall(bytes.fromhex(told.token))
                wire = _wire(end)
            except OSError:
                end.close()
        self._given(told, wire)

    def _secured(self, end: socket.socket, *, is_server: bool) -> socket.socket:
        end.settimeout(GREET_S)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_MS)
        context = self._tls[0 if is_server else 1]
        if context is None:
            return end
        return context.wrap_socket(end, server_side=is_server, do_handshake_on_connect=False)

    def close(self) -> None:
        """Listens no more."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # ends the wait for the next connection
            self._listener.close()


class _ClosingSocket(ssl.SSLSocket):
    """A socket that closes when its connection was reset before TLS began: `ssl` would leave it open."""

    def getpeername(self) -> Any:
        """Returns the address of the other end; raises OSError if there is none."""
        try:
            return super().getpeername()
        except OSError:
            self.close()
            raise


def _shake_hands(end: socket.socket) -> None:
    if isinstance(end, ssl.SSLSocket):
        end.do_handshake()


def _wire(end: socket.socket) -> Wire:
    return TlsWire(end) if isinstance(end, ssl.SSLSocket) else SocketWire(end)


def _context(network: Mapping[str, str], protocol: int) -> ssl.SSLContext | None:
    """Returns the settings of TLS: this certificate at both ends, and no other; None without one."""
    if not network:
        return None
    context = ssl.SSLContext(protocol)
    context.sslsocket_class = _ClosingSocket
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # one certificate is taken, under any name
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags &= ~getattr(ssl, "VERIFY_X509_STRICT", 0)  # for authorities of the world, not for one run's
    context.load_verify_locations(cadata=network["certificate"])
    with _file(network["certificate"]) as certificate, _file(network["key"]) as key:
        context.load_cert_chain(certificate, key)
    return context


@contextlib.contextmanager
def _file(text: str) -> Iterator[str]:
    """Yields the path of a file in memory, for a library that reads files."""
    fd = os.memfd_create("bamboo-tls", os.MFD_CLOEXEC)
    try:
        os.write(fd, text.encode())
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)
