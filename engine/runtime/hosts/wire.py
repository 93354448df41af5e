"""The wire between hosts: one gRPC stream in both directions per host, JSON in bytes, mutual TLS with the run's key.

Rules: both ends show the certificate of the run and take no other one. gRPC refuses a frame that is too long before it
is read. A frame of another form ends its connection.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from engine.core.errors import EnvironmentLacksError, InvariantError
from engine.core.hosts.host_messages import (
    MOST_BYTES,
    HailedHostMessage,
    HelloHostMessage,
    frame,
    read_frame,
)
from engine.core.message_codec import Message
from engine.runtime.hosts.run_certificate import NAME, RunCertificate
from engine.runtime.hosts.stream_end import StreamEnd

_SERVICE, _METHOD = "bamboo.Hosts", "Join"
_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.so_reuseport", 0),  # no other process of this user shares the port
    ("grpc.max_receive_message_length", MOST_BYTES),
    ("grpc.max_send_message_length", MOST_BYTES),
)
_CONNECT_S = 1.0
_AGAIN_S = 0.02  # from the end of a connection to the next attempt
_GRACE_S = 0.5  # for the last frames

Deliver = Callable[[Message, bytes], None]


class HostPeer:
    """Another host, as the wire sees it: its end of the stream, and who takes its frames."""

    def __init__(self, incarnation: str, deliver: Deliver):
        self.incarnation = incarnation
        self.end = StreamEnd()
        self.deliver = deliver
        self.heard_ns = time.monotonic_ns()
        self.ended_ns: int | None = None
        self.has_come = False
        self.is_waiting = False  # a frame of it is being delivered
        self.is_lost = False

    def silent_ns(self) -> int:
        """Returns the time for which it has had no stream, or has said nothing."""
        now_ns = time.monotonic_ns()
        return now_ns - min(self.heard_ns, self.ended_ns or now_ns)

    def came(self) -> None:
        """Notes that it has a stream now."""
        self.heard_ns, self.ended_ns, self.has_come = time.monotonic_ns(), None, True

    def take(self, connection: int, data: bytes) -> bool:
        """Delivers a frame; returns whether the connection is still the present one."""
        header, packet = read_frame(data)
        self.is_waiting = True
        try:
            return self.end.take(connection, lambda: self.deliver(header, packet))
        finally:
            self.heard_ns = time.monotonic_ns()
            self.is_waiting = False


class WireServer:
    """Listens on `address` for the streams of hosts, as a context; `port` is chosen by the kernel."""

    def __init__(self, address: str, made: RunCertificate):
        self._peers: dict[str, HostPeer] = {}
        self._pool = ThreadPoolExecutor(max_workers=256, thread_name_prefix="hosts")
        self._server = grpc.server(self._pool, options=_OPTIONS)
        handler = grpc.stream_stream_rpc_method_handler(self._join)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler}),))
        pair = ((made.key.encode(), made.certificate.encode()),)
        own = made.certificate.encode()
        credentials = grpc.ssl_server_credentials(pair, own, require_client_auth=True)
        where = f"[{address}]" if ":" in address else address
        try:
            self.port = self._server.add_secure_port(f"{where}:0", credentials)
        except RuntimeError as error:
            raise EnvironmentLacksError(f"nothing can listen on {address}: {error}") from error
        self._server.start()

    def admit(self, name: str, peer: HostPeer) -> None:
        """Takes the streams of a host from now on."""
        self._peers[name] = peer

    def _join(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        peer, received = self._greeted(requests, context)
        connection = peer.end.connect()
        peer.came()
        threading.Thread(target=_read, args=(peer, connection, requests, context), name="host", daemon=True).start()
        yield frame(HailedHostMessage(peer.end.received))
        peer.end.resume(connection, received)
        yield from peer.end.frames(connection)

    def _greeted(self, requests: Iterator[bytes], context: Any) -> tuple[HostPeer, int]:
        """Returns the host whose stream begins, and the number of frames that it has; ends the call of any other."""
        hello: Message | None = None
        with contextlib.suppress(InvariantError, StopIteration):
            hello, _ = read_frame(next(requests))
        if isinstance(hello, HelloHostMessage):
            peer = self._peers.get(hello.name)
            if peer is not None and peer.incarnation == hello.incarnation and not peer.is_lost:
                return peer, hello.received
        context.abort(grpc.StatusCode.PERMISSION_DENIED, "no host of this run")
        raise InvariantError("gRPC has ended the call")

    def close(self) -> None:
        """Sends the last frames, and ends all streams."""
        for peer in self._peers.values():
            peer.end.close()
        self._server.stop(_GRACE_S).wait()
        self._pool.shutdown(wait=False)


def _read(peer: HostPeer, connection: int, requests: Iterator[bytes], context: Any) -> None:
    """Delivers the frames of one connection until it ends."""
    try:
        for data in requests:
            if not peer.take(connection, data):
                return
    except InvariantError:
        context.cancel()
    except Exception:  # noqa: S110 - gRPC has no public name for the end of a stream
        pass
    finally:
        if peer.end.is_present(connection):
            peer.ended_ns = time.monotonic_ns()


class WireClient:
    """The stream of this host to the coordinator's, in a thread; connects again while it is not closed."""

    def __init__(
        self,
        name: str,
        incarnation: str,
        place: str,
        made: RunCertificate,
        deliver: Deliver,
        on_end: Callable[[], None] = lambda: None,
    ):
        """`on_end` is called when a connection has ended."""
        self.peer = HostPeer(incarnation, deliver)
        self._on_end = on_end
        self._name, self._place = name, place
        own = made.certificate.encode()
        self._credentials = grpc.ssl_channel_credentials(own, made.key.encode(), own)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stream", daemon=True)
        self._thread.start()

    @property
    def end(self) -> StreamEnd:
        """This end of the stream."""
        return self.peer.end

    def _run(self) -> None:
        while not self._is_closed.is_set():
            options = (*_OPTIONS, ("grpc.ssl_target_name_override", NAME), ("grpc.initial_reconnect_backoff_ms", 50))
            with grpc.secure_channel(self._place, self._credentials, options=options) as channel:
                try:
                    grpc.channel_ready_future(channel).result(_CONNECT_S)
                    self._follow(channel)
                except (grpc.RpcError, grpc.FutureTimeoutError, InvariantError):
                    pass
            if self.peer.ended_ns is None:
                self.peer.ended_ns = time.monotonic_ns()
            self._on_end()
            self._is_closed.wait(_AGAIN_S)

    def _follow(self, channel: Any) -> None:
        connection = self.end.connect()
        method = channel.stream_stream(f"/{_SERVICE}/{_METHOD}")
        call = method(self._sent(connection))
        try:
            for number, data in enumerate(call):
                if number:
                    if not self.peer.take(connection, data):
                        return
                    continue
                hailed, _ = read_frame(data)
                if not isinstance(hailed, HailedHostMessage):
                    raise InvariantError("a stream is answered with a hail")
                self.peer.came()
                self.end.resume(connection, hailed.received)
        finally:
            call.cancel()

    def _sent(self, connection: int) -> Iterator[bytes]:
        yield frame(HelloHostMessage(self._name, self.peer.incarnation, self.end.received))
        yield from self.end.frames(connection)

    def close(self) -> None:
        """Sends the last frames, and ends the stream."""
        self.end.close()
        self._is_closed.set()
        self._thread.join(_GRACE_S)
