"""The loop in which a host waits for its workers: last words come before an end, whoever holds the link open."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from typing import Any, cast

from engine.runtime.agent.worker_handles import LocalWorkers
from engine.runtime.process.fork_client import Child
from engine.runtime.process.link import Link


def test_the_last_words_of_a_worker_come_before_its_end_while_another_process_holds_its_link() -> None:
    swept: list[float] = []
    spawner = cast(Any, type("Spawner", (), {"end_descendants": lambda self, patience_s: swept.append(patience_s)})())
    process = subprocess.Popen([sys.executable, "-c", ""])
    near, far = Link.pair(blocking=False)
    child = Child("worker-0", process.pid, os.pidfd_open(process.pid))
    process.returncode = 0  # the child reaps it
    told: list[object] = []
    with contextlib.closing(LocalWorkers(spawner)) as workers, contextlib.closing(far):
        workers.watch(child, near, read=bytes, hear=told.append, end=told.append, see_end=lambda: told.append("seen"))
        for word in (b"first", b"last"):
            far.send_packet(word)
        os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED | os.WNOWAIT)
        until_s = time.monotonic() + 10
        while 0 not in told and time.monotonic() < until_s:
            workers.wait(0.1)
        far.send_packet(b"of nobody")
        workers.wait(0.0)
    assert [each for each in told if each != "seen"] == [b"first", b"last", 0]
    assert told.count("seen") == len(swept) == 1
    near.close()
    child.close()


def test_a_source_that_an_earlier_handler_of_a_round_has_taken_out_is_not_handled() -> None:
    handled: list[int] = []
    pipes = [os.pipe() for _ in range(2)]
    with contextlib.closing(LocalWorkers(cast(Any, None))) as workers:

        def handle(own: int, other: int) -> None:
            handled.append(own)
            workers.remove(other)

        (a, write_a), (b, write_b) = pipes
        workers.add(a, lambda: handle(a, b))
        workers.add(b, lambda: handle(b, a))
        for end in (write_a, write_b):
            os.write(end, b"!")
        workers.wait(1.0)
    assert len(handled) == 1
    for ends in pipes:
        for end in ends:
            os.close(end)
