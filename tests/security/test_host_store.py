"""Another user of the host and the stores of a run: no key is read or deleted, no run is ended, no password is seen."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from engine.core.errors import CoordinatorUnavailableError
from engine.runtime.store.embedded_etcd import EmbeddedEtcd
from engine.runtime.store.etcd_kv import EtcdKV
from engine.runtime.store.etcd_settings import SOCKET, EtcdSettings, private_settings
from tests.e2e.launcher import Launcher

STRANGER = 65534
PASSWORD = "correct-horse-battery"  # noqa: S105 made up
LONG_RUN = ("--model", "timed", "--stages", "2", "--microbatches", "2", "--steps", "100000", "--validate-every", "0")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="acts as another user, which only root can")

# Tries all that it finds of the processes whose numbers it gets; prints what worked.
ATTEMPTS = """
import os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
done = []
def attempt(what, call):
    try:
        call()
        done.append(what)
    except OSError:
        pass
def connect(path):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
for listed in open("/proc/net/unix").read().splitlines()[1:]:
    name = listed.split()[-1]
    if name.endswith(("client:0", "peer:0")):
        attempt("socket " + name, lambda: connect(name))
for pid in sys.argv[2:]:
    attempt("environ " + pid, lambda: open(f"/proc/{pid}/environ", "rb").read())
    attempt("descriptors " + pid, lambda: os.listdir(f"/proc/{pid}/fd"))
    attempt("folder " + pid, lambda: os.listdir(f"/proc/{pid}/cwd/"))
    attempt("signal " + pid, lambda: os.kill(int(pid), 15))
    for number in range(60):
        attempt(f"memory {number} of {pid}", lambda: open(f"/proc/{pid}/fd/{number}", "r+b").close())
attempt("data", lambda: connect(sys.argv[1] + "/client:0"))
attempt("listing", lambda: os.listdir(sys.argv[1]))
print(done)
"""


def as_stranger(*arguments: str) -> str:
    """Runs the attempts as another user; returns what they print."""
    command = [sys.executable, "-I", "-S", "-c", ATTEMPTS, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture(name="run", scope="module")
def _run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """A run in progress, with a password in the environment of its launcher, in folders that everybody can enter."""
    folder = tmp_path_factory.mktemp("stranger")
    for each in (folder, *folder.parents[:3]):
        each.chmod(each.stat().st_mode | 0o055)
    secrets = {"BAMBOO_ETCD_USER": "alice", "BAMBOO_ETCD_PASSWORD": PASSWORD}
    launcher = Launcher(folder / "0", ("run", *LONG_RUN), secrets)
    launcher.wait_until(lambda: len(launcher.events("commit")) >= 2)
    yield launcher
    launcher.kill_all()


def test_nothing_of_a_run_listens_on_a_port(run: Launcher) -> None:
    """Before, etcd and the rendezvous store listened on a port each, without a password, and so did each worker."""
    names = run.processes()
    assert {name.partition("-")[0] for name in names} >= {"launcher", "bamboo", "etcd"}
    assert "bamboo-store" not in names
    assert run.listeners() == set()


def test_no_child_has_the_password_in_its_environment(run: Launcher) -> None:
    """Before, fork server, workers, etcd and the remover had BAMBOO_ETCD_PASSWORD in /proc/PID/environ."""
    children = psutil.Process(run.process.pid).children(recursive=True)
    assert len(children) >= 5
    for child in children:
        assert PASSWORD.encode() not in Path(f"/proc/{child.pid}/environ").read_bytes(), child.name()
        assert b"BAMBOO_ETCD" not in Path(f"/proc/{child.pid}/environ").read_bytes(), child.name()


@needs_root
def test_another_user_reads_and_ends_nothing(run: Launcher) -> None:
    """Before, uid 65534 read `state`, deleted `coordinator`, which ended the run, and overwrote rendezvous keys."""
    data = run.run_folder.resolve() / "logs" / "etcd"
    assert (data / SOCKET).is_socket()
    committed = len(run.events("commit"))
    assert as_stranger(str(data), *map(str, run.processes().values())) == "[]"
    run.wait_until(lambda: len(run.events("commit")) > committed)


def keys_of(settings: EtcdSettings) -> list[str]:
    """Returns the keys that a client finds."""
    kv = EtcdKV(settings, "/bamboo/x/", deadline_s=1.0)
    try:
        return [item.key for item in kv.read_prefix("").items]
    finally:
        kv.close()


def test_a_store_is_reached_under_a_long_path_and_after_a_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket's path has 108 bytes at most; the folder of a run may be deeper, and it may be moved."""
    logs = tmp_path / ("a" * 120) / ("b" * 120)
    logs.mkdir(parents=True)
    with EmbeddedEtcd(logs) as server:
        kv = EtcdKV(server.settings(), "/bamboo/x/")
        kv.put("here", b"")
        monkeypatch.chdir("/")
        assert keys_of(private_settings(logs)) == ["here"]
        moved = logs.rename(tmp_path / "moved")
        assert keys_of(private_settings(moved)) == ["here"]
        assert kv.get("here") is not None
        kv.close()
        moved.rename(logs)


@pytest.mark.parametrize("how", ["link", "mode", "group", "file", "linked socket"])
def test_a_socket_that_is_not_private_is_not_asked(tmp_path: Path, how: str) -> None:
    """A run folder from elsewhere may hold a link to the socket of another user."""
    data, other = tmp_path / "etcd", tmp_path / "other"
    for folder in (data, other):
        folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(other / SOCKET))
        listener.listen()
        if how == "link":
            data.rmdir()
            data.symlink_to(other)
        elif how in ("mode", "group"):
            (other / SOCKET).rename(data / SOCKET)
            data.chmod(0o711 if how == "mode" else 0o710)
        elif how == "file":
            (data / SOCKET).write_text("")
        else:
            (data / SOCKET).symlink_to(other / SOCKET)
        since_s = time.monotonic()
        with pytest.raises(CoordinatorUnavailableError, match="etcd was not contacted"):
            keys_of(private_settings(tmp_path))
        assert time.monotonic() - since_s < 1
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


@needs_root
def test_a_socket_of_another_user_is_not_asked(tmp_path: Path) -> None:
    """Before, the port that a run folder named was asked, of any user."""
    data = tmp_path / "etcd"
    data.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(data / SOCKET))
        for owned in (data / SOCKET, data):
            os.chown(owned, STRANGER, STRANGER)
            with pytest.raises(CoordinatorUnavailableError, match="it is not private to this user"):
                keys_of(private_settings(tmp_path))
            os.chown(owned, 0, 0)
