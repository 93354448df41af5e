"""The wire between hosts: who may speak, which frames are taken, and a stream that breaks and comes back."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import pytest

from engine.codec.messages import encode
from engine.core.hosts.host_messages import ControlHostMessage, HelloHostMessage, SignalHostMessage, TickHostMessage
from engine.core.hosts.host_options import MOST_HOSTS
from engine.core.message_kinds import Message
from engine.core.messages import KeyMessage, PingMessage
from engine.runtime.agent.frames import MOST_BYTES, bundle, frame
from engine.runtime.agent.host_registry import NAME, RunCertificate, new_certificate
from engine.runtime.agent.wire import HostPeer, WireClient, WireServer

HERE = "127.0.0.1"
PACKET = encode(KeyMessage(1, "a", "b"))
pytestmark = pytest.mark.timeout(60)


class Bed:
    """A server with one host, and the frames that have come from it."""

    def __init__(self, made: RunCertificate) -> None:
        self.made = made
        self.came: queue.SimpleQueue[tuple[Message, bytes]] = queue.SimpleQueue()
        self.peer = HostPeer("1f", lambda header, packet: self.came.put((header, packet)))
        self.server = WireServer(HERE, made)
        self.server.admit("b", self.peer)
        self.place = f"{HERE}:{self.server.port}"

    def say(self, made: RunCertificate | None, *frames: bytes) -> grpc.StatusCode:
        """Speaks to the server as a stranger might; returns the end of the call, OK if the server answers."""
        credentials = None
        if made is not None:
            own = made.certificate.encode()
            credentials = grpc.ssl_channel_credentials(own, made.key.encode(), own)
        options = [("grpc.ssl_target_name_override", NAME)]
        channel = (
            grpc.secure_channel(self.place, credentials, options) if credentials else grpc.insecure_channel(self.place)
        )
        with channel:
            call: Any = channel.stream_stream("/bamboo.Hosts/Join")(spoken(frames), timeout=5)
            try:
                for _ in call:
                    pass
            except grpc.RpcError as error:
                code: grpc.StatusCode = error.code()
                return code
        return grpc.StatusCode.OK


@pytest.fixture(name="made", scope="module")
def _made() -> RunCertificate:
    return new_certificate()


@pytest.fixture(name="bed")
def _bed(made: RunCertificate) -> Iterator[Bed]:
    bed = Bed(made)
    yield bed
    bed.server.close()


def spoken(frames: Sequence[bytes]) -> Iterator[bytes]:
    """Returns frames as a host sends them: the first one as it is, then bundles."""
    return iter([*frames[:1], *(bundle([each]) for each in frames[1:])])


def until(is_so: Callable[[], bool]) -> None:
    """Waits for a condition, and fails the test if it does not come."""
    until_s = time.monotonic() + 10.0
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.01)


HELLO = frame(HelloHostMessage("b", "1f", 0))
WORDS = frame(ControlHostMessage(1), PACKET)


def test_frames_go_both_ways_and_survive_a_break(bed: Bed) -> None:
    heard: queue.SimpleQueue[Message] = queue.SimpleQueue()
    client = WireClient("b", "1f", bed.place, bed.made, lambda header, packet: heard.put(header))
    client.end.send(WORDS)
    assert bed.came.get(timeout=10) == (ControlHostMessage(1), PACKET)
    for number in range(2, 12):
        bed.peer.end.send(frame(SignalHostMessage(number, 0)))
        client.end.send(frame(ControlHostMessage(number), PACKET))
        if number % 3 == 0:
            bed.peer.end.connect()  # ends the connection; the host comes back
            bed.peer.ended_ns = time.monotonic_ns()
    assert [bed.came.get(timeout=10)[0] for _ in range(2, 12)] == [ControlHostMessage(each) for each in range(2, 12)]
    assert [heard.get(timeout=10) for _ in range(2, 12)] == [SignalHostMessage(each, 0) for each in range(2, 12)]
    client.close()
    until(lambda: bed.peer.ended_ns is not None)


@pytest.mark.parametrize("who", ["clear text", "another run", "no certificate"])
def test_a_stranger_is_not_heard(bed: Bed, who: str) -> None:
    if who == "no certificate":
        with (
            grpc.secure_channel(
                bed.place,
                grpc.ssl_channel_credentials(bed.made.certificate.encode()),
                [("grpc.ssl_target_name_override", NAME)],
            ) as channel,
            pytest.raises(grpc.RpcError),
        ):
            list(channel.stream_stream("/bamboo.Hosts/Join")(spoken([HELLO, WORDS]), timeout=5))
    else:
        other = new_certificate() if who == "another run" else None
        assert bed.say(other, HELLO, WORDS) is not grpc.StatusCode.OK
    assert bed.came.empty()
    assert not bed.peer.has_come


def test_a_host_believes_no_server_of_another_run(bed: Bed) -> None:
    client = WireClient("b", "1f", bed.place, new_certificate(), lambda header, packet: None)
    client.end.send(WORDS)
    with pytest.raises(queue.Empty):
        bed.came.get(timeout=0.7)
    client.close()


@pytest.mark.parametrize(
    "first",
    [
        frame(HelloHostMessage("c", "1f", 0)),  # an unknown host
        frame(HelloHostMessage("b", "2f", 0)),  # an earlier incarnation
        frame(TickHostMessage(1, 0)),
        encode(PingMessage()),
        b"",
        b"\xff" * 100,
    ],
)
def test_a_stream_of_no_host_of_the_run_is_refused(bed: Bed, first: bytes) -> None:
    assert bed.say(bed.made, first, WORDS) is grpc.StatusCode.PERMISSION_DENIED
    assert bed.came.empty()


@pytest.mark.parametrize("broken", [b"{", WORDS + b"x" * MOST_BYTES, frame(ControlHostMessage(1))[:-1]])
def test_a_broken_or_oversized_frame_ends_the_stream(bed: Bed, broken: bytes) -> None:
    assert bed.say(bed.made, HELLO, WORDS, broken, WORDS) is not grpc.StatusCode.OK
    until(lambda: bed.peer.ended_ns is not None)
    assert bed.came.get(timeout=5)[0] == ControlHostMessage(1)
    assert bed.came.empty()


def test_a_host_that_is_lost_does_not_come_back(bed: Bed) -> None:
    bed.peer.is_lost = True
    assert bed.say(bed.made, HELLO, WORDS) is grpc.StatusCode.PERMISSION_DENIED


def test_bytes_of_a_port_scan_change_nothing(bed: Bed) -> None:
    for data in (b"", b"GET / HTTP/1.0\r\n\r\n", bytes(5000)):
        with socket.create_connection((HERE, bed.server.port), 5) as scan:
            scan.sendall(data)
    client = WireClient("b", "1f", bed.place, bed.made, lambda header, packet: None)
    client.end.send(WORDS)
    assert bed.came.get(timeout=10)[0] == ControlHostMessage(1)
    client.close()


def test_all_hosts_of_the_largest_run_have_a_stream_and_one_of_them_comes_again(made: RunCertificate) -> None:
    """Over one connection, which is enough: each stream holds a thread of the server."""
    server = WireServer(HERE, made)
    peers = {f"b{number}": HostPeer("1f", lambda header, packet: None) for number in range(MOST_HOSTS)}
    for name, peer in peers.items():
        server.admit(name, peer)
    own, is_over = made.certificate.encode(), threading.Event()
    credentials = grpc.ssl_channel_credentials(own, made.key.encode(), own)

    def spoken(name: str) -> Iterator[bytes]:
        yield frame(HelloHostMessage(name, "1f", 0))
        is_over.wait()

    place, options = f"{HERE}:{server.port}", [("grpc.ssl_target_name_override", NAME)]
    with grpc.secure_channel(place, credentials, options) as channel:
        method: Any = channel.stream_stream("/bamboo.Hosts/Join")
        calls = [method(spoken(name), timeout=30) for name in peers]
        assert all(next(each) for each in calls)
        peers["b0"].heard_ns = 0
        assert next(method(spoken("b0"), timeout=10))
        is_over.set()
    server.close()
