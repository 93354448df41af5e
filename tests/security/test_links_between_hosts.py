"""Strangers at the ports where workers of two hosts begin their links: none is taken for a worker, or holds one up.

Each attack is under way, and stays, while two workers make their link and train on.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch

from engine.core.errors import TransferFailedError
from engine.core.links import MOST_BYTES, Frame
from engine.core.messages import LinkMessage
from engine.runtime.agent.host_registry import RunCertificate, new_certificate
from engine.runtime.transport import links
from engine.runtime.transport.link_wire import TlsWire, Wire
from engine.runtime.transport.links import GREET_S, HostDoor, _context
from engine.runtime.transport.transport import TensorSpec
from tests.runtime.linked import Linked
from tests.runtime.peers import an_order

HERE = "127.0.0.1"
SOON_S = 0.6 * GREET_S  # an honest link must not wait until strangers are closed
KEY, OTHER = an_order(1), an_order(2)
ONE = (TensorSpec((1,), torch.float32, False),)
LARGE = (TensorSpec((3 << 20,), torch.float32, False),)
Held = list[socket.socket]

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(name="made", scope="module")
def _made() -> RunCertificate:
    return new_certificate()


@pytest.fixture(name="foreign", scope="module")
def _foreign() -> RunCertificate:
    return new_certificate()


@pytest.fixture(name="held")
def _held() -> Iterator[Held]:
    """The sockets of strangers, who never close them."""
    held: Held = []
    yield held
    for each in held:
        each.close()


def reach(port: int, held: Held) -> socket.socket:
    held.append(socket.create_connection((HERE, port), 5.0))
    return held[-1]


def over_tls(port: int, held: Held, certificate: RunCertificate | None, said: bytes) -> ssl.SSLSocket:
    """Connects as the run would, with another certificate or none, and says something."""
    if certificate is None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    else:
        found = _context(certificate._asdict(), ssl.PROTOCOL_TLS_CLIENT)
        assert found is not None
        context = found
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    end = context.wrap_socket(reach(port, held))
    held.append(end)
    with contextlib.suppress(OSError):  # it was refused
        end.sendall(said)
    return end


def silent(port: int, held: Held, made: RunCertificate, foreign: RunCertificate) -> None:
    for _ in range(3 * links._MOST_GREETED):
        reach(port, held)


def clear_text(port: int, held: Held, made: RunCertificate, foreign: RunCertificate) -> None:
    for said in (b"GET / HTTP/1.1\r\n\r\n", bytes(16), os.urandom(1 << 16), b"\x16\x03\x01\xff\xff" + bytes(100)):
        with contextlib.suppress(OSError):
            reach(port, held).sendall(said)


def no_certificate(port: int, held: Held, made: RunCertificate, foreign: RunCertificate) -> None:
    over_tls(port, held, None, os.urandom(16))


def foreign_certificate(port: int, held: Held, made: RunCertificate, foreign: RunCertificate) -> None:
    over_tls(port, held, foreign, os.urandom(16))


def wrong_tokens(port: int, held: Held, made: RunCertificate, foreign: RunCertificate) -> None:
    for said in (bytes(16), os.urandom(16), os.urandom(3), b""):
        over_tls(port, held, made, said)


def gone_at_once(port: int, held: Held, made: RunCertificate, foreign: RunCertificate) -> None:
    for number in range(100):  # more than are greeted at a time
        end = reach(port, [])
        if number % 2:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
        end.close()


def drips(port: int, held: Held, made: RunCertificate, foreign: RunCertificate) -> None:
    end = reach(port, held)

    def drip() -> None:
        with contextlib.suppress(OSError):
            for _ in range(1000):
                end.sendall(b"\x16")
                time.sleep(0.05)

    threading.Thread(target=drip, daemon=True).start()


ATTACKS = [silent, clear_text, no_certificate, foreign_certificate, wrong_tokens, gone_at_once, drips]
IN_CLEAR = [silent, clear_text, gone_at_once, drips]


def exchange(one: Any, other: Any, value: float) -> None:
    """Passes a small and a large message each way; fails if that takes long."""
    since_s = time.monotonic()
    large = torch.arange(3 << 20, dtype=torch.float32)
    for end, peer in ((one, 1), (other, 0)):
        end.in_order.send(peer, KEY, (torch.tensor([float(value)]),))
        end.in_order.send(peer, OTHER, (large + value,))
        end.in_order.post(peer, KEY, ONE)
        end.in_order.post(peer, OTHER, LARGE)
    for end, peer in ((one, 1), (other, 0)):
        assert end.in_order.take(peer, KEY)[0].item() == value
        assert torch.equal(end.in_order.take(peer, OTHER)[0], large + value)
    assert time.monotonic() - since_s < SOON_S


def link_of(linked: Linked, worker: int, peer: int) -> Any:
    return linked.links[worker]._links[peer].ends


@pytest.mark.parametrize("is_secured", [True, False])
def test_workers_of_two_hosts_have_one_link_over_tls_or_in_clear_text(made: RunCertificate, is_secured: bool) -> None:
    linked = Linked(0, 1, network=made._asdict() if is_secured else {})
    one, other = linked.enter(0)
    exchange(one, other, 1)
    assert isinstance(link_of(linked, 0, 1).wire, TlsWire) is is_secured
    assert link_of(linked, 0, 1).out is link_of(linked, 0, 1).back is None
    one, other = linked.enter(1)
    exchange(one, other, 2)
    linked.close()


@pytest.mark.parametrize(
    ("attack", "is_secured"),
    [
        *((each, True) for each in ATTACKS),
        *(pytest.param(each, False, marks=[pytest.mark.soak] if each is silent else []) for each in IN_CLEAR),
    ],
)
def test_strangers_hold_up_no_link(
    attack: Callable[..., None], is_secured: bool, made: RunCertificate, foreign: RunCertificate, held: Held
) -> None:
    linked = Linked(0, 1, network=made._asdict() if is_secured else {})
    ports = [door.port() for links in linked.links.values() if (door := links._door)]
    for port in ports:
        attack(port, held, made, foreign)
    one, other = linked.enter(0)
    exchange(one, other, 1)
    for port in ports:
        attack(port, held, made, foreign)
    one, other = linked.enter(1)
    exchange(one, other, 2)
    assert one.failed is None and other.failed is None
    assert all(len(links._links) == 1 for links in linked.links.values())
    linked.close()


class Door:
    """A door with what it has given."""

    def __init__(self, network: dict[str, str]):
        self.given: list[tuple[LinkMessage, Wire | None]] = []
        self.door = HostDoor(HERE, network, lambda told, wire: self.given.append((told, wire)))
        self.port = self.door.port()

    def gives(self, count: int, within_s: float = 5.0) -> bool:
        """Returns whether it gives so many links in all."""
        until_s = time.monotonic() + within_s
        while len(self.given) < count and time.monotonic() < until_s:
            time.sleep(0.005)
        return len(self.given) == count

    def close(self) -> None:
        self.door.close()
        for _, wire in self.given:
            if wire is not None:
                wire.close()


@pytest.fixture(name="door")
def _door(made: RunCertificate) -> Iterator[Door]:
    door = Door(made._asdict())
    yield door
    door.close()


def is_closed(end: socket.socket, within_s: float) -> bool:
    end.settimeout(within_s)
    try:
        return end.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def test_a_token_makes_one_link(door: Door, made: RunCertificate, held: Held) -> None:
    token = os.urandom(16)
    door.door.take(LinkMessage(1, 7, token.hex()))
    over_tls(door.port, held, made, token)
    assert door.gives(1)
    again = over_tls(door.port, held, made, token)
    assert not door.gives(2, 0.5)
    assert is_closed(again, GREET_S + 5)


def test_a_token_may_come_before_it_is_told(door: Door, made: RunCertificate, held: Held) -> None:
    token = os.urandom(16)
    over_tls(door.port, held, made, token)
    time.sleep(0.2)
    assert not door.given
    door.door.take(LinkMessage(1, 7, token.hex()))
    assert door.gives(1)


def test_a_stranger_with_a_foreign_certificate_and_the_right_token_gets_nothing(
    door: Door, foreign: RunCertificate, held: Held
) -> None:
    token = os.urandom(16)
    door.door.take(LinkMessage(1, 7, token.hex()))
    for certificate in (foreign, None):
        end = over_tls(door.port, held, certificate, token)
        assert is_closed(end, 5)
    assert not door.gives(1, 0.3)


def test_a_worker_takes_no_listener_with_a_foreign_certificate(made: RunCertificate, foreign: RunCertificate) -> None:
    """Nor does it say its token there."""
    other, mine = Door(foreign._asdict()), Door(made._asdict())
    token = os.urandom(16)
    other.door.take(LinkMessage(0, 7, token.hex()))
    mine.door.take(LinkMessage(1, 7, token.hex(), HERE, other.port))
    assert mine.gives(1) and mine.given[0][1] is None
    assert other.given == []
    other.close()
    mine.close()


def test_a_listener_that_is_gone_is_told_as_no_connection(made: RunCertificate) -> None:
    mine = Door(made._asdict())
    with socket.create_server((HERE, 0)) as server:
        port = server.getsockname()[1]
    mine.door.take(LinkMessage(1, 7, "ab" * 16, HERE, port))
    assert mine.gives(1, GREET_S + 5) and mine.given[0][1] is None
    mine.close()


def test_a_worker_that_cannot_be_reached_is_suspected_by_number(made: RunCertificate) -> None:
    linked = Linked(0, 1, network=made._asdict())
    one, other = linked.enter(0)
    real = linked.desks.by_worker[1].link.send

    def astray(message: LinkMessage, fds: Any = ()) -> None:
        with socket.create_server((HERE, 0)) as server:
            port = server.getsockname()[1]
        real(replace(message, port=port if message.port else 0))

    linked.desks.by_worker[1].link.send = astray
    other.in_order.post(0, KEY, ONE)
    one.in_order.send(1, KEY, (torch.ones(1),))
    with pytest.raises(TransferFailedError, match="worker 0 cannot be reached") as failed:
        other.in_order.take(0, KEY)
    assert failed.value.peer == 0
    linked.desks.by_worker[1].link.send = real
    one, other = linked.enter(1)
    exchange(one, other, 2)
    linked.close()


def test_a_door_goes_on_when_a_connection_could_not_be_taken(door: Door, made: RunCertificate, held: Held) -> None:
    """Such as one that was reset before it was accepted, or with no descriptor left."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (psutil.Process().num_fds() + 2, limits[1]))
    try:
        with contextlib.suppress(OSError):
            for _ in range(4):
                reach(door.port, held)
        time.sleep(0.3)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    token = os.urandom(16)
    door.door.take(LinkMessage(1, 7, token.hex()))
    over_tls(door.port, held, made, token)
    assert door.gives(1)


def test_strangers_are_closed_in_time_and_leave_no_thread(
    door: Door, made: RunCertificate, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "GREET_S", 0.5)
    before = threading.active_count()
    for _ in range(20):
        reach(door.port, held)
    ends = [over_tls(door.port, held, made, os.urandom(16)) for _ in range(3)]
    assert all(is_closed(each, 5) for each in ends)
    assert all(is_closed(each, 5) for each in held[:20])
    until_s = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < until_s:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_huge_lengths_of_a_worker_with_the_right_token_end_its_link_and_take_no_memory(
    made: RunCertificate, held: Held
) -> None:
    linked = Linked(0, 1, network=made._asdict())
    tokens: list[LinkMessage] = []
    linked.desks.by_worker[1].link.send = lambda message, fds=(): tokens.append(message)
    one, _ = linked.enter(0)
    one.in_order.send(1, KEY, (torch.ones(1),))
    one.in_order.post(1, OTHER, ONE)
    (told,) = tokens
    used = psutil.Process().memory_info().rss
    lengths = Frame(0, 5, MOST_BYTES, 0, MOST_BYTES).packed()
    over_tls(told.port, held, made, bytes.fromhex(told.token) + lengths + bytes(1 << 20))
    with pytest.raises(TransferFailedError, match="the link to worker 1 brings no frames"):
        one.in_order.take(1, OTHER)
    assert psutil.Process().memory_info().rss - used < 64 << 20
    linked.close()
