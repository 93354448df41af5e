"""Hosts made of namespaces: their links, clocks and power, an etcd over TLS on three of them; and nothing stays."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from engine.core.errors import EnvironmentLacksError
from engine.harness.host_checks import hosts_error
from engine.harness.testbed import BedEtcd, BedHost, HostBed
from tests.e2e.launcher import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
HOUR_S = 3600
# Prints a line when it listens, one for the greeting, and one for the end of the connection.
SERVER = """
import socket, sys
server = socket.create_server((sys.argv[1], 7))
print("listens", flush=True)
peer = server.accept()[0]
print(peer.recv(9).decode(), flush=True)
print("end" + peer.recv(9).decode(), flush=True)
"""
CLIENT = "import socket, sys, time; s = socket.create_connection((sys.argv[1], 7)); s.send(b'greets'); time.sleep(60)"


@pytest.fixture(name="allowed", autouse=True)
def _allowed() -> None:
    if why := hosts_error():
        pytest.skip(why)


def left_of(pids: Sequence[int], within_s: float = 5.0) -> list[int]:
    """Waits for the end of processes, and returns those that are left."""
    until_s = time.monotonic() + within_s
    while (left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < until_s:
        time.sleep(0.01)
    return left


def links() -> list[str]:
    return sorted(os.listdir("/sys/class/net"))


class Connected:
    """A connection from a host to another one; the other end prints what it sees."""

    def __init__(self, one: BedHost, other: BedHost):
        words = other.words(sys.executable, "-S", "-c", SERVER, other.address)
        self.server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self.server.stdout is not None
        self._seen: Iterator[str] = self.server.stdout
        assert next(self._seen) == "listens\n"
        self.client = one.start(sys.executable, "-S", "-c", CLIENT, other.address)
        assert next(self._seen) == "greets\n"

    def sees_the_end(self, within_s: float) -> bool:
        try:
            self.server.wait(within_s)
        except subprocess.TimeoutExpired:
            return False
        return next(self._seen) == "end\n"


def test_three_hosts_with_an_etcd_lose_a_link_and_the_power_and_leave_nothing_behind(tmp_path: Path) -> None:
    before = links()
    with HostBed(3, HOUR_S) as bed:
        pids = [each.pid for each in bed.hosts]
        clocks = [float(each.run("cat", "/proc/uptime").stdout.split()[0]) for each in bed.hosts]
        assert [round((after - first) / HOUR_S) for first, after in pairwise(clocks)] == [1, 1]
        assert [each.run("cat", "/proc/sys/kernel/hostname").stdout for each in bed.hosts] == ["h0\n", "h1\n", "h2\n"]
        killed, dark = Connected(bed.hosts[1], bed.hosts[2]), Connected(bed.hosts[0], bed.hosts[1])
        bed.hosts[1].run("pkill", "-KILL", "-f", "greets")
        assert killed.sees_the_end(2.0)  # the control: the kernel of a process that dies says so to the other end

        with BedEtcd(bed.hosts, tmp_path) as etcd:
            bed.hosts[2].cut()
            assert not etcd.answers(bed.hosts[2], 0.5)
            assert etcd.answers(bed.hosts[0])
            bed.call("ip", "link", "set", bed.hosts[2]._link, "up")
            until_s = time.monotonic() + 10
            while not etcd.answers(bed.hosts[2], 1.0):
                assert time.monotonic() < until_s
            bed.hosts[0].power_off()
            assert left_of(pids[:1]) == []
            assert not dark.sees_the_end(0.5)  # no word of the dying left the host
            while not (etcd.answers(bed.hosts[1], 1.0) and etcd.answers(bed.hosts[2], 1.0)):
                assert time.monotonic() < until_s + 10
            assert etcd.leader() in bed.hosts[1:]
    assert left_of(pids) == []
    assert links() == before
    for each in (killed, dark):
        each.server.kill()
        each.server.communicate()


CRASHES = """
import sys
from engine.harness.testbed import HostBed
with HostBed(2) as bed:
    started = bed.hosts[0].start("sleep", "1000")
    print(*[each.pid for each in bed.hosts], started.pid, flush=True)
    sys.stdin.read()
"""


def begun(words: Sequence[str] = ()) -> tuple[subprocess.Popen[str], list[int]]:
    """Starts a program that makes a bed; returns it with processes of the bed."""
    command = [*words, sys.executable, "-c", CRASHES]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    made = subprocess.Popen(command, text=True, cwd=ROOT, **pipes)  # type: ignore[call-overload]
    line = made.stdout.readline()
    if not line:
        raise EnvironmentLacksError(made.communicate()[1])
    return made, [int(each) for each in line.split()]


def test_a_bed_is_gone_after_a_crash_of_its_maker() -> None:
    made, pids = begun()
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    made.send_signal(signal.SIGKILL)
    made.communicate()
    assert left_of(pids) == []


def test_without_namespaces_the_reason_is_that_of_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.harness.testbed.hosts_error", lambda: "no ip (iproute2 has it)")
    with pytest.raises(EnvironmentLacksError, match="makes no hosts of namespaces: no ip"), HostBed(2):
        pass


@pytest.mark.soak
def test_a_bed_needs_no_root() -> None:
    if os.geteuid() or shutil.which("setpriv") is None:
        pytest.skip("needs root, to give it up")
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    if subprocess.run([*nobody, "test", "-r", str(ROOT / "engine")], check=False).returncode:
        pytest.skip("another user cannot read these modules")
    made, pids = begun(nobody)
    made.communicate()
    assert left_of(pids) == []


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_twenty_beds_lose_hosts_at_any_moment_and_leave_nothing(tmp_path: Path) -> None:
    draw, before = random.Random(0), links()  # noqa: S311
    for number in range(20):
        folder = tmp_path / str(number)
        folder.mkdir()
        with HostBed(4, HOUR_S) as bed, BedEtcd(bed.hosts, folder) as etcd:
            pids = [each.pid for each in bed.hosts]
            lost = draw.choice([etcd.leader(), draw.choice(bed.hosts[:3])])
            time.sleep(draw.random())
            lost.power_off()
            rest = [each for each in etcd.hosts if each is not lost]
            until_s = time.monotonic() + 20
            while not all(etcd.answers(each, 1.0) for each in rest):
                assert time.monotonic() < until_s
        assert left_of(pids) == []
        assert links() == before
