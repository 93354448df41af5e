"""SIGTERM is a notice whichever thread the kernel gives it to: it neither ends a worker nor is lost."""

from __future__ import annotations

import subprocess
import sys

PRELUDE = """
import os, signal, threading
from engine.runtime.process.control import give_notice_of_sigterm

given = threading.Semaphore(0)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
give_notice_of_sigterm(given.release)

def works(is_open):
    if is_open:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    begun.release()
    threading.Event().wait()

begun = threading.Semaphore(0)
threads = [threading.Thread(target=works, args=(each,), daemon=True) for each in (False, True, True)]
for thread in threads:
    thread.start()
    assert begun.acquire(timeout=20)
"""


def answer(code: str) -> str:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PRELUDE + code]  # of forks beside threads
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    return f"{done.returncode}: {done.stdout}{done.stderr}"


def test_a_thread_that_does_not_block_sigterm_ends_no_worker_and_loses_no_notice() -> None:
    """The main thread is in one long call meanwhile, which looks at no signals."""
    code = """
import ctypes
told, told_by = os.pipe()
heard = []
def asks():
    for number in range(20):
        os.kill(os.getpid(), signal.SIGTERM)
        heard.append(given.acquire(timeout=20))
        signal.pthread_kill(threads[1].ident, signal.SIGTERM)  # surely to a thread that does not block it
        heard.append(given.acquire(timeout=20))
    os.write(told_by, b"x")
threading.Thread(target=asks, daemon=True).start()
ctypes.CDLL(None).read(told, ctypes.create_string_buffer(1), 1)
assert heard == [True] * 40, heard
assert not given.acquire(timeout=0.1), "one notice for each signal"
print("all")
"""
    assert answer(code) == "0: all\n"


def test_a_forked_process_gives_no_notice_to_its_worker() -> None:
    code = """
child = os.fork()
if not child:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(1)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM, status
assert not given.acquire(timeout=0.3), "a notice for the worker"
print("none")
"""
    assert answer(code) == "0: none\n"


def test_another_signal_with_a_handler_is_no_notice() -> None:
    code = """
signal.signal(signal.SIGUSR1, lambda number, frame: None)
os.kill(os.getpid(), signal.SIGUSR1)
assert not given.acquire(timeout=0.3), "a notice for another signal"
signal.pthread_kill(threads[1].ident, signal.SIGTERM)
assert given.acquire(timeout=20)
print("one")
"""
    assert answer(code) == "0: one\n"
