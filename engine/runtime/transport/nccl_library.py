"""The NCCL functions that bamboo calls, as declared in `nccl.h` of version 2.29.

Older and newer libraries read the fields of the configuration that both sides know.

Why not torch's ProcessGroupNCCL: joining a group is a call that cannot be cancelled, its watchdog and monitor end the
process, and it needs a store of torch's. Here every function returns at once, because all communicators are
non-blocking; `settled` polls until a call has finished.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

import torch

from engine.core.errors import EnvironmentLacksError
from engine.files.accelerators import nccl_lack
from engine.models.layers import Tensors
from engine.runtime.device.device import device_trouble
from engine.runtime.device.side_queue import QueueMoment, SideQueue

LIBRARY: Final = "libnccl.so.2"  # torch has loaded it; a process has one NCCL
_SUCCESS, _IN_PROGRESS = 0, 7
_REVOKE_DEFAULT = 0
_UINT8 = 1
_UNDEFINED = -(1 << 31)  # NCCL_CONFIG_UNDEF_INT
_MAGIC = 0xCAFEBEEF  # NCCL_API_MAGIC
_OF_CONFIG = 22907  # the version of the header
_POLL_S = 0.0005
_SPIN_S = 0.00005  # polls without sleeping at first: enqueuing work takes about this long
_OF_CUDA = 1  # ncclUnhandledCudaError


class UniqueId(ctypes.Structure):
    """ncclUniqueId."""

    _fields_ = (("internal", ctypes.c_char * 128),)


class Config(ctypes.Structure):
    """ncclConfig_t of version 2.29; a library reads as many fields as it has itself, up to `size`."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cgaClusterSize", ctypes.c_int),
        ("minCTAs", ctypes.c_int),
        ("maxCTAs", ctypes.c_int),
        ("netName", ctypes.c_char_p),
        ("splitShare", ctypes.c_int),
        ("trafficClass", ctypes.c_int),
        ("commName", ctypes.c_char_p),
        ("collnetEnable", ctypes.c_int),
        ("CTAPolicy", ctypes.c_int),
        ("shrinkShare", ctypes.c_int),
        ("nvlsCTAs", ctypes.c_int),
        ("nChannelsPerNetPeer", ctypes.c_int),
        ("nvlinkCentricSched", ctypes.c_int),
        ("graphUsageMode", ctypes.c_int),
        ("numRmaCtx", ctypes.c_int),
    )


def non_blocking() -> Config:
    """Returns the configuration of a non-blocking communicator."""
    config = Config()
    for name, kind, *_ in Config._fields_:
        if kind is ctypes.c_int:
            setattr(config, name, _UNDEFINED)
    config.size, config.magic, config.version, config.blocking = ctypes.sizeof(Config), _MAGIC, _OF_CONFIG, 0
    return config


class NcclLibrary:
    """The functions of NCCL, which raise RuntimeError; raises EnvironmentLacksError if there is none, or an old one."""

    def __init__(self, path: str = LIBRARY):
        try:
            self._c: Any = ctypes.CDLL(path)
        except OSError as error:
            raise EnvironmentLacksError(f"NCCL cannot be loaded: {error}; use --backend direct") from None
        self._c.ncclGetErrorString.restype = ctypes.c_char_p
        self._c.ncclGetLastError.restype = ctypes.c_char_p
        self._c.ncclGetLastError.argtypes = (ctypes.c_void_p,)
        self._c.ncclCommInitRankConfig.argtypes = (
            *(ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, UniqueId, ctypes.c_int, ctypes.POINTER(Config)),
        )
        for name in ("ncclSend", "ncclRecv"):
            pointer, number = ctypes.c_void_p, ctypes.c_int
            getattr(self._c, name).argtypes = (pointer, ctypes.c_size_t, number, number, pointer, pointer)
        code = ctypes.c_int()
        self._checked(self._c.ncclGetVersion(ctypes.byref(code)))
        major, rest = divmod(code.value, 10_000)
        self.version = (major, rest // 100, rest % 100)
        if lack := nccl_lack(self.version):
            raise EnvironmentLacksError(f"{lack}; use --backend direct")
        self._c.ncclCommAbort.argtypes = (ctypes.c_void_p,)
        self._c.ncclCommRevoke.argtypes = (ctypes.c_void_p, ctypes.c_int)
        self._c.ncclCommGetAsyncError.argtypes = (ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))

    def _checked(self, result: int, communicator: ctypes.c_void_p | None = None) -> None:
        """Raises torch's error if this worker's GPU failed or its memory is full, else RuntimeError: a suspicion."""
        if result in (_SUCCESS, _IN_PROGRESS):
            return
        words = self._c.ncclGetErrorString(result) or b"unknown error"
        last = self._c.ncclGetLastError(communicator) or b""
        kind: type[RuntimeError] = RuntimeError
        if result == _OF_CUDA:
            kind = torch.OutOfMemoryError if b"out of memory" in last else torch.AcceleratorError
        raise kind(": ".join(part.decode(errors="replace") for part in (words, last) if part))

    def new_id(self) -> bytes:
        """Returns the id of a new group, whose ranks rendezvous in this process."""
        unique = UniqueId()
        self._checked(self._c.ncclGetUniqueId(ctypes.byref(unique)))
        return bytes(memoryview(unique))

    def begin_join(self, group_id: bytes, rank: int, size: int) -> ctypes.c_void_p:
        """Starts joining a group; the communicator is usable once `settled`."""
        communicator, config = ctypes.c_void_p(), non_blocking()
        unique = UniqueId.from_buffer_copy(group_id)
        result = self._c.ncclCommInitRankConfig(ctypes.byref(communicator), size, unique, rank, ctypes.byref(config))
        self._checked(result)
        return communicator

    def progress(self, communicator: ctypes.c_void_p) -> bool:
        """Returns whether the last call has finished; raises RuntimeError if an error has occurred."""
        status = ctypes.c_int()
        self._checked(self._c.ncclCommGetAsyncError(communicator, ctypes.byref(status)), communicator)
        self._checked(status.value, communicator)
        return status.value == _SUCCESS

    def settled(self, communicator: ctypes.c_void_p, deadline_s: float, is_given_up: Callable[[], bool]) -> None:
        """Waits until the last call has finished; raises RuntimeError at the deadline, or once it is given up."""
        sleeps_from_s = time.monotonic() + _SPIN_S
        while not self.progress(communicator):
            if is_given_up():
                raise RuntimeError("it was given up")
            if time.monotonic() > deadline_s:
                raise RuntimeError("it did not finish in time")
            if time.monotonic() > sleeps_from_s:
                time.sleep(_POLL_S)

    def send(self, communicator: ctypes.c_void_p, at: int, num_bytes: int, rank: int, stream: int) -> None:
        """Enqueues a send on a stream."""
        self._checked(self._c.ncclSend(at, num_bytes, _UINT8, rank, communicator, stream), communicator)

    def receive(self, communicator: ctypes.c_void_p, at: int, num_bytes: int, rank: int, stream: int) -> None:
        """Enqueues a receive on a stream."""
        self._checked(self._c.ncclRecv(at, num_bytes, _UINT8, rank, communicator, stream), communicator)

    def begin_group(self) -> None:
        """Starts an NCCL group of sends and receives."""
        self._checked(self._c.ncclGroupStart())

    def end_group(self) -> None:
        """Enqueues the group."""
        self._checked(self._c.ncclGroupEnd())

    def revoke(self, communicator: ctypes.c_void_p) -> None:
        """Stops all work of a communicator and waits for that; the memory stays."""
        status = ctypes.c_int(self._c.ncclCommRevoke(communicator, _REVOKE_DEFAULT))
        while status.value == _IN_PROGRESS:  # an error is an older one, or the abort will meet it again
            time.sleep(_POLL_S)
            self._c.ncclCommGetAsyncError(communicator, ctypes.byref(status))

    def abort(self, communicator: ctypes.c_void_p) -> None:
        """Ends a communicator with all of its work, and frees its memory."""
        self._checked(self._c.ncclCommAbort(communicator))


# The seam to NCCL: everything that bamboo asks of it, so that a test double can replace it.
#
# Rules: one thread of a worker makes all of these calls but `PendingWork.wait`. Sends and receives only enqueue work on
# the device. The work of one communicator runs in the order in which it was enqueued, and the n-th receive from a rank
# matches its n-th send. A RuntimeError is a suspicion: a killed peer may cause no error at all.
#
# The ranks of a communicator may join while another communicator of the worker is active, because joining enqueues no
# work. Connecting does, so it waits until the other one is revoked: two active ones could deadlock on the device. An
# abort frees memory that a rank which has not been told may still use. So an active communicator is revoked first, and
# aborted once every remaining rank has revoked its own.


class PendingWork(Protocol):
    """A point behind enqueued work."""

    def wait(self) -> None:
        """Waits until the work is done, or has been aborted; any thread may call."""


class Communicator(Protocol):
    """One end of a group of ranks."""

    def send(self, tensors: Tensors, rank: int) -> None:
        """Sends contiguous tensors to a rank as one message, without waiting. They must not change until then."""

    def receive(self, tensors: Tensors, rank: int) -> None:
        """Fills contiguous tensors from a rank's next send, without waiting."""

    def pending(self) -> PendingWork:
        """Returns the point behind all work enqueued so far."""

    def failure(self) -> str:
        """Returns an error that has occurred, or an empty string, without waiting. Raises errors of this device."""

    def revoke(self) -> None:
        """Stops all work without the other ranks, and keeps the memory. It may hang."""

    def abort(self) -> None:
        """Ends the communicator without the other ranks, and frees its memory. It may hang."""


class Opening(Protocol):
    """A communicator whose ranks are joining."""

    def has_joined(self) -> bool:
        """Returns whether all ranks have joined, without waiting. Raises RuntimeError if they cannot or are late."""

    def connect(self, is_given_up: Callable[[], bool]) -> Communicator:
        """Connects all pairs of ranks, which have joined, and waits for it.

        Raises RuntimeError if that fails, or once `is_given_up`, and so does every later call of the communicator.
        """

    def revoke(self) -> None:
        """Stops the work of a failed `connect`, like that of a communicator. It may hang."""

    def abort(self) -> None:
        """Ends it, even if ranks are missing. It may hang."""


class Communicators(Protocol):
    """The factory of a worker's communicators."""

    def new_id(self) -> bytes:
        """Returns the id of a new group; its first rank creates it and shares it with the others."""

    def begin(self, group_id: bytes, rank: int, size: int, queue: SideQueue) -> Opening:
        """Starts joining a group, without waiting. Raises RuntimeError if that fails."""


# Communicators of NCCL itself, on one stream of the worker's GPU. None of this has run on a GPU yet.
#
# Rules: tensors of any dtype are sent as bytes, so no number changes. Each message is an NCCL group, so its operations
# start together. NCCL connects a pair in the call that enqueues its first message. So `connect` sends one byte between
# all ranks, with the timeout of a join.

_OPEN_S = 60.0
_ENQUEUE_S = 10.0  # for a call that enqueues work; it does not wait for the work


class NcclCommunicator:
    """One communicator of this process."""

    def __init__(self, library: NcclLibrary, own: ctypes.c_void_p, queue: SideQueue, is_given_up: Callable[[], bool]):
        self._library, self._own, self._queue, self._is_given_up = library, own, queue, is_given_up

    @contextmanager
    def _as_one(self, timeout_s: float = _ENQUEUE_S) -> Iterator[None]:
        self._library.begin_group()
        try:
            yield
        finally:
            self._library.end_group()
        self._library.settled(self._own, time.monotonic() + timeout_s, self._is_given_up)

    def send(self, tensors: Tensors, rank: int) -> None:
        """Sends tensors to a rank as one message."""
        with self._as_one():
            for tensor in tensors:
                if tensor.nbytes:
                    self._library.send(self._own, tensor.data_ptr(), tensor.nbytes, rank, self._queue.handle)

    def receive(self, tensors: Tensors, rank: int) -> None:
        """Fills tensors from a rank's next send."""
        with self._as_one():
            for tensor in tensors:
                if tensor.nbytes:
                    self._library.receive(self._own, tensor.data_ptr(), tensor.nbytes, rank, self._queue.handle)

    def exchange(self, rank: int, size: int) -> None:
        """Exchanges a byte with every other rank, and waits until all have arrived."""
        bytes_of = self._first_bytes = self._queue.room((2 * size,), torch.uint8)  # NCCL may use them until the abort
        with self._as_one(_OPEN_S):
            for other in range(size):
                if other != rank:
                    at = bytes_of.data_ptr() + 2 * other
                    self._library.send(self._own, at, 1, other, self._queue.handle)
                    self._library.receive(self._own, at + 1, 1, other, self._queue.handle)
        connected = self._queue.moment()
        deadline_s = time.monotonic() + _OPEN_S
        while not connected.has_come():
            if self._is_given_up() or time.monotonic() > deadline_s or self.failure():
                raise RuntimeError(self.failure() or "the first message of each pair has not come in time")
            time.sleep(0.001)

    def pending(self) -> QueueMoment:
        """Returns the point behind all work enqueued so far."""
        return self._queue.moment()

    def failure(self) -> str:
        """Returns an error that has occurred, or an empty string. Raises errors of this device."""
        try:
            self._library.progress(self._own)
        except RuntimeError as error:
            if device_trouble(error):
                raise
            return str(error)
        return ""

    def revoke(self) -> None:
        """Stops all work."""
        self._library.revoke(self._own)

    def abort(self) -> None:
        """Ends the communicator."""
        self._library.abort(self._own)


class NcclOpening:
    """A communicator of this process whose ranks are joining, in a thread of NCCL's."""

    def __init__(self, library: NcclLibrary, own: ctypes.c_void_p, rank: int, size: int, queue: SideQueue):
        self._library, self._own, self._rank, self._size, self._queue = library, own, rank, size, queue
        self._deadline_s = time.monotonic() + _OPEN_S

    def has_joined(self) -> bool:
        """Returns whether all ranks have joined."""
        if self._library.progress(self._own):
            return True
        if time.monotonic() > self._deadline_s:
            raise RuntimeError("the other ranks have not joined in time")
        return False

    def connect(self, is_given_up: Callable[[], bool]) -> NcclCommunicator:
        """Exchanges the first byte with every other rank."""
        communicator = self._connecting = NcclCommunicator(self._library, self._own, self._queue, is_given_up)
        communicator.exchange(self._rank, self._size)
        return communicator

    def revoke(self) -> None:
        """Ends its work."""
        self._library.revoke(self._own)

    def abort(self) -> None:
        """Ends it."""
        self._library.abort(self._own)


class NcclCommunicators:
    """The communicators of one worker."""

    def __init__(self, library: NcclLibrary):
        self._library = library

    def new_id(self) -> bytes:
        """Returns the id of a new group."""
        return self._library.new_id()

    def begin(self, group_id: bytes, rank: int, size: int, queue: SideQueue) -> NcclOpening:
        """Starts joining a group."""
        own = self._library.begin_join(group_id, rank, size)
        return NcclOpening(self._library, own, rank, size, queue)
