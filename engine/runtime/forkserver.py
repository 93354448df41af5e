"""The fork server: a process that has imported torch once and forks workers from there in milliseconds.

Rules: it has one thread, no open channel and no device context, so that its children start clean. It ends when its
parent does, and its children end when it does. It opens each child's pidfd before the child can be reaped, and
sends it to the parent, who thus never signals a number.

The standard library's fork server is not used because it pickles, starts a tracker process that unblocks signals,
and gives its parent a pid instead of a pidfd.
"""

from __future__ import annotations

import gc
import importlib
import os
import selectors
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


def serve(parent: Link) -> None:
    """Forks on request and reports how children end, until the parent is gone."""
    selector = selectors.DefaultSelector()
    selector.register(parent, selectors.EVENT_READ, None)
    while True:
        for key, _ in selector.select():
            if key.data is not None:
                selector.unregister(key.fileobj)
                _report_exit(parent, *key.data)
                continue
            request = parent.receive()
            if request is None:
                _end_children(selector)
                return
            pid, pidfd = _fork(request, parent, selector)
            selector.register(pidfd, selectors.EVENT_READ, (pid, pidfd))
            parent.send("forked", fds=[pidfd], pid=pid)


def _report_exit(parent: Link, pid: int, pidfd: int) -> None:
    result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    assert result is not None
    os.close(pidfd)
    by_signal = result.si_code != os.CLD_EXITED
    parent.send("exited", pid=pid, code=-result.si_status if by_signal else result.si_status)


def _end_children(selector: selectors.BaseSelector) -> None:
    """Kills the children that are left and reaps them, so that nobody else has to."""
    for key in list(selector.get_map().values()):
        if key.data is not None:
            _, pidfd = key.data
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.waitid(os.P_PIDFD, pidfd, os.WEXITED)


def _fork(request: Message, parent: Link, selector: selectors.BaseSelector) -> tuple[int, int]:
    server = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become(request, parent, selector, server)
    for fd in request["fds"]:
        os.close(fd)
    return pid, os.pidfd_open(pid)


def _become(request: Message, parent: Link, selector: selectors.BaseSelector, server: int) -> NoReturn:
    """Turns the forked child into what was asked for. Its first descriptor is its standard output and error."""
    code = 1
    try:
        if request["role"] in TAKES_NOTICE:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # before there is any other thread
        os.setsid()
        die_with_parent(server)
        for key in list(selector.get_map().values()):
            if key.data is not None:
                os.close(key.data[1])
        selector.close()
        parent.close()
        log, *fds = request["fds"]
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        name_process(request["name"])
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
    parent = Link.from_fd(int(sys.argv[1]))
    for module in PRELOAD:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    name_process("bamboo-fork")
    serve(parent)


if __name__ == "__main__":
    main()
