"""The wire between hosts: one gRPC stream in both directions per host, JSON in bytes, mutual TLS with the run's key.

Rules: both ends show the certificate of the run and take no other one. gRPC refuses a frame that is too long before it
is read. Who has that certificate and sends what no host sends is lost: its stream ends, and does not come back. A host
that is heard keeps its stream, whoever says its name. Who says nothing is not waited for.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from engine.core.errors import EnvironmentLacksError, InvariantError
from engine.core.hosts.host_messages import HelloHostMessage, HelloReplyHostMessage, SignsHostMessage, TickHostMessage
from engine.core.hosts.host_options import MOST_HOSTS
from engine.core.message_kinds import Message
from engine.runtime.agent.frames import (
    MOST_BUNDLE_BYTES,
    Packets,
    bundle,
    bundled_bytes,
    fits,
    frame,
    frames_of,
    read_from_coordinator,
    read_from_host,
)
from engine.runtime.agent.host_registry import NAME, RunCertificate
from engine.runtime.process.grpc_import import grpc

# One end of the stream between two hosts: frames in order, each once, also over a connection that broke and came back.
#
# Rules: a frame is kept until the other end says that it has received it. A new connection begins with the number of
# frames that have come over those before, and the other end sends again all that follow. Words of an older connection
# count for nothing. Any thread may send; frames are taken by one thread at a time.


MOST_WAITING_BYTES = 64 << 20  # that wait for the other end: it stopped reading


class StreamEnd:
    """The frames to the other end, and the number of those that have come from it."""

    def __init__(self) -> None:
        self.received = 0
        self._changed = threading.Condition()
        self._taking = threading.Lock()
        self._unheard: deque[bytes] = deque()
        self._first = 0  # the number of the first of them
        self._next = -1  # of the next to send; -1: the other end has not said yet how many it has
        self._bytes = 0
        self._connection = 0
        self._is_closed = False

    @property
    def is_full(self) -> bool:
        """Whether the other end has not read for so long that nothing more is kept for it."""
        return self._bytes > MOST_WAITING_BYTES

    def send(self, frame: bytes) -> None:
        """Sends a frame as soon as there is a connection; drops it if too much waits."""
        with self._changed:
            if not (self._is_closed or self.is_full):
                self._unheard.append(frame)
                self._bytes += len(frame)
                self._changed.notify_all()

    def send_last(self, frame: bytes) -> bool:
        """Sends a frame if there is a connection, and no other frame waits to be sent; returns whether it did."""
        with self._changed:
            is_idle = self._next == self._first + len(self._unheard)
            if is_idle:
                self.send(frame)
            return is_idle and not self._is_closed

    def connect(self) -> int:
        """Begins a connection, and ends the one before; returns its number."""
        with self._taking, self._changed:  # a frame that is being taken counts before the other end asks for the number
            self._connection += 1
            self._next = -1
            self._changed.notify_all()
            return self._connection

    def is_present(self, connection: int) -> bool:
        """Whether no other connection has begun since."""
        return connection == self._connection

    def resume(self, connection: int, received: int) -> None:
        """Sends what follows the frames received over there; raises InvariantError for an impossible number."""
        with self._changed:
            if connection == self._connection:
                if received < self._first:
                    raise InvariantError(f"the other end has had {self._first} frames, and says {received}")
                self._forget(received)
                self._next = received
                self._changed.notify_all()

    def forget(self, received: int) -> None:
        """Drops the frames that the other end has received; raises InvariantError for more than were sent."""
        with self._changed:
            self._forget(received)

    def can_resume(self, received: int) -> bool:
        """Whether the other end can have received so many frames; those that it has had before are dropped here."""
        with self._changed:
            return self._first <= received <= self._first + len(self._unheard)

    def _forget(self, received: int) -> None:
        if received > (sent := self._next if self._next >= 0 else self._first + len(self._unheard)):
            raise InvariantError(f"the other end says that it has {received} frames, and {sent} were sent")
        while self._unheard and self._first < received:
            self._bytes -= len(self._unheard.popleft())
            self._first += 1

    def take(self, connection: int, deliver: Callable[[], None]) -> bool:
        """Counts a frame and delivers it; returns False, and does neither, if the connection is not the present one."""
        with self._taking:
            if connection != self._connection or self._is_closed:
                return False
            self.received += 1
            deliver()
            return True

    def settle(self) -> None:
        """Waits for a frame that is being taken; of an end that was closed before, none is taken afterwards."""
        with self._taking:
            pass

    def bundles(self, connection: int) -> Iterator[list[bytes]]:
        """Yields a connection's frames in bundles as they are due, until another begins, or all is sent and closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_over(connection) or self._is_due())
                if connection != self._connection or not self._is_due():
                    return
                frames, num_bytes = list[bytes](), 0
                while self._is_due() and fits(num_bytes, due := self._unheard[self._next - self._first]):
                    frames.append(due)
                    num_bytes += bundled_bytes(due)
                    self._next += 1
            yield frames

    def _is_due(self) -> bool:
        return 0 <= self._next < self._first + len(self._unheard)

    def _is_over(self, connection: int) -> bool:
        return self._is_closed or connection != self._connection

    def close(self) -> None:
        """Takes no more frames; the last ones are sent if there is a connection."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


_SERVICE, _METHOD = "bamboo.Hosts", "Join"
_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.so_reuseport", 0),  # no other process of this user shares the port
    ("grpc.max_receive_message_length", MOST_BUNDLE_BYTES),
    ("grpc.max_send_message_length", MOST_BUNDLE_BYTES),
    ("grpc.compression_enabled_algorithms_bitset", 1),  # none: a short frame does not become a long one
)
_HANDSHAKE_MS = 5000
_GREET_S = 5.0  # for the first frame of a stream
_HEARD_NS = 500_000_000  # two signs of life: who was heard since then has its stream still
_STREAMS = 3  # of a host, each of which holds a thread: the present one, one that is about to end, and a new one
_MOST_TOLD = 50  # refusals in a run, so that no log is filled
_CONNECT_S = 1.0
_AGAIN_S = 0.02  # from the end of a connection to the next attempt
_GRACE_S = 0.5  # for the last frames

Deliver = Callable[[Message, bytes], None]


class HostPeer:
    """Another host, as the wire sees it: its end of the stream, and who takes its frames."""

    def __init__(self, incarnation: str, deliver: Deliver, read: Callable[[bytes], Packets] = read_from_host):
        self.incarnation = incarnation
        self.end = StreamEnd()
        self.deliver, self._read = deliver, read
        self.broken = ""  # what is wrong with a frame that it has sent: it is no agent of this version
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

    @property
    def is_heard(self) -> bool:
        """Whether its stream is there and has been heard a moment ago."""
        return self.has_come and self.ended_ns is None and (self.is_waiting or self.silent_ns() < _HEARD_NS)

    def take_all(self, connection: int, data: bytes) -> bool:
        """Delivers the frames of a bundle; returns whether the connection is still the present one."""
        try:
            frames = frames_of(data)
        except InvariantError as error:
            return self._breaks(connection, error)
        return all(self.take(connection, each) for each in frames)

    def take(self, connection: int, data: bytes) -> bool:
        """Delivers a frame; returns whether the connection is still the present one. Notes a broken frame."""
        try:
            header, packet = self._read(data)
            if isinstance(header, HelloHostMessage | HelloReplyHostMessage):
                raise InvariantError("a stream has one greeting")
            self.is_waiting = True
            return self.end.take(connection, lambda: self._deliver(header, packet))
        except InvariantError as error:
            return self._breaks(connection, error)
        finally:
            self.heard_ns = time.monotonic_ns()
            self.is_waiting = False

    def _breaks(self, connection: int, error: InvariantError) -> bool:
        """Notes the mistake of the present connection; returns False: nothing more of it is taken."""
        if self.end.is_present(connection):
            self.broken = str(error)
        return False

    def _deliver(self, header: Message, packet: bytes) -> None:
        if isinstance(header, SignsHostMessage | TickHostMessage):
            self.end.forget(header.received)
        self.deliver(header, packet)


class WireServer:
    """Listens on `address` for the streams of hosts, as a context; `port` is chosen by the kernel."""

    def __init__(self, address: str, certificate: RunCertificate, say: Callable[[str], None] = lambda words: None):
        """`say` is called for each stream that is refused."""
        self._peers: dict[str, HostPeer] = {}
        self._say, self._num_told, self._telling = say, 0, threading.Lock()
        self._pool = ThreadPoolExecutor(max_workers=_STREAMS * MOST_HOSTS, thread_name_prefix="hosts")
        options = (*_OPTIONS, ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS))
        self._server = grpc.server(self._pool, options=options)
        handler = grpc.stream_stream_rpc_method_handler(self._join)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler}),))
        pair = ((certificate.key.encode(), certificate.certificate.encode()),)
        own = certificate.certificate.encode()
        credentials = grpc.ssl_server_credentials(pair, own, require_client_auth=True)
        where = f"[{address}]" if ":" in address else address
        try:
            self.port = self._server.add_secure_port(f"{where}:0", credentials)
        except RuntimeError as error:
            raise EnvironmentLacksError(f"cannot listen on {address}: {error}") from error
        self._server.start()

    def admit(self, name: str, peer: HostPeer) -> None:
        """Takes the streams of a host from now on."""
        self._peers[name] = peer

    def _join(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        peer, received = self._greeted(requests, context)
        connection = peer.end.connect()
        peer.came()
        reading = (peer, connection, requests, context)
        threading.Thread(target=self._read, args=reading, name="host", daemon=True).start()
        yield frame(HelloReplyHostMessage(peer.end.received))
        peer.end.resume(connection, received)
        yield from map(bundle, peer.end.bundles(connection))

    def _greeted(self, requests: Iterator[bytes], context: Any) -> tuple[HostPeer, int]:
        """Returns the host whose stream begins, and the number of frames that it has; ends the call of any other."""
        patience = threading.Timer(_GREET_S, context.cancel)
        patience.daemon = True
        patience.start()
        hello, why = None, f"it sent nothing for {_GREET_S:g} s"
        try:
            hello, _ = read_from_host(next(requests))
            why = self._why_refused(hello)
        except InvariantError as error:
            why = f"its first frame is broken: {error}"
        except Exception:  # noqa: S110 - gRPC has no public name for the end of a stream
            pass
        finally:
            patience.cancel()
        if isinstance(hello, HelloHostMessage) and not why:
            return self._peers[hello.name], hello.received
        self._tell(f"a stream from {context.peer()} was refused: {why}")
        context.abort(grpc.StatusCode.PERMISSION_DENIED, "no host of this run")
        raise InvariantError("gRPC has ended the call")

    def _why_refused(self, hello: Message) -> str:
        if not isinstance(hello, HelloHostMessage):
            return "it begins without the name of a host"
        peer = self._peers.get(hello.name)
        if peer is None:
            return f"no host of this run is called {hello.name!r:.100}"
        if peer.incarnation != hello.incarnation:
            return f"it is another process than that of host {hello.name}"
        if peer.is_lost or peer.broken:
            return f"host {hello.name} is lost"
        if peer.is_heard:
            return f"host {hello.name} has a stream already"
        return (
            "" if peer.end.can_resume(hello.received) else f"host {hello.name} cannot have had {hello.received} frames"
        )

    def _read(self, peer: HostPeer, connection: int, requests: Iterator[bytes], context: Any) -> None:
        try:
            for data in requests:
                if not peer.take_all(connection, data):
                    break
        except Exception:  # noqa: S110 - gRPC has no public name for the end of a stream
            pass
        finally:
            if peer.end.is_present(connection):
                peer.ended_ns = time.monotonic_ns()
            if peer.broken:
                self._tell(f"the stream of a host from {context.peer()} was ended: {peer.broken}")
            context.cancel()

    def _tell(self, words: str) -> None:
        with self._telling:
            self._num_told += 1
            last = "; further ones are not reported" if self._num_told == _MOST_TOLD else ""
            if self._num_told <= _MOST_TOLD:
                self._say(words + last)

    def close(self) -> None:
        """Sends the last frames, and ends all streams."""
        for peer in self._peers.values():
            peer.end.close()
        self._server.stop(_GRACE_S).wait()
        self._pool.shutdown(wait=False)


class WireClient:
    """The stream of this host to the coordinator's, in a thread; connects again until one of them is done."""

    def __init__(
        self,
        name: str,
        incarnation: str,
        place: str,
        certificate: RunCertificate,
        deliver: Deliver,
        on_end: Callable[[], None] = lambda: None,
    ):
        """`on_end` is called when a connection has ended."""
        self.peer = HostPeer(incarnation, deliver, read_from_coordinator)
        self._on_end = on_end
        self._name, self._place = name, place
        own = certificate.certificate.encode()
        self._credentials = grpc.ssl_channel_credentials(own, certificate.key.encode(), own)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stream", daemon=True)
        self._thread.start()

    @property
    def end(self) -> StreamEnd:
        """This end of the stream."""
        return self.peer.end

    def _run(self) -> None:
        while not (self._is_closed.is_set() or self.peer.broken):
            options = (*_OPTIONS, ("grpc.ssl_target_name_override", NAME), ("grpc.initial_reconnect_backoff_ms", 50))
            with grpc.secure_channel(self._place, self._credentials, options=options) as channel:
                try:
                    grpc.channel_ready_future(channel).result(_CONNECT_S)
                    self._follow(channel)
                except InvariantError as error:
                    self.peer.broken = str(error)
                except (grpc.RpcError, grpc.FutureTimeoutError):
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
                    if not self.peer.take_all(connection, data):
                        return
                    continue
                hailed, _ = read_from_coordinator(data)
                if not isinstance(hailed, HelloReplyHostMessage):
                    raise InvariantError("a stream is answered with a hello")
                self.peer.came()
                self.end.resume(connection, hailed.received)
        finally:
            call.cancel()

    def _sent(self, connection: int) -> Iterator[bytes]:
        yield frame(HelloHostMessage(self._name, self.peer.incarnation, self.end.received))
        yield from map(bundle, self.end.bundles(connection))

    def close(self) -> None:
        """Sends the last frames, and ends the stream."""
        self.end.close()
        self._is_closed.set()
        self._thread.join(_GRACE_S)
