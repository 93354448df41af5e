"""The fork server: a process that has imported torch once and forks workers from there in milliseconds.

Rules: it has one thread, no open channel and no device context, so that what it forks starts clean. It ends when the
launcher does. What it forks is a child of the launcher, for a process in between forks it and ends: so the launcher
sees its end, and the kernel ends it with the launcher, whatever becomes of this server. The launcher is told of it by
a pidfd, and thus never signals a number.

The standard library's fork server is not used because it pickles, starts a tracker process that unblocks signals,
and gives its parent a pid instead of a pidfd.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import traceback
from typing import NoReturn

from engine.runtime.interrupts import ignore_ctrl_c
from engine.runtime.kernel import die_with_parent, name_process
from engine.runtime.link import Link, Message

# What a child may become: role -> module and function, called with the descriptors it was given.
ROLES = {
    "worker": ("engine.runtime.worker", "main"),
    "store": ("engine.runtime.store_server", "main"),
    "bench-pipeline": ("engine.runtime.bench_pipeline", "main"),
    "bench-recording": ("engine.runtime.bench_recording", "main"),
    "bench-relay": ("engine.runtime.bench_relay_worker", "main"),
}
TAKES_NOTICE = ("worker", "bench-recording")  # SIGTERM waits for a thread that takes it, and ends nobody
PRELOAD = ("engine.runtime.worker", "engine.runtime.store_server")


def serve(launcher: Link, launcher_pid: int) -> None:
    """Forks on request until the launcher is gone."""
    while (request := launcher.receive()) is not None:
        try:
            _fork(request, launcher, launcher_pid)
        except OSError as error:
            launcher.send("unforked", error=str(error))
        for fd in request["fds"]:
            os.close(fd)


def _fork(request: Message, launcher: Link, launcher_pid: int) -> None:
    """Forks a child of the launcher."""
    (born, bears), server = os.pipe(), os.getpid()
    between = os.fork()
    if between == 0:
        try:
            die_with_parent(server)
            if (child := os.fork()) == 0:
                os.close(born)
                os.close(bears)
                _become(request, launcher, launcher_pid)
            os.write(bears, str(child).encode())
        finally:
            os._exit(0)
    os.waitpid(between, 0)  # from now on the launcher is the parent
    os.close(bears)
    with open(born) as pid_file:
        pid = int(pid_file.read() or -1)
    if pid < 0:
        raise OSError("a fork was refused")
    pidfd = os.pidfd_open(pid)
    launcher.send("forked", fds=[pidfd], pid=pid)
    os.close(pidfd)


def _become(request: Message, launcher: Link, launcher_pid: int) -> NoReturn:
    """Turns the forked child into what was asked for, when the launcher knows of it: its first descriptor says so.

    Its second descriptor is its standard output and error.
    """
    code = 1
    try:
        if request["role"] in TAKES_NOTICE:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # before there is any other thread
        os.setsid()
        launcher.close()
        told, log, *fds = request["fds"]
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        name_process(request["name"])
        if not os.read(told, 1):
            os._exit(code)
        os.close(told)
        die_with_parent(launcher_pid)  # also while it is stopped
        module, function = ROLES[request["role"]]
        code = getattr(importlib.import_module(module), function)(*fds)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Runs the server over the link whose descriptor is the first argument; the second is the parent's pid."""
    launcher_pid = int(sys.argv[2])
    die_with_parent(launcher_pid)
    ignore_ctrl_c()
    while (spare := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # where a standard stream was closed, nothing else may have its number, which a child gives to its log
    os.close(spare)
    launcher = Link.from_fd(int(sys.argv[1]))
    for module in PRELOAD:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    name_process("bamboo-fork")
    serve(launcher, launcher_pid)
    os._exit(0)  # there is nothing to save, and to take down all that was imported takes its time


if __name__ == "__main__":
    main()
