"""The functions of NCCL's library that bamboo calls, as C has them: `nccl.h` of version 2.29.

Older and later libraries read those fields of the configuration that both sides have.

Why not torch's ProcessGroupNCCL: it joins a group in a call that cannot be broken off, has a watchdog and a monitor of
its own, which end the process, and its store must be one of torch's. Each function here returns at once, because all
communicators are non-blocking; `settled` asks until a call has come to its end.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any, Final

import torch

from engine.core.errors import EnvironmentLacksError
from engine.files.nccl_settings import nccl_lack

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
