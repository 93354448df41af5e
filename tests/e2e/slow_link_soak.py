"""``python -m tests.e2e.slow_link_soak``: how late messages of training are, while state goes over the same slow link.

Two hosts of a bed, as root. The sender has a message for training every 50 ms, and after two seconds 24 MiB of state.
The table has both ways: state in its own lane, and in that of other messages.
"""

from __future__ import annotations

import argparse
import os
import socket
import struct
import sys
import time
from typing import Any, NamedTuple

from engine.core.links import ASIDE, IN_ORDER, STATE, Mailbox, key_of
from engine.harness.testbed import HostBed
from engine.runtime.transport.link_wire import Wire
from engine.runtime.transport.peer_link import Ends, PeerLink, host_room
from tests.e2e.launcher import ROOT

_PORT, _COUNT, _EVERY_S, _STATE_AT = 7000, 300, 0.05, 40
_MESSAGE_BYTES, _STATE_BYTES = 32 << 10, 24 << 20


class Arrival(NamedTuple):
    """A receive in a lane, which keeps how late its message is, in milliseconds."""

    lane: int
    arrived: list[tuple[int, float]]

    def arrives(self, source: int, room: memoryview) -> None:
        """Keeps it."""
        (sent_ns,) = struct.unpack("Q", room[:8])
        self.arrived.append((self.lane, (time.monotonic_ns() - sent_ns) / 1e6))


def receive(address: str) -> None:
    """Prints by how much each message is late, in milliseconds, and when the state has come."""
    mailbox: Mailbox[Any, memoryview] = Mailbox()
    mailbox.enter(0)
    arrived: list[tuple[int, float]] = []

    with socket.create_server((address, _PORT)) as server:
        print("ready", flush=True)
        end = server.accept()[0]
    for number in range(_COUNT):
        mailbox.post(0, key_of(number, IN_ORDER), Arrival(IN_ORDER, arrived), host_room(_MESSAGE_BYTES))
    for lane in (ASIDE, STATE):
        mailbox.post(0, key_of(0, lane), Arrival(lane, arrived), host_room(_STATE_BYTES))
    link = PeerLink(0, mailbox, host_room)
    link.attach(Ends(Wire(end)))
    while len(arrived) <= _COUNT and link.read():
        time.sleep(0.0005)
    link.close()
    print(*(f"{lane} {late_ms:.3f}" for lane, late_ms in arrived), sep="\n", flush=True)


def send(address: str, lane: int) -> None:
    """Sends the messages, and the state in a lane."""
    link = PeerLink(1, Mailbox(), host_room)
    link.attach(Ends(Wire(socket.create_connection((address, _PORT)))))
    began_s = time.monotonic()
    for number in range(_COUNT):
        if number == _STATE_AT:
            link.send(0, key_of(0, lane), [_stamped(_STATE_BYTES)])
        link.send(0, key_of(number, IN_ORDER), [_stamped(_MESSAGE_BYTES)])
        while time.monotonic() < began_s + _EVERY_S * (number + 1):
            link.flush()
            time.sleep(0.001)
    while link.owes:
        link.flush()
        time.sleep(0.001)
    time.sleep(5.0)  # for what the kernel still has


def _stamped(size: int) -> memoryview:
    return memoryview(struct.pack("Q", time.monotonic_ns()) + bytes(size - 8))


def measured(bed: HostBed, lane: int) -> str:
    """Returns a line of the table."""
    words = [sys.executable, "-m", "tests.e2e.slow_link_soak"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    near, far = bed.hosts
    read_fd, write_fd = os.pipe()
    with open(read_fd) as lines, open(write_fd, "wb") as log:
        far.start(*words, "--receive", far.address, environment=environment, log=log)
        log.close()
        assert lines.readline() == "ready\n"
        sender = near.start(*words, "--send", far.address, "--lane", str(lane), environment=environment)
        came = [line.split() for line in lines]
    sender.kill()
    late_ms = [float(late) for each, late in came if int(each) == IN_ORDER]
    (place,) = (place for place, (each, _) in enumerate(came) if int(each) != IN_ORDER)
    before, during = sorted(late_ms[:_STATE_AT]), sorted(late_ms[_STATE_AT : max(place, _STATE_AT + 1)])
    times = [f"{each[len(each) // 2]:7.1f} {each[-1]:8.1f}" for each in (before, during)]
    return f"{'own' if lane == STATE else 'other':6} {'  '.join(times)}  {float(came[place][1]) / 1e3:6.1f}"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabits", type=int, default=40)
    parser.add_argument("--receive")
    parser.add_argument("--send")
    parser.add_argument("--lane", type=int)
    given = parser.parse_args()
    if given.receive:
        receive(given.receive)
    elif given.send:
        send(given.send, given.lane)
    else:
        print("lane   ms late: median, worst before; the same during; seconds of the state")
        for lane in (STATE, ASIDE):
            with HostBed(2) as bed:
                shape = ["rate", f"{given.megabits}mbit", "burst", "32kb", "latency", "400ms"]
                bed.call("tc", "qdisc", "add", "dev", f"to-{bed.hosts[1].name}", "root", "tbf", *shape)
                print(measured(bed, lane))


if __name__ == "__main__":
    main()
