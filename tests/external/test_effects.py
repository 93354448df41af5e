"""Faults beyond signals, on real processes, file systems and cgroups; what a host does not allow is skipped."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from engine.core.faults.external import ExternalFault, ExternalMoment, ExternalScenario, ExternalTarget
from engine.core.faults.launchers import PLAIN
from engine.external import effects
from engine.external.processes import JobProcess

pytestmark = pytest.mark.timeout(60)
PEERS = """
import socket, sys, os
server = socket.create_server(("127.0.0.1", 0))
child = os.fork()
own = socket.create_connection(server.getsockname()) if child == 0 else server.accept()[0]
own.recv(1) if child == 0 else (os.write(1, b"%d\\n" % child), own.sendall(b"x"))
os.write(1, b"ready\\n")
try:
    own.recv(1)
except OSError as error:
    os.write(1, b"lost %d\\n" % error.errno)
child and os.wait()
"""
HUNGRY = "import time; print(1, flush=True); kept = []\nwhile True: kept.append(bytearray(1 << 20)); time.sleep(0.002)"


def _process(pid: int, rank: int) -> JobProcess:
    return JobProcess(pid, os.pidfd_open(pid), os.getpid(), 0, rank, rank)


def _outputs(*jobs: subprocess.Popen[str]) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    return ((job, job.stdout) for job in jobs if job.stdout)


def _scenario(do: str, target: ExternalTarget, **parameters: str) -> ExternalScenario:
    fault = ExternalFault("first", ExternalMoment(step=1), target, do, parameters)
    return ExternalScenario("s", "s", (), PLAIN, (fault,))


@pytest.fixture(name="small_disk")
def _small_disk(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "disk").mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path / "disk")]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield tmp_path / "disk"
    words = ["umount", str(tmp_path / "disk")]
    subprocess.run(words, check=True)


def test_a_full_disk_refuses_every_byte_until_the_fault_ends(small_disk: Path, tmp_path: Path) -> None:
    scenario = _scenario("disk-full", ExternalTarget(), path=str(small_disk))
    assert [*effects.missing(scenario, tmp_path / "results")] == []
    effect = effects.begin_effect(scenario.faults[0], [])
    assert not isinstance(effect, str) and effect.seen() == f"no byte is free in {small_disk}"
    with pytest.raises(OSError, match="No space left on device"):
        (small_disk / "state.pt").write_bytes(b"1")
    effect.end()
    (small_disk / "state.pt").write_bytes(bytes(1 << 19))


def test_a_large_disk_and_that_of_the_records_are_never_filled(small_disk: Path, tmp_path: Path) -> None:
    def refused(path: Path, results: Path) -> str:
        scenario = _scenario("disk-full", ExternalTarget(), path=str(path))
        return "\n".join(map(str, effects.missing(scenario, results)))

    assert "expected another file system than that of --results" in refused(small_disk, small_disk / "new")
    assert "expected a folder in which you may write" in refused(tmp_path / "none", tmp_path)
    if os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize > 1 << 30:
        assert "expected a file system with at most 1 GiB free" in refused(tmp_path, small_disk)


def test_a_cut_resets_the_connections_of_both_ranks_and_no_others() -> None:
    if list(effects.missing(_scenario("cut", ExternalTarget(ranks=(0, 1))), Path())):
        pytest.skip("no connection can be destroyed here")
    words = [sys.executable, "-c", PEERS]
    with (
        subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as job,
        subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as beside,
    ):
        assert job.stdout
        pids, others = ([of.pid, int(min(out.readline() for _ in range(3)))] for of, out in _outputs(job, beside))
        edge = effects.cut([_process(pid, rank) for rank, pid in enumerate(pids)])
        assert not isinstance(edge, str) and edge.seen() == "1 TCP connection of ranks 0 and 1 destroyed"
        codes = {int(line.split()[1]) for line in job.stdout}
        assert codes and codes <= {errno.ECONNRESET, errno.ECONNABORTED}
        assert job.wait() == 0 and beside.poll() is None
        apart = [_process(others[0], 0), _process(os.getpid(), 1)]
        assert effects.cut(apart) == "no TCP connection joins ranks 0 and 1"
        for pid in others:
            os.kill(pid, signal.SIGKILL)


def test_a_process_that_needs_more_memory_is_ended_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = _scenario("oom", ExternalTarget(rank=0))
    if list(effects.missing(scenario, Path())):
        pytest.skip("no memory cgroup is lent here")
    with subprocess.Popen([sys.executable, "-c", HUNGRY], stdout=subprocess.PIPE) as job:
        assert job.stdout and job.stdout.readline()
        effect = effects.begin_effect(scenario.faults[0], [_process(job.pid, 0)])
        assert isinstance(effect, effects.LittleMemory)
        assert job.wait() == -signal.SIGKILL
    until_s = time.monotonic() + 10
    while not effect.seen() and time.monotonic() < until_s:
        time.sleep(0.01)
    assert effect.seen() == "the kernel has ended it: out of memory"
    effect.end()
    assert not effect._group.exists()
    monkeypatch.setenv("BAMBOO_CGROUP", "/nowhere")
    (problem,) = effects.missing(scenario, Path())
    assert "set BAMBOO_CGROUP to a cgroup" in problem.hint
