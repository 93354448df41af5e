"""The fork server: a process that has imported torch once and then forks workers in milliseconds; for `fork_client`.

    launcher -> fork server -> intermediate process -> child
    launcher ----------------------------------------> child    when the intermediate process has ended

Rules: the server has one thread, no open channel and no device context, so that a child starts clean. The server ends
with the launcher. The launcher becomes the parent of each child: it reaps the child, and the kernel kills the child
with the launcher, even if the server is gone. A child sets this death signal as soon as the intermediate process has
ended, before it runs its role. The launcher gets a pidfd of the child and signals only that.

The standard library's fork server is not used because it pickles, starts a tracker process that unblocks signals,
and gives its parent a pid instead of a pidfd.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import NoReturn

from engine.codec.messages import prepare_to_decode
from engine.core.message_kinds import ToWorker
from engine.core.messages import BeginMessage, ForkedMessage, ForkMessage, LeftMessage, UnforkedMessage
from engine.runtime.process.interrupts import ignore_ctrl_c
from engine.runtime.process.link import Link
from engine.runtime.process.prctl import adopt, die_with_parent, name_process
from engine.runtime.process.subprocesses import log_stream

# Roles of a child: role -> (module, function). The function gets the child's descriptors.
ROLES = {
    "worker": ("engine.runtime.worker.worker", "main"),
    "keeper": ("engine.runtime.agent.disk_work", "main"),
    "bench-pipeline": ("engine.bench.pipeline", "main"),
    "bench-relay": ("engine.bench.relay_worker", "main"),
    "bench-links": ("engine.bench.hop_worker", "main"),
}
TAKES_NOTICE = ("worker",)  # roles that block SIGTERM: a thread takes it as a notice
PRELOAD = (
    "engine.runtime.worker.worker",
    "engine.models.datasets",
    "engine.models.networks",
    "engine.models.transformer",
)


def serve(launcher: Link, launcher_pid: int) -> None:
    """Starts an intermediate process per batch of forks, and sends "left" at its end, until the launcher is gone."""
    server = os.getpid()
    while (begin := launcher.receive()) is not None:
        with _without_search():
            for module in begin.preload if isinstance(begin, BeginMessage) else ():
                with contextlib.suppress(Exception):  # the worker that needs a missing package tells the user
                    importlib.import_module(module)
        with contextlib.suppress(OSError):  # fork may fail
            if (between := os.fork()) == 0:
                die_with_parent(server)
                _serve_forks(launcher, launcher_pid)
            os.waitpid(between, 0)
        launcher.send(LeftMessage())


@contextlib.contextmanager
def _without_search() -> Iterator[None]:
    """Imports modules without a search for garbage among them: it takes time, and they stay."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _serve_forks(launcher: Link, launcher_pid: int) -> NoReturn:
    """Runs the intermediate process: forks on request, then exits, which makes its children the launcher's."""
    own = os.pidfd_open(os.getpid())
    try:
        while True:
            request, fds = launcher.receive_with_fds()
            if not isinstance(request, ForkMessage):
                break
            try:
                if (pid := os.fork()) == 0:
                    _become(request, fds, launcher, launcher_pid, own)
                pidfd = os.pidfd_open(pid)
                launcher.send(ForkedMessage(pid), [pidfd])
                os.close(pidfd)
            except OSError as error:
                launcher.send(UnforkedMessage(str(error)))
            for fd in fds:
                os.close(fd)
    finally:
        os._exit(0)


def _become(request: ForkMessage, fds: Sequence[int], launcher: Link, launcher_pid: int, parent: int) -> NoReturn:
    """Runs the requested role in the forked child, after the end of its `parent`, the intermediate process.

    Its first descriptor has a byte when the launcher knows the child. Its second one is its standard output and error.
    """
    code = 1
    try:
        if request.role in TAKES_NOTICE:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # before there is any other thread
        os.setsid()
        launcher.close()
        gate, log, *own = fds
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        sys.stdout, sys.stderr = log_stream(1), log_stream(2)
        name_process(request.name)
        if not os.read(gate, 1):
            os._exit(code)
        os.close(gate)
        select.select([parent], [], [])  # now the launcher is the parent
        os.close(parent)
        die_with_parent(launcher_pid)
        adopt()  # a process that the worker has started leaves it only when it ends
        module, function = ROLES[request.role]
        code = getattr(importlib.import_module(module), function)(*own)
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
        pass  # reserves numbers 0 to 2 if a standard stream is closed: a child puts its log there
    os.close(spare)
    launcher = Link.from_fd(int(sys.argv[1]))
    try:
        with _without_search():
            for module in PRELOAD:
                importlib.import_module(module)
            prepare_to_decode(ToWorker)  # once for all that it forks
    except ImportError as error:
        launcher.receive_with_fds(), launcher.receive_with_fds()  # what is left unread takes the answer away
        launcher.send(UnforkedMessage(str(error)))
        raise
    name_process("bamboo-fork")
    serve(launcher, int(sys.argv[2]))
    os._exit(0)  # skips the teardown of all imported modules


if __name__ == "__main__":
    main()
