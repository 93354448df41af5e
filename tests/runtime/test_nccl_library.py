"""The calls of NCCL's library on a stub of it: how long each is waited for, and which error is of the own device."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.runtime.device.device import HOST, Device, device_trouble
from engine.runtime.device.side_queue import SideQueue
from engine.runtime.transport import nccl_library
from engine.runtime.transport.nccl_library import NcclCommunicator, NcclLibrary
from tests.doubles.fake_gpu import PLACE, fake_gpu

OWN = ctypes.c_void_p(1)


class Stub:
    """A library in which each call succeeds, with a state that `states` tells, and then success."""

    def __init__(self, last: bytes = b"") -> None:
        self.states: Iterator[int] = iter(())
        self.last = last
        self.calls: list[str] = []

    def ncclGetVersion(self, version: Any) -> int:
        version._obj.value = 22809
        return 0

    def ncclGetErrorString(self, code: int) -> bytes:
        return b"unhandled cuda error (run with NCCL_DEBUG=INFO for details)" if code == 1 else b"remote error"

    def ncclGetLastError(self, communicator: Any) -> bytes:
        return self.last

    def ncclCommGetAsyncError(self, communicator: Any, found: Any) -> int:
        found._obj.value = next(self.states, 0)
        return 0

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nccl"):
            raise AttributeError(name)

        def call(*given: object) -> int:
            self.calls.append(name)
            return 7

        return call


def loaded(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> NcclLibrary:
    for name in ("GetErrorString", "GetLastError", "CommGetAsyncError", "GetVersion"):  # methods take no attribute
        method = getattr(stub, f"nccl{name}")
        setattr(stub, f"nccl{name}", lambda *given, method=method: method(*given))
    for name in ("CommInitRankConfig", "CommAbort", "CommRevoke", "Send", "Recv", "GroupStart", "GroupEnd"):
        setattr(stub, f"nccl{name}", getattr(stub, f"nccl{name}"))
    monkeypatch.setattr(ctypes, "CDLL", lambda path: stub)
    return NcclLibrary()


@pytest.mark.parametrize(
    ("code", "last", "trouble"),
    [
        (1, b"Cuda failure 'out of memory'", "GPU out of memory: unhandled cuda error"),
        (1, b"Cuda failure 'an illegal memory access was encountered'", "GPU error: unhandled cuda error"),
        (6, b"Cuda failure 'out of memory'", ""),
        (2, b"", ""),
    ],
)
def test_an_error_of_cuda_inside_of_nccl_is_one_of_the_own_device(
    monkeypatch: pytest.MonkeyPatch, code: int, last: bytes, trouble: str
) -> None:
    """A full GPU was a suspicion of others, again in each epoch."""
    stub = Stub(last)
    of = loaded(stub, monkeypatch)
    stub.states = iter([code])
    with pytest.raises(RuntimeError) as raised:
        of.settled(OWN, time.monotonic() + 10, lambda: False)
    found = device_trouble(raised.value)
    assert found.startswith(trouble) and bool(found) == bool(trouble)
    assert last.decode() in str(raised.value)
    stub.states = iter([code])
    communicator = NcclCommunicator(of, OWN, SideQueue(HOST), lambda: False)
    if trouble:
        with pytest.raises(type(raised.value)):
            communicator.failure()
    else:
        assert "error" in communicator.failure()


def test_a_call_that_has_settled_is_seen_without_a_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub()
    of = loaded(stub, monkeypatch)
    monkeypatch.setattr(nccl_library, "_SPIN_S", 10.0)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it sleeps"))
    stub.states = iter([7] * 5)
    of.settled(OWN, time.monotonic() + 10, lambda: False)


def test_a_pair_that_connects_has_the_patience_of_a_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first messages make the connections, in the call that gives them: 10 s are short for ranks in turns."""
    of, found = loaded(Stub(), monkeypatch), list[float]()
    monkeypatch.setattr(of, "settled", lambda own, deadline_s, look: found.append(deadline_s - time.monotonic()))
    communicator = NcclCommunicator(of, OWN, SideQueue(HOST), lambda: False)
    communicator.exchange(0, 2)
    communicator.send((torch.ones(2),), 1)
    assert [round(each, -1) for each in found] == [60, 10]


@pytest.mark.parametrize("states", [[7, 7, 0], [7, 6], [6]])
def test_to_revoke_waits_until_no_work_is_under_way_and_an_older_error_does_not_stop_it(
    monkeypatch: pytest.MonkeyPatch, states: list[int]
) -> None:
    stub = Stub()
    of = loaded(stub, monkeypatch)
    stub.states = iter([*states, 99])
    of.revoke(OWN)
    assert (stub.calls, next(stub.states)) == (["ncclCommRevoke"], 99)


@pytest.mark.parametrize(("free", "num_emptied"), [(1 << 30, 0), (100 << 20, 1)])
def test_memory_that_torch_keeps_free_is_given_back_before_a_join_if_little_is_left(
    free: int, num_emptied: int
) -> None:
    with fake_gpu() as gpu:
        gpu.memory.free = free
        SideQueue(Device(PLACE, is_host=False)).leave_room()
        assert gpu.memory.num_emptied == num_emptied
