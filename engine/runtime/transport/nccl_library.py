"""The functions of NCCL's library that bamboo calls, as C has them: `nccl.h` of version 2.29.

Older and later libraries read those fields of the configuration that both sides have.

Why not torch's ProcessGroupNCCL: it joins a group in a call that cannot be broken off, has a watchdog and a monitor of
its own, which end the process, and its store must be one of torch's. Each function here returns at once, because all
communicators are non-blocking; `settled` asks until a call has come to its end.
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
_OF_CONFIG = 22907  # the header that was read
_LOOK_EVERY_S = 0.0005
_LOOKS_FIRST_S = 0.00005  # without a sleep: giving work to a stream takes about as long
_OF_CUDA = 1  # ncclUnhandledCudaError


class UniqueId(ctypes.Structure):
    """ncclUniqueId."""

    _fields_ = (("internal", ctypes.c_char * 128),)


class Config(ctypes.Structure):
    """ncclConfig_t of version 2.29; a library reads as many fields as `size` says and itself has."""

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
    """Returns the configuration of a communicator whose calls return at once."""
    config = Config()
    for name, kind, *_ in Config._fields_:
        if kind is ctypes.c_int:
            setattr(config, name, _UNDEFINED)
    config.size, config.magic, config.version, config.blocking = ctypes.sizeof(Config), _MAGIC, _OF_CONFIG, 0
    return config


class NcclLibrary:
    """The functions of NCCL; each raises RuntimeError for an error of NCCL's.

    Raises EnvironmentLacksError where there is no library, or one that is too old.
    """

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
        self.version = self._version()
        if lack := nccl_lack(self.version):
            raise EnvironmentLacksError(f"{lack}; use --backend direct")
        self._c.ncclCommAbort.argtypes = (ctypes.c_void_p,)
        self._c.ncclCommRevoke.argtypes = (ctypes.c_void_p, ctypes.c_int)
        self._c.ncclCommGetAsyncError.argtypes = (ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))

    def _version(self) -> tuple[int, int, int]:
        found = ctypes.c_int()
        self._checked(self._c.ncclGetVersion(ctypes.byref(found)))
        major, rest = divmod(found.value, 10_000)
        return major, rest // 100, rest % 100

    def _checked(self, result: int, communicator: ctypes.c_void_p | None = None) -> None:
        if result not in (_SUCCESS, _IN_PROGRESS):
            words = self._c.ncclGetErrorString(result) or b"unknown error"
            last = self._c.ncclGetLastError(communicator) or b""
            raise _kind(result, last)(": ".join(each.decode(errors="replace") for each in (words, last) if each))

    def new_id(self) -> bytes:
        """Returns the id of a new group; this process keeps the place where its ranks meet."""
        made = UniqueId()
        self._checked(self._c.ncclGetUniqueId(ctypes.byref(made)))
        return bytes(memoryview(made))

    def begin_join(self, group_id: bytes, rank: int, size: int) -> ctypes.c_void_p:
        """Begins to join a group; the communicator may be used when it has settled."""
        communicator, config = ctypes.c_void_p(), non_blocking()
        unique = UniqueId.from_buffer_copy(group_id)
        found = self._c.ncclCommInitRankConfig(ctypes.byref(communicator), size, unique, rank, ctypes.byref(config))
        self._checked(found)
        return communicator

    def progress(self, communicator: ctypes.c_void_p) -> bool:
        """Returns whether the last call has come to its end; raises RuntimeError for an error since."""
        found = ctypes.c_int()
        self._checked(self._c.ncclCommGetAsyncError(communicator, ctypes.byref(found)), communicator)
        self._checked(found.value, communicator)
        return found.value == _SUCCESS

    def settled(self, communicator: ctypes.c_void_p, deadline_s: float, is_given_up: Callable[[], bool]) -> None:
        """Waits until the last call has come to its end; raises RuntimeError at a deadline, or when it is given up."""
        sleeps_from_s = time.monotonic() + _LOOKS_FIRST_S
        while not self.progress(communicator):
            if is_given_up():
                raise RuntimeError("it was given up")
            if time.monotonic() > deadline_s:
                raise RuntimeError("it did not come to its end in time")
            if time.monotonic() > sleeps_from_s:
                time.sleep(_LOOK_EVERY_S)

    def send(self, communicator: ctypes.c_void_p, at: int, num_bytes: int, rank: int, stream: int) -> None:
        """Gives the bytes of a send to a stream."""
        self._checked(self._c.ncclSend(at, num_bytes, _UINT8, rank, communicator, stream), communicator)

    def receive(self, communicator: ctypes.c_void_p, at: int, num_bytes: int, rank: int, stream: int) -> None:
        """Gives the bytes of a receive to a stream."""
        self._checked(self._c.ncclRecv(at, num_bytes, _UINT8, rank, communicator, stream), communicator)

    def begin_group(self) -> None:
        """Begins sends and receives that are given as one."""
        self._checked(self._c.ncclGroupStart())

    def end_group(self) -> None:
        """Gives them."""
        self._checked(self._c.ncclGroupEnd())

    def revoke(self, communicator: ctypes.c_void_p) -> None:
        """Ends all work of a communicator, which keeps its memory; waits until none of it is under way."""
        found = ctypes.c_int(self._c.ncclCommRevoke(communicator, _REVOKE_DEFAULT))
        while found.value == _IN_PROGRESS:  # any error is of the time before, or met by the abort again
            time.sleep(_LOOK_EVERY_S)
            self._c.ncclCommGetAsyncError(communicator, ctypes.byref(found))

    def abort(self, communicator: ctypes.c_void_p) -> None:
        """Ends a communicator and all of its work, and gives its memory free."""
        self._checked(self._c.ncclCommAbort(communicator))


def _kind(result: int, last: bytes) -> type[RuntimeError]:
    """Returns the exception of an error: this worker's GPU has failed, or its memory is full, or it is a suspicion."""
    if result != _OF_CUDA:
        return RuntimeError
    return torch.OutOfMemoryError if b"out of memory" in last else torch.AcceleratorError


# The seam to NCCL: all that bamboo asks of it, so that a double can stand in its place.
#
# Rules: one thread of a worker calls everything here but `PendingWork.wait`. A send and a receive only give work to the
# queue of the device: the work of one communicator is done in the order in which it was given, and the n-th receive
# from a rank takes the n-th send to it. A RuntimeError is a suspicion: a peer that was killed may give no error at all.
#
# The ranks of a communicator may join while another one of the worker is at work: that gives no work to a queue. It is
# connected, which does, when the other one has been revoked: two at work may wait for each other's place on the device.
# An abort gives memory free in which a rank that has not heard may be at work. So a communicator that has been at work
# is revoked first, and aborted when each rank that is left has revoked its own.


class PendingWork(Protocol):
    """The end of work that was given to a queue."""

    def wait(self) -> None:
        """Waits until the work is done, or has been aborted; any thread may call."""


class Communicator(Protocol):
    """One end of a group of ranks."""

    def send(self, tensors: Tensors, rank: int) -> None:
        """Gives contiguous tensors to a rank, as one; never waits for it. They must not change before they are sent."""

    def receive(self, tensors: Tensors, rank: int) -> None:
        """Fills contiguous tensors with those of the next send of a rank; never waits for it."""

    def pending(self) -> PendingWork:
        """Returns the end of all work that was given so far."""

    def failure(self) -> str:
        """Returns the words of an error since; empty without one. Never waits. Raises that of the own device."""

    def revoke(self) -> None:
        """Ends all work, without the other ranks, and keeps the memory. It may hang."""

    def abort(self) -> None:
        """Ends the communicator, without the other ranks, and gives its memory free. It may hang."""


class Opening(Protocol):
    """A communicator whose ranks are joining."""

    def has_joined(self) -> bool:
        """Returns whether all ranks have joined; never waits. Raises RuntimeError if they cannot, or not in time."""

    def connect(self, is_given_up: Callable[[], bool]) -> Communicator:
        """Connects each rank with each, once all have joined, and waits for it.

        Raises RuntimeError if that fails, or when `is_given_up`; every later call of the communicator does so, too.
        """

    def revoke(self) -> None:
        """Ends the work of a `connect` that has failed, as that of a communicator. It may hang."""

    def abort(self) -> None:
        """Ends it, whether ranks are missing or not. It may hang."""


class Communicators(Protocol):
    """How a worker comes to its communicators."""

    def new_id(self) -> bytes:
        """Returns the id of a new group, which its first rank makes and tells the others."""

    def begin(self, group_id: bytes, rank: int, size: int, queue: SideQueue) -> Opening:
        """Begins to join a group; never waits. Raises RuntimeError if that fails."""


# Communicators of NCCL itself, on one stream of the worker's GPU. None of this has run on a GPU yet.
#
# Rules: a tensor of any dtype is sent as bytes, so no number is changed. Each message is a group of its own, also of
# one tensor: its operations begin together. A pair is connected at its first message, in the call that gives it: so
# `connect` is one byte from each rank to each other, with the patience of a join.

_OPEN_S = 60.0
_GIVE_S = 10.0  # for a call that gives work; it does not wait for the work


class NcclCommunicator:
    """One communicator of this process."""

    def __init__(self, library: NcclLibrary, own: ctypes.c_void_p, queue: SideQueue, is_given_up: Callable[[], bool]):
        self._library, self._own, self._queue, self._is_given_up = library, own, queue, is_given_up

    @contextmanager
    def _as_one(self, patience_s: float = _GIVE_S) -> Iterator[None]:
        self._library.begin_group()
        try:
            yield
        finally:
            self._library.end_group()
        self._library.settled(self._own, time.monotonic() + patience_s, self._is_given_up)

    def send(self, tensors: Tensors, rank: int) -> None:
        """Gives tensors to a rank, as one."""
        with self._as_one():
            for each in tensors:
                if each.nbytes:
                    self._library.send(self._own, each.data_ptr(), each.nbytes, rank, self._queue.handle)

    def receive(self, tensors: Tensors, rank: int) -> None:
        """Fills tensors with those of the next send of a rank."""
        with self._as_one():
            for each in tensors:
                if each.nbytes:
                    self._library.receive(self._own, each.data_ptr(), each.nbytes, rank, self._queue.handle)

    def exchange(self, rank: int, size: int) -> None:
        """Sends each other rank a byte, and waits until all have come."""
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
        """Returns the end of all work that was given so far."""
        return self._queue.moment()

    def failure(self) -> str:
        """Returns the words of an error since; empty without one. Raises that of the own device."""
        try:
            self._library.progress(self._own)
        except RuntimeError as error:
            if device_trouble(error):
                raise
            return str(error)
        return ""

    def revoke(self) -> None:
        """Ends all work."""
        self._library.revoke(self._own)

    def abort(self) -> None:
        """Ends the communicator."""
        self._library.abort(self._own)


class NcclOpening:
    """A communicator of this process whose ranks are joining: NCCL does it in a thread of its own."""

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
        """Sends each other rank the first byte, and waits until all have come."""
        found = self._connecting = NcclCommunicator(self._library, self._own, self._queue, is_given_up)
        found.exchange(self._rank, self._size)
        return found

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
        """Begins to join a group."""
        own = self._library.begin_join(group_id, rank, size)
        return NcclOpening(self._library, own, rank, size, queue)
