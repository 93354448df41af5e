"""The transport over NCCL, on its double: its order, the keys of an audit, and the ways out of a group."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from engine.core.errors import EnvironmentLacksError, InvariantError, TransferFailedError
from engine.core.ownership import Grid
from engine.files.accelerators import LEAST_NCCL, nccl_settings
from engine.runtime.device.device import HOST
from engine.runtime.transport import nccl_transport
from engine.runtime.transport.group_formation import _Attempt
from engine.runtime.transport.nccl_library import Config, NcclLibrary, non_blocking
from engine.runtime.transport.nccl_transport import NcclTransport
from engine.runtime.transport.transport import Issued, ProgramKey, ProgramPurpose, TensorSpec, program_key
from tests.doubles.fake_nccl import FakeNccl, NcclBesideLinks
from tests.runtime.linked import Desks

GRID = Grid(2, 4)
TWO = (TensorSpec((2,), torch.float32, False),)
A0, A1 = (program_key(GRID, ProgramPurpose.ACTIVATION, 0, 0, each) for each in (0, 1))
LOG = program_key(GRID, ProgramPurpose.LOG, 0, 1)
SIZES = (88, 48, 84)


@pytest.fixture
def nccl() -> FakeNccl:
    return FakeNccl()


Backends = dict[int, NcclBesideLinks]


@pytest.fixture
def backends(nccl: FakeNccl) -> Iterator[Backends]:
    """Those of workers 4 and 7, on the host."""
    desks = Desks(4, 7)
    backends = {
        worker: NcclBesideLinks(nccl, desks, desk, worker, HOST)  # type: ignore[arg-type]
        for worker, desk in desks.by_worker.items()
    }
    yield backends
    nccl.stands.clear()
    for backend in backends.values():
        backend.leave()
        backend.close()
    assert nccl.wrongs == []


@pytest.fixture
def pair(backends: Backends) -> tuple[NcclTransport, NcclTransport]:
    """The ends of workers 4 and 7 in a group."""
    ends = dict[int, NcclTransport]()

    def join(worker: int) -> None:
        ends[worker] = backends[worker].joining(0, (4, 7)).join()

    threads = [threading.Thread(target=join, args=(worker,)) for worker in backends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends[4], ends[7]


def alone(nccl: FakeNccl) -> NcclBesideLinks:
    """Returns the backend of worker 4 that never meets another one."""
    desks = Desks(4)
    return NcclBesideLinks(nccl, desks, desks.by_worker[4], 4, HOST)  # type: ignore[arg-type]


def numbers(*values: float) -> tuple[torch.Tensor]:
    return (torch.tensor(values, dtype=torch.float32),)


def program(one: NcclTransport, other: NcclTransport, sent: list[ProgramKey], taken: list[ProgramKey]) -> None:
    """Begins a program in which one end sends keys and the other one takes keys."""
    one.expect(3, [Issued(True, 7, key, TWO) for key in sent])
    other.expect(3, [Issued(False, 4, key, TWO) for key in taken])


def test_messages_go_in_the_order_of_the_program(pair: tuple[NcclTransport, NcclTransport], nccl: FakeNccl) -> None:
    one, other = pair
    program(one, other, [A0, A1], [A0, A1])
    one.in_order.send(7, A1, numbers(3, 4))
    time.sleep(0.05)
    assert nccl.num_sent == 0, "the first message of the order is not there yet"
    one.in_order.send(7, A0, numbers(1, 2))
    assert other.in_order.take(4, A0)[0].tolist() == [1, 2]
    assert other.in_order.take(4, A1)[0].tolist() == [3, 4]
    assert nccl.num_sent == 4, "each with its key"
    assert (one.traffic()[7].sent, other.traffic()[4].posted, other.traffic()[4].received) == (2, 2, 2)


def test_what_was_sent_is_free_behind_the_next_receive(pair: tuple[NcclTransport, NcclTransport]) -> None:
    """Not only at the commit: with values that stay on the host, the message would keep their memory on the GPU."""
    one, other = pair
    one.expect(3, [Issued(True, 7, A0, TWO), Issued(False, 7, A1, TWO)])
    other.expect(3, [Issued(False, 4, A0, TWO), Issued(True, 4, A1, TWO)])
    sent = numbers(1, 2)
    memory = StorageWeakRef(sent[0].untyped_storage())
    one.in_order.send(7, A0, sent)
    del sent
    assert other.in_order.take(4, A0)[0].tolist() == [1, 2]
    assert not memory.expired(), "NCCL may still read it"
    other.in_order.send(4, A1, numbers(3, 4))
    assert one.in_order.take(7, A1)[0].tolist() == [3, 4]
    until_s = time.monotonic() + 10
    while not memory.expired() and time.monotonic() < until_s:
        time.sleep(0.001)
    assert memory.expired()


def test_a_log_goes_over_the_host(pair: tuple[NcclTransport, NcclTransport], nccl: FakeNccl) -> None:
    one, other = pair
    other.in_order.post(4, LOG, TWO)
    one.in_order.send(7, LOG, numbers(5, 6))
    assert other.in_order.take(4, LOG)[0].tolist() == [5, 6]
    assert nccl.num_sent == 0


def test_planted_swap_is_found_by_the_key(pair: tuple[NcclTransport, NcclTransport]) -> None:
    one, other = pair
    program(one, other, [A1, A0], [A0, A1])
    one.in_order.send(7, A0, numbers(1, 2))
    one.in_order.send(7, A1, numbers(3, 4))
    with pytest.raises(
        InvariantError, match=r"asked for 0SEND_F0 of .*step 3, epoch 0: 0SEND_F1 of pipeline 0, step 3"
    ):
        other.in_order.take(4, A0)
    assert not other.in_order.has_arrived(4, A1)


def test_without_keys_a_swap_gives_other_weights(
    pair: tuple[NcclTransport, NcclTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_transport._BetweenGpus, "_header_of", lambda channel, key: None)
    one, other = pair
    program(one, other, [A1, A0], [A0, A1])
    one.in_order.send(7, A0, numbers(1, 2))
    one.in_order.send(7, A1, numbers(3, 4))
    assert other.in_order.take(4, A0)[0].tolist() == [3, 4], "the harm that the key prevents"


def test_planted_log_between_gpus_is_refused(
    pair: tuple[NcclTransport, NcclTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_transport, "_WITHOUT_TAGS", frozenset(ProgramPurpose))
    one, other = pair
    program(one, other, [A0], [A0])
    with pytest.raises(InvariantError, match="is no transfer of this program"):
        one.in_order.send(7, LOG, numbers(5, 6))


def test_planted_log_that_is_issued_is_found_by_the_key(
    pair: tuple[NcclTransport, NcclTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_transport, "_WITHOUT_TAGS", frozenset(ProgramPurpose))
    one, other = pair
    program(one, other, [LOG, A0], [A0])
    one.in_order.send(7, LOG, numbers(5, 6))
    one.in_order.send(7, A0, numbers(1, 2))
    with pytest.raises(InvariantError, match=r"asked for 0SEND_F0 .*a message that is none"):
        other.in_order.take(4, A0)


def test_a_program_that_leaves_messages_is_found(pair: tuple[NcclTransport, NcclTransport]) -> None:
    one, other = pair
    program(one, other, [A0], [A0])
    other.expect(4, [Issued(False, 4, A1, TWO)])
    one.expect(4, [])
    with pytest.raises(InvariantError, match="the one before it has left 1 messages to issue"):
        one.in_order.take(4, A1)


LOST = torch.AcceleratorError("CUDA error: unspecified launch failure")


class Broken:
    """Work that fails."""

    def __init__(self, error: RuntimeError):
        self.error = error

    def wait(self) -> None:
        """Raises the error."""
        raise self.error


@pytest.mark.parametrize("where", ["given", "waited for", "compared"])
@pytest.mark.parametrize("error", [LOST, RuntimeError("remote process exited")], ids=["own device", "NCCL"])
def test_an_error_of_the_own_device_is_told_from_a_suspicion(
    pair: tuple[NcclTransport, NcclTransport], monkeypatch: pytest.MonkeyPatch, error: RuntimeError, where: str
) -> None:
    one, other = pair

    def fails(*given: object) -> None:
        raise error

    communicator = other._issues._communicator
    if where == "given":
        monkeypatch.setattr(communicator, "receive", fails)
    elif where == "waited for":
        monkeypatch.setattr(communicator, "pending", lambda: Broken(error))
    else:
        monkeypatch.setattr(other._issues, "_receive", fails)
    program(one, other, [A0], [A0])
    one.in_order.send(7, A0, numbers(1, 2))
    with pytest.raises(type(error) if error is LOST else TransferFailedError, match=str(error)) as raised:
        other.in_order.take(4, A0)
    if error is LOST:
        assert raised.value is LOST
    else:
        assert getattr(raised.value, "peer", 0) == (None if where == "waited for" else 4)


def test_a_device_that_is_lost_while_its_group_opens_ends_its_worker(nccl: FakeNccl) -> None:
    """The thread that formed the group ended without a word, and its worker waited for it."""

    def opening(*given: object) -> None:
        raise LOST

    backend = alone(nccl)
    backend._own.begin = opening  # type: ignore[method-assign, assignment]
    attempt = _Attempt(backend.joining(0, (4,)))
    attempt.join()
    assert attempt.failed is LOST
    backend.leave()


def test_a_receive_that_a_revoke_ends_has_not_arrived(
    pair: tuple[NcclTransport, NcclTransport], nccl: FakeNccl
) -> None:
    one, other = pair
    program(one, other, [A0], [A0])
    while not nccl.groups or not any(any(group.queues) for group in nccl.groups.values()):
        time.sleep(0.001)
    other.abandon()
    while not nccl.num_revoked:
        time.sleep(0.001)
    time.sleep(0.02)
    assert not other.in_order.has_arrived(4, A0)


def test_a_worker_whose_revoke_does_not_return_ends_itself(
    pair: tuple[NcclTransport, NcclTransport], nccl: FakeNccl
) -> None:
    one, other = pair
    nccl.stands[4] = ("revoke", 1)
    one._last_resort = one._last_resort._replace(abort_s=0.05)
    one.abandon()
    other.abandon()
    until_s = time.monotonic() + 10
    while not nccl.ended and time.monotonic() < until_s:
        time.sleep(0.005)
    assert nccl.ended == [nccl_transport.ENDS_ITSELF], "worker 7 got out"


def test_a_group_that_is_given_up_is_not_opened(nccl: FakeNccl) -> None:
    backend = alone(nccl)
    joining = backend.joining(0, (4, 7))
    threading.Timer(0.05, joining.abandon).start()
    with pytest.raises(TransferFailedError):
        joining.join()
    backend.leave()


def test_the_configuration_is_that_of_the_header() -> None:
    """The layout of ncclConfig_t in nccl.h 2.29.7, compiled: size, and the places of two fields."""
    config = non_blocking()
    assert (ctypes.sizeof(Config), Config.commName.offset, Config.numRmaCtx.offset) == SIZES
    assert (config.size, config.version, config.blocking, config.minCTAs) == (SIZES[0], 22907, 0, -(1 << 31))
    assert config.netName is None


def test_a_build_without_nccl_is_named() -> None:
    with pytest.raises(EnvironmentLacksError, match=r"NCCL cannot be loaded: .*no-such-library.* --backend direct"):
        NcclLibrary("no-such-library.so")


@pytest.mark.parametrize(("number", "version"), [(22809, (2, 28, 9)), (22803, (2, 28, 3)), (30001, (3, 0, 1))])
def test_an_older_nccl_is_refused_by_its_version(
    monkeypatch: pytest.MonkeyPatch, number: int, version: tuple[int, int, int]
) -> None:
    """The doctor names the same limit."""

    class Function:
        def __call__(self, *given: Any) -> int:
            given[0]._obj.value = number
            return 0

    class Loaded:
        def __getattr__(self, name: str) -> Function:
            self.__dict__[name] = Function()
            found: Function = self.__dict__[name]
            return found

    monkeypatch.setattr(ctypes, "CDLL", lambda path: Loaded())
    if version >= LEAST_NCCL:
        assert NcclLibrary().version == version
    else:
        with pytest.raises(EnvironmentLacksError, match=r"NCCL 2\.28\.3 was found, and 2\.28\.7 or newer is needed"):
            NcclLibrary()


def test_each_worker_on_a_shared_gpu_has_a_host_of_its_own() -> None:
    own = nccl_settings(3, shares=True, environment={"NCCL_SOCKET_IFNAME": "eth0", "NCCL_HOSTID": "all"})
    assert own["NCCL_HOSTID"] == "bamboo-worker-3"
    assert (own["NCCL_SOCKET_IFNAME"], own["NCCL_RUNTIME_CONNECT"], own["NCCL_NVLS_ENABLE"]) == ("eth0", "1", "0")
    assert "NCCL_HOSTID" not in nccl_settings(3, shares=False, environment={})
