"""NCCL between CPUs, in a worker: `nccl_double.c` behind the shipped calls, with its streams as queues of a device.

A worker loads this module in place of NCCL (`engine/runtime/worker/worker.py`) where the environment of its run says
so; `nccl_double.py` makes that environment.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from engine.runtime.device.device import Device
from engine.runtime.device.side_queue import QueueMoment, SideQueue
from engine.runtime.transport.nccl_library import Communicator, Communicators, NcclCommunicators, NcclLibrary
from engine.runtime.transport.nccl_queue import IssueQueue
from engine.runtime.transport.transport import Issued

FOLDER: Final = "NCCL_DOUBLE"  # the variable with the folder of the double
PLANTED: Final = "planted"  # a file in it, with the mistake of each worker


def library_at(folder: str) -> Path:
    """Returns the library of the double in a folder."""
    return Path(folder, "libnccl.so.2")


class DoubleQueue(SideQueue):
    """A queue whose work is done later, by a stream of the double."""

    def __init__(self, device: Device, path: Path):
        super().__init__(device)
        self._c: Any = ctypes.CDLL(str(path))
        self._c.doubleStream.restype = ctypes.c_void_p
        for name in ("doubleMoment", "doubleStand", "doubleGoOn"):
            getattr(self._c, name).argtypes = (ctypes.c_void_p,)
        self._c.doubleMoment.restype = ctypes.c_long
        self._c.doubleHasCome.argtypes = self._c.doubleWait.argtypes = (ctypes.c_void_p, ctypes.c_long)
        self._own = self._c.doubleStream()

    @property
    def handle(self) -> int:
        """The stream."""
        return int(self._own)

    def moment(self) -> QueueMoment:
        """Returns the present moment of the stream."""
        return _Moment(self._c, self._own)

    def stand(self) -> None:
        """Gives the stream a kernel that does not end before `go_on`."""
        self._c.doubleStand(self._own)

    def go_on(self) -> None:
        """Ends the kernel."""
        self._c.doubleGoOn(self._own)


class _Moment(QueueMoment):
    def __init__(self, c: Any, stream: int):
        super().__init__(None)
        self._c, self._stream, self._number = c, stream, c.doubleMoment(stream)

    def wait(self) -> None:
        """Waits until all work before the moment is done."""
        self._c.doubleWait(self._stream, self._number)

    def has_come(self) -> bool:
        """Returns whether all work before the moment is done."""
        return bool(self._c.doubleHasCome(self._stream, self._number))


def _tell_keys(tell: Callable[[int], object]) -> None:
    """Has each message of a program carry its key: the double compares the ends, with an audit or without one."""

    def telling(call: Callable[..., Any]) -> Callable[..., Any]:
        def told(self: IssueQueue, communicator: Communicator, issued: Issued, *rest: Any) -> Any:
            tell(issued.key.number + 1)
            try:
                return call(self, communicator, issued, *rest)
            finally:
                tell(0)

        return told

    IssueQueue._issue = telling(IssueQueue._issue)  # type: ignore[method-assign]
    IssueQueue._receive = telling(IssueQueue._receive)  # type: ignore[method-assign]


def nccl_of(device: Device) -> tuple[Communicators, SideQueue]:
    """Returns what a worker has in place of NCCL; makes the mistake that is planted in it, if there is one."""
    path = library_at(os.environ[FOLDER])
    planted = path.with_name(PLANTED)
    if planted.exists():
        importlib.import_module("tests.doubles.planted_nccl").plant(planted.read_text())
    library = NcclLibrary(str(path))
    library._c.doubleKey.argtypes = (ctypes.c_uint64,)
    _tell_keys(library._c.doubleKey)
    return NcclCommunicators(library), DoubleQueue(device, path)
