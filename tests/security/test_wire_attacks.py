"""Attacks on the wire between hosts: each is refused, and the stream of a host of the run goes on beside it."""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
import ssl
import struct
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc
import pytest

from engine.codec.messages import encode
from engine.core.hosts import host_messages as said
from engine.core.hosts.host_messages import WorkerSign
from engine.core.message_kinds import MAX_BYTES, Message
from engine.core.messages import KeyMessage, PingMessage
from engine.runtime.agent import host_registry, wire
from engine.runtime.agent.frames import MOST_BYTES, bundle, frame
from engine.runtime.agent.host_registry import NAME, RunCertificate, new_certificate
from engine.runtime.agent.wire import HostPeer, WireClient, WireServer
from tests.runtime.test_wire import spoken

HERE = "127.0.0.1"
JOIN = "/bamboo.Hosts/Join"
WORDS = frame(said.ControlHostMessage(1), encode(KeyMessage(1, "a", "b")))
SIGN = WorkerSign(3, "", (5, 7, "0F1"), (1, 5, 9, 1, 10**6, 2 * 10**6, 0), ("R", 12, 34))
ALERT = b"\x15\x03"  # of TLS: it ends the connection
DENIED, CUT = grpc.StatusCode.PERMISSION_DENIED, 5.0
pytestmark = pytest.mark.timeout(60)


class Bed:
    """The wire of a run: a host that is connected all the time, and the names of others, one for each attack."""

    def __init__(self, folder: Path) -> None:
        self.made, self.other = new_certificate(), new_certificate()
        self.told: list[str] = []
        self.came: queue.SimpleQueue[Message] = queue.SimpleQueue()  # from hosts that are attackers
        self.heard: queue.SimpleQueue[Message] = queue.SimpleQueue()  # from the host that is none
        self.back: queue.SimpleQueue[Message] = queue.SimpleQueue()  # to it
        self.server = WireServer(HERE, self.made, self.told.append)
        self.port = self.server.port
        self.honest = HostPeer("1f", lambda header, packet: self.heard.put(header))
        self.server.admit("b", self.honest)
        self.client = self.host("b", lambda header, packet: self.back.put(header))
        self._numbers = itertools.count(1)
        self._names = itertools.count(1)
        self.folder = folder
        for name, made in (("made", self.made), ("other", self.other)):
            (folder / f"{name}.pem").write_text(made.certificate + made.key)
        until(lambda: self.honest.has_come)

    def host(self, name: str, deliver: Callable[[Message, bytes], None] = lambda header, packet: None) -> WireClient:
        """Returns a host of the run."""
        return WireClient(name, "1f", f"{HERE}:{self.port}", self.made, deliver)

    def admitted(self) -> tuple[str, HostPeer]:
        """Returns the name of one more host of the run, which an attack is about."""
        name, peer = f"c{next(self._names)}", HostPeer("1f", lambda header, packet: self.came.put(header))
        self.server.admit(name, peer)
        return name, peer

    def goes_on(self) -> None:
        """Fails if the stream of the other host does not go on, both ways and over the same connection."""
        number = next(self._numbers)
        self.client.end.send(frame(said.ControlHostMessage(number), encode(KeyMessage(1, "a", "b"))))
        self.honest.end.send(frame(said.SignalHostMessage(number, 0)))
        assert self.heard.get(timeout=10) == said.ControlHostMessage(number)
        assert self.back.get(timeout=10) == said.SignalHostMessage(number, 0)
        assert self.client.end.is_present(1) and self.honest.end.is_present(1)
        assert not self.honest.broken and self.honest.ended_ns is None

    def call(self, frames: Sequence[bytes], method: str = JOIN, **how: Any) -> grpc.StatusCode:
        """Speaks over gRPC, with the certificate of the run; returns the end of the call. `bundles` come last."""
        made: RunCertificate | None = how.get("made", self.made)
        pair = (None, None) if made is None else (made.key.encode(), made.certificate.encode())
        own = self.made.certificate.encode()
        options = [("grpc.ssl_target_name_override", NAME)]
        place = f"{HERE}:{self.port}"
        channel = (
            grpc.insecure_channel(place)
            if how.get("clear")
            else grpc.secure_channel(place, grpc.ssl_channel_credentials(own, *pair), options)
        )
        with channel:
            compression = how.get("compression", grpc.Compression.NoCompression)
            call: Any = channel.stream_stream(method)(
                itertools.chain(spoken(frames), how.get("bundles", ())), timeout=CUT, compression=compression
            )
            try:
                for _ in call:
                    pass
            except grpc.RpcError as error:
                code: grpc.StatusCode = error.code()
                return code
        return grpc.StatusCode.OK

    def raw(self, data: bytes) -> bytes:
        """Sends bytes without TLS; returns what comes until the other end closes."""
        with socket.create_connection((HERE, self.port), CUT) as stranger:
            stranger.sendall(data)
            return until_closed(stranger)

    def tls(self, certificate: str = "", **how: Any) -> ssl.SSLSocket:
        """Returns a connection with TLS."""
        context = ssl.create_default_context(cadata=self.made.certificate)
        if certificate:
            context.load_cert_chain(self.folder / f"{certificate}.pem")
        if "version" in how:
            context.set_ciphers("ALL:@SECLEVEL=0")
            context.minimum_version = context.maximum_version = how["version"]
        context.set_alpn_protocols(how.get("protocols", ["h2"]))
        plain = socket.create_connection((HERE, self.port), CUT)
        return context.wrap_socket(plain, server_hostname=NAME)


def until_closed(stranger: socket.socket) -> bytes:
    """Returns what comes until the other end closes."""
    stranger.settimeout(CUT)
    found = b""
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while data := stranger.recv(1 << 16):
            found += data
    return found


def until(is_so: Callable[[], bool]) -> None:
    """Waits for a condition, and fails the test if it does not come."""
    until_s = time.monotonic() + 10.0
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.005)


@pytest.fixture(name="bed", scope="module")
def _bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    bed = Bed(tmp_path_factory.mktemp("bed"))
    yield bed
    bed.client.close()
    bed.server.close()


def hello(name: str, incarnation: str = "1f", received: int = 0) -> bytes:
    return frame(said.HelloHostMessage(name, incarnation, received))


def http2(*parts: tuple[int, bytes]) -> bytes:
    """Returns the bytes of a gRPC call in HTTP/2; each part of its data has flags, and bytes as they are."""
    texts = {b":method": b"POST", b":scheme": b"https", b":path": JOIN.encode(), b":authority": b"bamboo"}
    texts |= {b"te": b"trailers", b"content-type": b"application/grpc"}
    headers = b"".join(b"\0" + bytes([len(name)]) + name + bytes([len(text)]) + text for name, text in texts.items())

    def framed(kind: int, flags: int, stream: int, data: bytes) -> bytes:
        return struct.pack(">I", len(data))[1:] + struct.pack(">BBI", kind, flags, stream) + data

    begin = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + framed(4, 0, 0, b"") + framed(1, 4, 1, headers)
    return begin + b"".join(framed(0, flags, 1, data) for flags, data in parts)


# Who has no certificate of the run: what he does, with the bed; each returns what he was given.


def expired(bed: Bed) -> grpc.StatusCode:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_registry, "_TO", datetime(2001, 1, 1))
        return bed.call([hello("b"), WORDS], made=new_certificate())


def aborted(bed: Bed) -> bytes:
    with socket.create_connection((HERE, bed.port), CUT) as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stranger.sendall(b"\x16\x03\x01\x02\x00")  # the head of a TLS record
    return b""


def old_tls(bed: Bed) -> bytes:
    with warnings.catch_warnings(), contextlib.suppress(ssl.SSLError, ConnectionError):
        warnings.simplefilter("ignore")
        return until_closed(bed.tls("made", version=ssl.TLSVersion.TLSv1_1))
    return b""


def other_protocol(bed: Bed) -> bytes:
    with contextlib.suppress(ssl.SSLError, ConnectionError), bed.tls("other", protocols=["http/1.1"]) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: bamboo\r\n\r\n")
        return until_closed(stranger)
    return b""


STRANGERS: dict[str, Callable[[Bed], object]] = {
    "clear text": lambda bed: bed.call([hello("b"), WORDS], clear=True),
    "no certificate": lambda bed: bed.call([hello("b"), WORDS], made=None),
    "the certificate of another run": lambda bed: bed.call([hello("b"), WORDS], made=bed.other),
    "a certificate of its own that has ended": expired,
    "a request of HTTP/1": lambda bed: bed.raw(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"),
    "a request of HTTP/2 without TLS": lambda bed: bed.raw(http2()),
    "zeros": lambda bed: bed.raw(bytes(5000)),
    "a TLS record of the wrong length": lambda bed: bed.raw(b"\x16\x03\x01\xff\xff" + b"\x01" * 70_000),
    "a handshake that is aborted": aborted,
    "an old version of TLS": old_tls,
    "HTTP/1 behind TLS, with another certificate": other_protocol,
    "no byte at all": lambda bed: socket.create_connection((HERE, bed.port), CUT).close(),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_is_not_heard(bed: Bed, name: str) -> None:
    found = STRANGERS[name](bed)
    assert found in (b"", None, grpc.StatusCode.UNAVAILABLE) or found[:2] == ALERT  # type: ignore[index]
    bed.goes_on()
    assert bed.came.empty()


# Who has the certificate, and is no host of the run: the first frame of the stream.

DEEP = b"[" * 50_000
GREETINGS: dict[str, tuple[bytes, str]] = {
    "an unknown host": (hello("stranger"), "no host of this run is called 'stranger'"),
    "an earlier incarnation": (hello("c", "0f"), "another process than that of host c"),
    "a host that is lost": (hello("lost"), "host lost is lost"),
    "the name of a host that is connected": (hello("b"), "host b has a stream already"),
    "that name with an older incarnation": (hello("b", "0f"), "another process than that of host b"),
    "a repeated greeting": (hello("spoken", received=0), "cannot have had 0 frames"),
    "frames that were never sent": (hello("c", received=10**12), "cannot have had"),
    "a number below zero": (hello("c", received=-1), "cannot have had -1 frames"),
    "a number of 400 bits": (hello("c", received=1 << 400), "64 bits"),
    "another message first": (frame(said.LeavesHostMessage()), "without the name of a host"),
    "an order first": (frame(said.SignalHostMessage(1, 9)), "goes the other way"),
    "a message of workers": (encode(PingMessage()), "begins with a message between hosts"),
    "nothing": (b"", "not a message"),
    "no UTF-8": (b"\xff" * 100, "not a message"),
    "deep nesting": (DEEP, "not a message"),
    "deep nesting in a field": (b'{"kind":"hellohost","name":' + DEEP, "not a message"),
    "a kind that is no text": (b'{"kind":[]}', "not a message"),
    "a name of NUL bytes": (hello("\0" * 1000), "no host of this run is called"),
    "a name that steers a terminal": (hello("\x1b[2J"), r"\x1b"),
}


@pytest.fixture(name="others", scope="module")
def _others(bed: Bed) -> None:
    """Hosts that greetings name: one that did not come yet, one that is lost, and one that has had frames."""
    for name in ("c", "lost", "spoken"):
        bed.server.admit(name, peer := HostPeer("1f", lambda header, packet: bed.came.put(header)))
        peer.is_lost = name == "lost"
        if name == "spoken":
            peer.end.send(WORDS)
            peer.end.resume(peer.end.connect(), 1)


@pytest.mark.usefixtures("others")
@pytest.mark.parametrize("name", GREETINGS)
def test_who_is_no_host_of_the_run_is_told_and_not_heard(bed: Bed, name: str) -> None:
    first, why = GREETINGS[name]
    told = len(bed.told)
    bed.server._num_told = 0
    assert bed.call([first, WORDS]) is DENIED
    assert len(bed.told) == told + 1
    assert why in bed.told[-1] and f"from ipv4:{HERE}:" in bed.told[-1]
    bed.goes_on()
    assert bed.came.empty()


@pytest.mark.parametrize("method", ["/bamboo.Hosts/Leave", "/bamboo.Workers/Join", "/", "/bamboo.Hosts/Join/../x"])
def test_there_is_one_method(bed: Bed, method: str) -> None:
    assert bed.call([hello("b"), WORDS], method) is grpc.StatusCode.UNIMPLEMENTED
    bed.goes_on()


# Who is a host of the run, and sends what no agent sends: it is lost, and no other one.


def json_frame(text: str) -> bytes:
    return text.encode()


def sign(**change: Any) -> bytes:
    return frame(said.SignsHostMessage(0, 1, (tuple(SIGN._replace(**change)),)))  # type: ignore[arg-type]


BROKEN: dict[str, bytes] = {
    "no JSON": b"{",
    "nothing": b"",
    "two objects": frame(said.LeavesHostMessage()) * 2,
    "an unknown kind": json_frame('{"kind":"gossip"}'),
    "a message without its kind": json_frame('{"process":1}'),
    "a field that is missing": json_frame('{"kind":"endedhost","process":1}'),
    "a field too many": json_frame('{"kind":"endedhost","process":1,"code":0,"more":1}'),
    "a text for a number": json_frame('{"kind":"endedhost","process":"1","code":0}'),
    "a fraction": json_frame('{"kind":"endedhost","process":1.5,"code":0}'),
    "no number": json_frame('{"kind":"endedhost","process":NaN,"code":0}'),
    "a number of 64 bits and more": frame(said.EndedHostMessage(1 << 63, 0)),
    "a number of a million digits": json_frame('{"kind":"endedhost","process":' + "9" * 100_000 + ',"code":0}'),
    "deep nesting": json_frame('{"kind":"endedhost","process":') + DEEP,
    "a NUL byte": frame(said.LeavesHostMessage()) + b"\0",
    "no UTF-8": frame(said.LeavesHostMessage())[:-1] + b"\xff",
    "a frame that is cut": frame(said.EndedHostMessage(1, 0))[:-3],
    "a greeting again": hello("b"),
    "an order of the other way": frame(said.SignalHostMessage(1, 9)),
    "the outcome, from a host that does not coordinate": frame(said.OutcomeHostMessage(0, "finished")),
    "a decision, from a host that does not coordinate": frame(said.DecisionHostMessage(0), b"{}"),
    "a decision that is no text": frame(said.PastDecisionHostMessage(0), b"\xff"),
    "a decision below zero": frame(said.PastDecisionHostMessage(-1), b"{}"),
    "what no newcomer is told": frame(said.PastControlHostMessage(), encode(PingMessage())),
    "words without words": frame(said.ControlHostMessage(1)) + b"\n",
    "words that are not a message": frame(said.ControlHostMessage(1), b"\xff\0"),
    "words that only an agent says": frame(said.ControlHostMessage(1), encode(PingMessage())),
    "words that are too long": encode(said.ControlHostMessage(1)) + b"\n" + b"x" * (MAX_BYTES + 1),
    "a sign with half a place": sign(place=(1, 2)),
    "a sign at a step of 40 bits": sign(place=(1, 1 << 40, 9, 1, 1, 1, 0)),
    "a sign with other times": sign(times=("R",)),
    "a sign with a heartbeat that is none": sign(heartbeat='{"kind":"leaveshost"}'),
    "a sign with half a letter": sign(progress=(1, 1, "\ud800")),
    "processes that are none": frame(said.ProcessesHostMessage(((1,),), 0)),
    "a worker below zero": frame(said.ProcessesHostMessage(((1, -1, 5),), 0)),
    "frames that were never sent": frame(said.SignsHostMessage(10**9, 1, ())),
}


@pytest.mark.parametrize("name", BROKEN)
def test_who_sends_what_no_host_sends_is_lost_and_no_other_one(bed: Bed, name: str) -> None:
    host, peer = bed.admitted()
    bed.server._num_told = 0
    assert bed.call([hello(host), BROKEN[name], WORDS]) is not grpc.StatusCode.OK
    until(lambda: peer.ended_ns is not None)
    assert peer.broken
    assert "was ended" in bed.told[-1]
    assert bed.call([hello(host), WORDS]) is DENIED  # and does not come back
    bed.goes_on()
    assert bed.came.empty()


BUNDLES: dict[str, bytes] = {
    "no frame": b"",
    "half a length": b"\0\0",
    "a frame that is cut": bundle([WORDS])[:-1],
    "a frame that is cut, behind a good one": bundle([WORDS, WORDS])[:-1],
    "a byte too many": bundle([WORDS]) + b"\0",
    "a length of 4 GiB": b"\xff\xff\xff\xff" + WORDS,
    "a frame as it is": WORDS,
    "a hundred empty frames": bytes(400),
    "a good frame, then one of another kind": bundle([frame(said.OutcomeHostMessage(0, "finished")), WORDS]),
}


@pytest.mark.parametrize("name", BUNDLES)
def test_who_sends_what_is_no_bundle_is_lost_and_nothing_of_it_is_heard(bed: Bed, name: str) -> None:
    host, peer = bed.admitted()
    assert bed.call([hello(host)], bundles=[BUNDLES[name], bundle([WORDS])]) is not grpc.StatusCode.OK
    until(lambda: peer.ended_ns is not None)
    assert peer.broken
    bed.goes_on()
    assert bed.came.empty()


PREFIXES: dict[str, tuple[int, bytes]] = {
    "a prefix that says more than MOST_BYTES": (0, b"\0\xff\xff\xff\xff" + b"x" * 100),
    "a prefix that says more than comes": (1, b"\0" + struct.pack(">I", 500) + b"x" * 10),
    "a prefix that says compressed": (0, b"\1" + struct.pack(">I", 10) + b"x" * 10),
}


@pytest.mark.parametrize("name", PREFIXES)
def test_a_frame_with_a_wrong_length_does_not_come(bed: Bed, name: str) -> None:
    host, peer = bed.admitted()
    first = hello(host)
    with bed.tls("made") as stranger:
        greeting = (0, b"\0" + struct.pack(">I", len(first)) + first)
        stranger.sendall(http2(greeting, PREFIXES[name]))
        until(lambda: peer.ended_ns is not None)
    bed.goes_on()
    assert bed.came.empty()


@pytest.mark.parametrize("how", ["long", "long when it is unpacked"])
def test_a_frame_that_is_too_long_does_not_come(bed: Bed, how: str) -> None:
    host, peer = bed.admitted()
    packed = grpc.Compression.Gzip if how.endswith("unpacked") else grpc.Compression.NoCompression
    data = WORDS + b" " * (100 * MOST_BYTES if how.endswith("unpacked") else MOST_BYTES)
    assert bed.call([hello(host), data], compression=packed) is not grpc.StatusCode.OK
    until(lambda: not peer.has_come or peer.ended_ns is not None)
    bed.goes_on()
    assert bed.came.empty()


@pytest.mark.parametrize(
    "order",
    [
        b"{",
        frame(said.EndedHostMessage(1, 0)),
        frame(said.SignalHostMessage(1, 9999)),
        frame(said.SignalHostMessage(1, -9)),
        frame(said.ForkHostMessage(1, 7, 7)),
        frame(said.ForkHostMessage(1, 0, 10**12)),
        frame(said.TickHostMessage(10**9, 1)),
        encode(said.ControlHostMessage(1)) + b"\n",
    ],
)
def test_a_host_does_not_obey_what_no_coordinator_says(bed: Bed, order: bytes) -> None:
    host, peer = bed.admitted()
    obeyed: list[Message] = []
    client = bed.host(host, lambda header, packet: obeyed.append(header))
    until(lambda: peer.has_come)
    peer.end.send(order)
    peer.end.send(frame(said.LeavesHostMessage()))
    until(lambda: peer.ended_ns is not None)
    assert client.peer.broken and obeyed == []
    client.close()
    bed.goes_on()


def test_a_connection_that_says_little_and_slowly_is_closed(monkeypatch: pytest.MonkeyPatch, bed: Bed) -> None:
    monkeypatch.setattr(wire, "_HANDSHAKE_MS", 300)
    monkeypatch.setattr(wire, "_GREET_S", 0.3)
    told: list[str] = []
    server = WireServer(HERE, bed.made, told.append)
    with socket.create_connection((HERE, server.port), CUT) as stranger:
        stranger.sendall(b"\x16")  # one byte of a handshake
        assert until_closed(stranger) == b""
    credentials = grpc.ssl_channel_credentials(*[each.encode() for each in (bed.made[0], bed.made[1], bed.made[0])])
    options = [("grpc.ssl_target_name_override", NAME)]
    silent: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    with grpc.secure_channel(f"{HERE}:{server.port}", credentials, options) as channel, pytest.raises(grpc.RpcError):
        list(channel.stream_stream(JOIN)(iter(silent.get, b""), timeout=CUT))
    until(lambda: bool(told))
    assert "it sent nothing for 0.3 s" in told[0]
    silent.put(b"")
    server.close()


def test_a_host_comes_back_through_a_flood_of_connections(bed: Bed) -> None:
    name, peer = bed.admitted()
    client = bed.host(name)
    until(lambda: peer.has_come)
    with contextlib.ExitStack() as stack:
        for number in range(400):
            stranger = stack.enter_context(socket.create_connection((HERE, bed.port), CUT))
            stranger.sendall(b"\x16\x03\x01" * (number % 2))
        peer.end.connect()  # ends the connection of the host
        peer.ended_ns = time.monotonic_ns()
        client.end.send(WORDS)
        assert bed.came.get(timeout=10) == said.ControlHostMessage(1)
        bed.goes_on()
    client.close()


def test_refusals_fill_no_log(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_MOST_TOLD", 2)
    bed.server._num_told, told = 0, len(bed.told)
    for _ in range(4):
        assert bed.call([hello("nobody")]) is DENIED
    assert len(bed.told) == told + 2
    assert "further ones are not reported" in bed.told[-1]
