"""The fork server: a process that has imported torch once and forks workers from there in milliseconds.

Rules: it has one thread, no open channel and no device context, so that what it forks starts clean. It ends when the
launcher does. What it forks becomes the launcher's, for a process in between forks it and then ends: so the launcher
sees its end, and the kernel ends it with the launcher, whatever becomes of this server. A child asks for that with the
first word that it hears, which comes when the process in between is gone. The launcher is told of it by a pidfd, and
thus never signals a number.

The standard library's fork server is not used because it pickles, starts a tracker process that unblocks signals,
and gives its parent a pid instead of a pidfd.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import sys
import traceback
from typing import NoReturn

from engine.runtime.ipc.link import Link, Message
from engine.runtime.process.interrupts import ignore_ctrl_c
from engine.runtime.process.kernel import die_with_parent, name_process

# What a child may become: role -> module and function, called with the descriptors it was given.
ROLES = {
    "worker": ("engine.runtime.worker.worker", "main"),
    "store": ("engine.runtime.transport.rendezvous", "main"),
    "bench-pipeline": ("engine.bench.pipeline", "main"),
    "bench-recording": ("engine.bench.recording", "main"),
    "bench-relay": ("engine.bench.peers.relay_worker", "main"),
}
TAKES_NOTICE = ("worker", "bench-recording")  # SIGTERM waits for a thread that takes it, and ends nobody
PRELOAD = ("engine.runtime.worker.worker", "engine.runtime.transport.rendezvous")


def serve(launcher: Link) -> None:
    """Has a process fork what is wanted together, and says when that has ended, until the launcher is gone."""
    server = os.getpid()
    while launcher.receive() is not None:
        with contextlib.suppress(OSError):  # another process may be refused
            if (between := os.fork()) == 0:
                die_with_parent(server)
                _fork_until_told(launcher)
            os.waitpid(between, 0)
        launcher.send("left")


def _fork_until_told(launcher: Link) -> NoReturn:
    """Forks on request until it is told to leave: with its end all that it has forked comes to the launcher."""
    try:
        while (request := launcher.receive()) is not None and request["kind"] == "fork":
            try:
                if (pid := os.fork()) == 0:
                    _become(request, launcher)
                pidfd = os.pidfd_open(pid)
                launcher.send("forked", fds=[pidfd], pid=pid)
                os.close(pidfd)
            except OSError as error:
                launcher.send("unforked", error=str(error))
            for fd in request["fds"]:
                os.close(fd)
    finally:
        os._exit(0)


def _become(request: Message, launcher: Link) -> NoReturn:
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
    die_with_parent(int(sys.argv[2]))
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
    serve(launcher)
    os._exit(0)  # there is nothing to save, and to take down all that was imported takes its time


if __name__ == "__main__":
    main()
