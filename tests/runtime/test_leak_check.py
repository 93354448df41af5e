"""What a run leaves behind is found, whoever holds it; what belongs to others is not."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from engine.harness import leak_check as leftovers
from engine.harness.leak_check import LeakCheck, mark_processes
from engine.runtime.process import link

NO_SERVER = -1
OF_THE_HOST = link.SHARED_MEMORY


@pytest.fixture(name="memory", autouse=True)
def _memory(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has a check that waits shortly and looks at shared memory of its own: other tests share that of the host."""
    folder = tmp_path_factory.mktemp("shm")
    monkeypatch.setattr(link, "SHARED_MEMORY", folder)
    monkeypatch.setattr(leftovers, "_GONE_WITHIN_S", 0.05)
    monkeypatch.setenv("_BAMBOO_CASE", "")  # put back afterwards
    mark_processes()
    return folder


def left(traces: LeakCheck, folder: Path) -> list[str]:
    return traces.left(folder, "run", None, NO_SERVER)


def test_nothing_is_found_where_nothing_was_left(tmp_path: Path) -> None:
    nap = [sys.executable, "-c", "import time; time.sleep(60)"]
    other = subprocess.Popen(nap)  # started before, by somebody else
    mark_processes()
    traces = LeakCheck()
    subprocess.run([sys.executable, "-c", ""], check=True)
    assert left(traces, tmp_path) == []
    other.kill()
    other.wait(10)


def test_a_process_is_found_though_its_parent_is_gone(tmp_path: Path) -> None:
    traces = LeakCheck()
    code = "import subprocess; print(subprocess.Popen(['sleep', '60'], stdout=-3, stderr=-3).pid)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    pid = int(done.stdout)
    pidfd = os.pidfd_open(pid)
    assert left(traces, tmp_path) == [f"process {pid} (sleep)"]
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.close(pidfd)


def test_a_port_of_this_process_is_found(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)):
        traces = LeakCheck()
        with socket.create_server(("127.0.0.1", 0)) as later:
            port = later.getsockname()[1]
            assert left(traces, tmp_path) == [f"this process listens on port {port}"]
        assert left(LeakCheck(), tmp_path) == []


def test_shared_memory_is_found_once_nobody_holds_it(tmp_path: Path, memory: Path) -> None:
    traces = LeakCheck()
    with (memory / "piece").open("w"):
        assert left(traces, tmp_path) == []
    assert left(traces, tmp_path) == ["shared memory piece"]
    assert Path("/dev/shm") == OF_THE_HOST


def test_pieces_of_nccl_that_nobody_holds_are_removed_behind_a_run(memory: Path) -> None:
    """Only the last of two that connect removes one, and it may have been killed."""
    (memory / "nccl-before").touch()
    with link.swept_of_nccl():
        (memory / "nccl-new").touch()
        (memory / "other").touch()
        held = (memory / "nccl-held").open("w")
    assert sorted(each.name for each in memory.iterdir()) == ["nccl-before", "nccl-held", "other"]
    held.close()


def test_files_of_the_store_are_found(tmp_path: Path) -> None:
    traces = LeakCheck()
    (tmp_path / "etcd").mkdir()
    assert left(traces, tmp_path) == [f"files of the store in {tmp_path / 'etcd'}"]
