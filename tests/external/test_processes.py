"""The processes of a job: a rank is recognised, and no process of another job is ever a victim."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from engine.core.faults.launchers import LAUNCHERS, PLAIN, Launcher
from engine.external.processes import JobProcesses

MARK = {"_BAMBOO_LAUNCHER": f"test-{os.getpid()}"}
SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
WITH_CHILD = [sys.executable, "-c", "import subprocess, sys; subprocess.run(['sleep', '60'])"]


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, 9)


@contextmanager
def started(
    *jobs: tuple[list[str], dict[str, str]], stdin: int | None = None
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Starts processes with a command and variables each, and ends them behind the block."""
    with ExitStack() as stack:
        children = []
        for command, variables in jobs:
            environment = {"PATH": os.environ["PATH"], **variables}
            children.append(subprocess.Popen(command, env=environment, process_group=0, stdin=stdin))
            stack.callback(children[-1].wait)
            stack.callback(_kill_group, children[-1].pid)
        yield children


def look_until(processes: JobProcesses, has_come: Callable[[], bool]) -> None:
    """Looks for processes until something has come; raises TimeoutError after five seconds."""
    until_s = time.monotonic() + 5
    while not has_come():
        if time.monotonic() > until_s:
            raise TimeoutError
        processes.look()
        time.sleep(0.01)


def processes_of(root: int, launcher: Launcher = LAUNCHERS["torchrun"]) -> JobProcesses:
    """Returns the processes of the job with the mark."""
    return JobProcesses(launcher, "=".join(*MARK.items()), root)


def test_a_second_job_beside_has_no_rank_here() -> None:
    other = {"_BAMBOO_LAUNCHER": "another"}
    with started((SLEEP, MARK | {"RANK": "1"}), (SLEEP, other | {"RANK": "0"}), (SLEEP, {"RANK": "2"})) as (mine, *_):
        processes = processes_of(0)
        look_until(processes, lambda: bool(processes.ranks))
        processes.look()
        assert {rank: each.pid for rank, each in processes.ranks.items()} == {1: mine.pid}
        assert set(processes.alive) == {mine.pid}
        processes.close()


def test_a_child_of_a_rank_is_no_rank_but_can_be_found_by_its_command() -> None:
    with started((WITH_CHILD, MARK | {"RANK": "0"})) as (mine,):
        processes = processes_of(mine.pid)
        look_until(processes, lambda: len(processes.alive) == 2)
        rank = processes.rank(0)
        assert rank is not None and rank.pid == mine.pid
        look_until(processes, lambda: bool(processes.children(rank, "^sleep 60")))
        assert processes.children(rank, "^python") == []
        processes.close()


def test_a_new_process_takes_the_number_of_a_rank_that_has_ended() -> None:
    """Its signals go to the process that was held, and never to another with its pid."""
    with started((SLEEP, MARK | {"RANK": "0"})) as (old,):
        processes = processes_of(0)
        look_until(processes, lambda: bool(processes.ranks))
        held = processes.rank(0)
        assert held is not None and held.send(0)
        old.kill()
        old.wait()
        assert processes.rank(0) is None and not held.send(9)
        with started((SLEEP, MARK | {"RANK": "0"})) as (new,):
            look_until(processes, lambda: processes.ranks[0].pid == new.pid)
            assert processes.rank(0) is not None and not held.send(9) and new.poll() is None
        processes.close()


def test_a_fork_that_executes_a_rank_later_is_one_then() -> None:
    forked = f"import os; os.read(0, 1); os.execve({SLEEP[0]!r}, {SLEEP!r}, {MARK | {'RANK': '0'}!r})"
    near, far = os.pipe()
    with started(([sys.executable, "-c", forked], {}), stdin=near) as (rank,):
        processes = processes_of(0)
        processes.look()
        assert not processes.ranks
        os.write(far, b"!")
        look_until(processes, lambda: bool(processes.ranks))
        assert processes.ranks[0].pid == rank.pid
        processes.close()
    os.close(near)
    os.close(far)


def test_a_reused_pid_is_another_process() -> None:
    """The process that began before its parent is no child of it: its number was another's then."""
    with started((SLEEP, {}), (SLEEP, {})) as (parent, child):
        processes = processes_of(parent.pid, PLAIN)
        look_until(processes, lambda: bool(processes.ranks))
        opened = processes._opened(child.pid)
        assert opened is not None
        opened.parent, opened.began_ns = parent.pid, processes.ranks[0].began_ns + 1
        assert processes._belongs(opened)
        opened.began_ns = processes.ranks[0].began_ns - 1
        assert not processes._belongs(opened)
        os.close(opened.pidfd)
        processes.close()


def test_the_command_itself_is_rank_0_of_a_plain_script() -> None:
    with started((SLEEP, MARK)) as (mine,):
        processes = processes_of(mine.pid, PLAIN)
        look_until(processes, lambda: bool(processes.ranks))
        assert processes.ranks[0].pid == mine.pid
        processes.close()


def test_what_a_process_has_not_read_is_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        with far, started((SLEEP, MARK | {"RANK": "0"})) as (other,):
            near.sendall(b"x" * 1234)
            processes = processes_of(0)
            look_until(processes, lambda: bool(processes.ranks))
            sign = processes.ranks[0].sign(7)
            assert sign is not None and (sign.pid, sign.unread, sign.step) == (other.pid, 0, 7)
            own = processes._opened(os.getpid())
            assert own is not None and (mine := own.sign(-1)) is not None and mine.unread == 1234
            assert mine.cpu_ns > 0
            os.close(own.pidfd)
            processes.close()


def test_a_process_that_reports_as_another_rank_is_that_rank_alone() -> None:
    """NVRx inside of processes counts the ranks anew in each restart; a rank in the environment is never overruled."""
    with started((SLEEP, MARK), (SLEEP, MARK | {"RANK": "5"})) as (free, fixed):
        processes = processes_of(0, LAUNCHERS["torchrun"])
        look_until(processes, lambda: {free.pid, fixed.pid} <= processes.alive.keys() and 5 in processes.ranks)
        assert processes.take_rank(free.pid, 1) is processes.rank(1)
        assert processes.take_rank(free.pid, 1) is None, "it is that rank already"
        taken = processes.take_rank(free.pid, 0)
        assert taken is not None and (taken.pid, processes.rank(0), processes.rank(1)) == (free.pid, taken, None)
        assert processes.take_rank(fixed.pid, 2) is None and processes.take_rank(free.pid, 5) is None
        processes.close()
