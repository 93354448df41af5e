"""Children of the fork server: what they start with, how their end is told, and that they never outlive anyone."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.core.errors import EnvironmentLacksError, ExitCode
from engine.core.messages import StopMessage
from engine.runtime.process import subprocesses
from engine.runtime.process.fork_client import Child, ForkServer
from engine.runtime.process.link import Link
from tests.runtime.peers import ROOT, PeerServer


def has_ended(child: Child, timeout_s: float = 5.0) -> bool:
    """Waits for the end of a child by its pidfd."""
    return bool(select.select([child.pidfd], [], [], timeout_s)[0])


def code_of(child: Child) -> int:
    """Waits for the end of a child, and returns how it ended."""
    code = child.wait(5.0)
    assert code is not None, f"{child.name} does not end"
    return code


def exits(code: int) -> None:
    os._exit(code)


def raises() -> None:
    print("on stdout")
    raise ValueError("planted")


def sleeps() -> None:
    time.sleep(60)


@pytest.mark.parametrize("code", [0, 1, int(ExitCode.FENCED), 255])
def test_exit_codes_are_told(peers: PeerServer, code: int) -> None:
    peer = peers.start(exits, code)
    assert has_ended(peer.child)
    assert code_of(peer.child) == code
    assert peer.link.receive() is None


def test_an_exception_is_code_1_and_its_traceback_is_in_the_log(peers: PeerServer) -> None:
    peer = peers.start(raises)
    assert code_of(peer.child) == 1
    log = peer.log.read_text()
    assert log.startswith("on stdout\nTraceback (most recent call last):\n")
    assert log.endswith("ValueError: planted\n")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_signals_go_to_the_pidfd_and_their_numbers_are_told(peers: PeerServer, number: signal.Signals) -> None:
    peer, other = peers.start(sleeps), peers.start(sleeps)
    peer.child.signal(number)
    assert has_ended(peer.child)
    assert code_of(peer.child) == -number
    assert not has_ended(other.child, 0.05)
    other.child.signal(signal.SIGKILL)
    assert has_ended(other.child)


def test_ctrl_c_is_the_launchers_to_handle(peers: PeerServer) -> None:
    peer = peers.start(sleeps)
    peer.child.signal(signal.SIGINT)
    assert not has_ended(peer.child, 0.1)
    peer.child.signal(signal.SIGTERM)
    assert code_of(peer.child) == -signal.SIGTERM


def test_a_signal_to_a_child_that_has_ended_reaches_nobody(peers: PeerServer) -> None:
    peer = peers.start(exits, 0)
    assert code_of(peer.child) == 0
    peer.child.signal(signal.SIGKILL)
    assert not Path(f"/proc/{peer.child.pid}").exists(), "it is there still"


def test_children_that_end_at_once_are_all_seen(peers: PeerServer) -> None:
    started = [peers.start(exits, code) for code in range(40)]
    assert all(has_ended(peer.child) for peer in started)
    assert len({peer.child.pidfd for peer in started}) == 40
    assert [code_of(peer.child) for peer in started] == list(range(40))


def describes_itself(*fds: int) -> dict[str, Any]:
    with open("/proc/self/comm") as comm, open("/proc/self/status") as status:
        name = comm.read().strip()
        threads = next(int(line.split()[1]) for line in status if line.startswith("Threads"))
    open_fds = {
        int(each): os.readlink(f"/proc/self/fd/{each}")
        for each in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{each}")
    }
    return {
        "name": name,
        "pid": os.getpid(),
        "threads": threads,
        "session": os.getsid(0),
        "parent": os.getppid(),
        "given": fds,
        "files": sorted(target for target in open_fds.values() if not target.startswith("socket:")),
        "sockets": sum(target.startswith("socket:") for target in open_fds.values()),
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "ignored": sorted(each for each in signal.valid_signals() if signal.getsignal(each) is signal.SIG_IGN),
    }


def test_a_child_starts_clean(peers: PeerServer, tmp_path: Path) -> None:
    neighbour = peers.start(sleeps)
    with open(tmp_path / "given", "w") as given:
        peer = peers.start(describes_itself, fds=[given.fileno()])
        found = peer.result()
    neighbour.child.signal(signal.SIGKILL)
    assert found["name"] == peer.child.name
    assert found["pid"] == found["session"] == peer.child.pid
    assert found["parent"] == os.getpid()
    assert found["threads"] == 1
    assert len(found["given"]) == 1
    own = ["/dev/null", str(tmp_path / "given"), str(peer.log), str(peer.log)]
    assert found["files"] == sorted(own)
    assert found["sockets"] == 2, "it holds a link that is not its own: one to this test, one to its agent"
    assert found["blocked"] == []
    ours = [each for each in signal.valid_signals() if signal.getsignal(each) is signal.SIG_IGN]  # two by Python
    assert found["ignored"] == sorted({signal.SIGINT, *ours})


@pytest.fixture
def server() -> Iterator[ForkServer]:
    with ForkServer() as started:
        yield started


def start_worker(server: ForkServer, log: Path) -> tuple[Child, Link]:
    """Starts a real worker, which waits to be told its job."""
    near, far = Link.pair()
    fd = os.open(log, os.O_WRONLY | os.O_CREAT)
    child = server.fork("worker", "worker", fd, [far.fileno(), *[fd] * 3])
    os.close(fd)
    far.close()
    return child, near


def test_workers_end_by_themselves_and_not_with_the_server(server: ForkServer, tmp_path: Path) -> None:
    """One server, whose start takes a second, for all that needs its death."""
    (told, told_link), (orphan, orphan_link), *rest = (start_worker(server, tmp_path / str(n)) for n in range(4))
    told_link.send(StopMessage())
    assert code_of(told) == ExitCode.OK
    told_link.close()
    # A worker without an agent has nobody who could tell it what to do.
    orphan_link.close()
    assert code_of(orphan) == ExitCode.INTERNAL
    before = server.pid
    os.kill(before, signal.SIGKILL)
    assert not any(has_ended(child, 0.1) for child, _ in rest)
    assert server.has_ended()
    # The next child has another server started.
    late, late_link = start_worker(server, tmp_path / "late")
    assert server.pid != before
    for child, link in (*rest, (late, late_link)):
        link.send(StopMessage())
        assert code_of(child) == ExitCode.OK
        link.close()


def test_a_server_that_stands_still_is_replaced(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = [start_worker(server, tmp_path / "first")]
    before = server.pid
    os.kill(before, signal.SIGSTOP)
    monkeypatch.setattr("engine.runtime.process.fork_client._ANSWER_S", 0.2)
    monkeypatch.setattr("engine.runtime.process.fork_client._WAIT_S", 0.05)
    waits: list[int] = []
    monkeypatch.setattr(server, "_while_waiting", lambda: waits.append(server.pid))
    children.append(start_worker(server, tmp_path / "second"))
    assert waits.count(before) >= 2  # the leases of the host are renewed there
    assert server.pid != before
    assert not Path(f"/proc/{before}").exists()
    for child, link in children:
        link.send(StopMessage())
        assert code_of(child) == ExitCode.OK
        link.close()


def test_closing_the_server_ends_what_is_left(tmp_path: Path) -> None:
    server = ForkServer()
    children = [start_worker(server, tmp_path / str(number)) for number in range(3)]
    children[1][0].signal(signal.SIGSTOP)
    os.kill(server.pid, signal.SIGSTOP)
    server.close()
    for child, link in children:
        assert child.is_closed
        assert not Path(f"/proc/{child.pid}").exists()
        assert link.receive() is None
        link.close()
    assert server.has_ended()


STARTS_AND_WAITS = """
import os, signal, sys, time
from pathlib import Path
from engine.runtime.process.fork_client import ForkServer
from tests.runtime.test_fork_client import start_worker
server = ForkServer()
children, links = zip(*(start_worker(server, Path(sys.argv[1]) / str(number)) for number in range(2)))
until_s = time.monotonic() + 10
while any(len(os.listdir(f"/proc/{child.pid}/task")) < 2 for child in children):
    assert time.monotonic() < until_s  # each waits for the first word of the launcher
    time.sleep(0.001)
children[0].signal(signal.SIGSTOP)
if sys.argv[2] == "before":
    os.kill(server.pid, signal.SIGKILL)
print(server.pid, *(child.pid for child in children), flush=True)
signal.pause()
"""


@pytest.mark.parametrize("when", ["before", "at once"])
def test_nothing_outlives_the_launcher_and_its_server(tmp_path: Path, when: str) -> None:
    """The server was ended long before, or is with its launcher.

    A worker that was stopped before the launcher's first word to it outlived both.
    """
    command = [sys.executable, "-c", STARTS_AND_WAITS, str(tmp_path), when]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as launcher:
        assert launcher.stdout is not None
        pids = [int(each) for each in launcher.stdout.readline().split()]
        assert len(pids) == 3
        if when == "at once":
            os.kill(pids[0], signal.SIGKILL)
        launcher.kill()
    until_s = time.monotonic() + 5
    while left := [pid for pid in pids if Path(f"/proc/{pid}/exe").exists()]:
        assert time.monotonic() < until_s, left
        time.sleep(0.01)


def test_a_server_that_cannot_start_is_a_lack_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    false = shutil.which("false")
    assert false is not None
    monkeypatch.setattr(sys, "executable", false)
    with (
        ForkServer() as server,
        open(tmp_path / "log", "w") as log,
        pytest.raises(EnvironmentLacksError) as lacking,
    ):
        server.fork("worker", "worker", log.fileno())
    assert str(lacking.value) == "the fork server ended at start with code 1"


def test_a_module_that_the_server_misses_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "torch.py").write_text("import planted_lack")
    with (
        ForkServer({"PYTHONPATH": str(tmp_path)}) as server,
        open(tmp_path / "log", "w") as log,
        pytest.raises(EnvironmentLacksError, match="cannot start a process: No module named 'planted_lack'"),
    ):
        server.fork("worker", "worker", log.fileno())


def test_children_of_a_tree_that_is_not_installed_find_its_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are started with `-P`, which leaves out the present folder, where `python -m bamboo_cli` found them."""
    root = str(ROOT)
    monkeypatch.setattr(sys, "path", [root, *(each for each in sys.path if each not in ("", root))])
    monkeypatch.setenv("PYTHONPATH", "/of/the/user")
    assert subprocesses.inherited()["PYTHONPATH"] == f"{root}:/of/the/user"
    monkeypatch.setenv("PYTHONPATH", f"/of/the/user:{root}")
    assert subprocesses.python_path() == f"/of/the/user:{root}"
