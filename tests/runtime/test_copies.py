"""Copies between host and device: ordered by events, without a wait of the host; an event that is left out is found."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.core.job.job import Job
from engine.runtime.agent import session
from engine.runtime.device import copies
from engine.runtime.device.copies import HOST_COPIES, StreamCopies, ToDevice, ToHost, tensors_of
from tests.doubles.fake_gpu import PLACE, FakeGpu, fake_gpu
from tests.doubles.fake_streams import FakeEvent, FakeStream, StreamRaceError
from tests.runtime.thread_runs import run_in_threads

JOB: dict[str, Any] = {
    **{"model": "mlp", "stages": 3, "microbatches": 2, "device": "cuda", "share_gpu": True, "audit": 0},
    "check_pure": False,
}


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    with fake_gpu() as gpu:
        yield gpu


def made(*values: float) -> Tensor:
    return torch.tensor(values, device=PLACE) * 2


def given_on(on: StreamCopies, *tensors: Tensor) -> list[float]:
    """Returns the numbers of tensors, as the thread that gives copies on has read them."""
    found: list[float] = []
    failures: list[Exception] = []
    is_done = threading.Event()

    def take(taken: tuple[Tensor, ...]) -> None:
        found.extend(value for each in taken for value in (each + 0).numpy().tolist())
        is_done.set()

    def fail(error: Exception) -> None:
        failures.append(error)
        is_done.set()

    on.when_fetched(on.fetched(tensors), take, fail)
    assert is_done.wait(60)
    if failures:
        raise failures[0]
    return found


def read_back(on: StreamCopies, tensor: Tensor) -> Tensor:
    return on.admitted(on.landed((tensor,)))[0] + 1


def test_copies_keep_bits_strides_and_the_mark_of_a_gradient(gpu: FakeGpu) -> None:
    on = StreamCopies(PLACE)
    assert given_on(on, made(1, 2), made(3)) == [2, 4, 6]
    turned = torch.arange(6.0, device="cpu").reshape(2, 3).t().requires_grad_()
    (landed,) = on.admitted(on.landed((turned,)))
    assert gpu.holds(landed) and landed.stride() == (1, 3) and landed.requires_grad
    assert torch.equal(landed.detach().cpu(), turned.detach())


def test_the_host_waits_for_no_copy(gpu: FakeGpu) -> None:
    on, streams = StreamCopies(PLACE), gpu.streams
    streams.op_ns = 20_000_000
    read_back(on, torch.ones(3, device="cpu"))
    on.settle()
    leaving = on.fetched((made(1),))
    assert isinstance(leaving, ToHost) and not leaving.ready.query()
    assert not streams.waits
    assert given_on(on, made(1)) == [2]
    assert {name for _, name in streams.waits} == {"copies to the host"}


def test_copies_that_have_begun_are_not_begun_again(gpu: FakeGpu) -> None:
    on = StreamCopies(PLACE)
    leaving = on.fetched((made(1),))
    assert on.fetched(leaving) is leaving
    assert gpu.copies["to host"] == 1
    (back,) = on.admitted(on.landed(leaving))
    assert (back + 0).cpu().numpy().tolist() == [2]


def _not_awaited(self: StreamCopies, arriving: Any) -> Any:
    return arriving.tensors if isinstance(arriving, ToDevice) else arriving


def _given_on_at_once(self: StreamCopies, leaving: Any, give_on: Any, failed: Any) -> None:
    give_on(tensors_of(leaving))


def read_on_the_host(on: StreamCopies) -> None:
    given_on(on, made(1))


def read_on_the_device(on: StreamCopies) -> None:
    read_back(on, torch.ones(3, device="cpu"))


def change_what_is_sent(on: StreamCopies) -> None:
    tensor = made(1)
    on.fetched((tensor,))
    on.settle()
    tensor.add_(1)


def free_what_is_sent(on: StreamCopies) -> None:
    tensor = made(1)
    on.fetched((tensor,))
    del tensor
    made(2)


def free_what_has_come(on: StreamCopies) -> None:
    came = read_back(on, torch.ones(3, device="cpu"))
    with torch.cuda.stream(on._receiving):
        torch.empty(3, device=PLACE)
    del came


Plant = Callable[[pytest.MonkeyPatch], None]
PLANTED: dict[str, tuple[Plant, Callable[[StreamCopies], None], str]] = {
    "an arrival is not awaited": (
        lambda patch: patch.setattr(StreamCopies, "admitted", _not_awaited),
        read_on_the_device,
        "stream 0 uses what stream 2 writes",
    ),
    "a copy begins before its tensor is made": (
        lambda patch: patch.setattr(FakeStream, "wait_event", lambda stream, event: None),
        read_on_the_host,
        "stream 1 uses what stream 0 writes",
    ),
    "the host reads too early": (
        lambda patch: patch.setattr(StreamCopies, "when_fetched", _given_on_at_once),
        read_on_the_host,
        "the host uses in .* what stream 1 writes",
    ),
    "the thread does not wait": (
        lambda patch: patch.setattr(FakeEvent, "synchronize", lambda event: None),
        read_on_the_host,
        "the host uses in .* what stream 1 writes",
    ),
    "a tensor changes while it is copied": (
        lambda patch: patch.setattr(StreamCopies, "settle", lambda self: None),
        change_what_is_sent,
        "stream 0 overwrites what stream 1 reads",
    ),
    "memory that is copied is given free": (
        lambda patch: patch.setattr(Tensor, "record_stream", lambda tensor, stream: None),
        free_what_is_sent,
        "free again which stream 1 uses",
    ),
    "memory that has come is given free": (
        lambda patch: patch.setattr(Tensor, "record_stream", lambda tensor, stream: None),
        free_what_has_come,
        "free again which stream 0 uses",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_an_event_that_is_left_out_is_found(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    plant, use, found = PLANTED[name]
    on = StreamCopies(PLACE)
    use(on)
    plant(monkeypatch)
    with pytest.raises(StreamRaceError, match=found):
        use(on)


def test_the_memory_of_receives_is_made_up_front_and_used_again(gpu: FakeGpu) -> None:
    on = StreamCopies(PLACE)
    on.make_rooms(lambda: {64, 4096})
    before = gpu.rooms_made.copy()
    assert before == {64: copies._ROOMS, 4096: copies._ROOMS}
    for _ in range(10):
        posted = [on.room((16,), torch.float32) for _ in range(4)]
        on.landed(tuple(posted))
        del posted
    assert gpu.rooms_made == before


def test_a_copy_that_cannot_be_given_on_is_told(gpu: FakeGpu) -> None:
    on = StreamCopies(PLACE)
    told: list[Exception] = []
    is_told = threading.Event()

    def broken(tensors: Any) -> None:
        raise RuntimeError("connection reset")

    def tell(error: Exception) -> None:
        told.append(error)
        is_told.set()

    on.when_fetched(on.fetched((made(1),)), broken, tell)
    assert is_told.wait(60) and str(told[0]) == "connection reset"
    assert given_on(on, made(1)) == [2]


def test_a_thread_that_takes_in_a_message_sets_its_device_first(gpu: FakeGpu) -> None:
    """Each thread begins with GPU 0, and the end of a stream's block sets the device before: a context on GPU 0."""
    on, failed = StreamCopies(PLACE), list[BaseException]()

    def take_in() -> None:
        try:
            on.landed((torch.tensor([1.0], device="cpu"),))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=take_in)
    thread.start()
    thread.join()
    assert failed == []


def test_on_the_host_nothing_waits_and_nothing_is_copied() -> None:
    tensors = (torch.ones(3, device="cpu"),)
    found: list[Any] = []
    assert HOST_COPIES.landed(tensors) is tensors and HOST_COPIES.admitted(tensors) is tensors
    assert HOST_COPIES.fetched(tensors) is tensors
    HOST_COPIES.when_fetched(tensors, found.append, found.append)
    HOST_COPIES.make_rooms(lambda: pytest.fail("asked for sizes"))
    HOST_COPIES.settle()
    assert found == [tensors]


def test_the_double_outlives_the_begin_of_a_thread_that_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that looked for its device behind the double found none, and another test failed for it."""
    begun = list[str]()

    def late(place: torch.device, *others: Any) -> None:
        time.sleep(0.1)
        begun.append("with the double")
        torch.cuda.set_device(place)

    monkeypatch.setattr(copies, "_give_on", late)
    with fake_gpu():
        kept = StreamCopies(PLACE)
    assert kept and begun == ["with the double"]


def test_the_steps_of_a_job_wait_for_no_copy_and_make_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main threads of workers wait for single values only, and for the losses that a vote tells."""
    monkeypatch.setattr(session, "refuse_what_this_host_lacks", lambda job: None)
    waits, to_host, rooms = [], [], []
    for steps in (2, 4, 30):
        with fake_gpu() as gpu:
            assert run_in_threads(Job(**JOB, steps=steps)).outcome == "finished"
            waits.append(gpu.streams.waits)
            to_host.append(gpu.copies["to host"])
            rooms.append(sum(gpu.rooms_made.values()))
    more = waits[1] - waits[0]
    assert not any(what in ("device", "stream") for what, _ in waits[1])
    assert {name for what, name in more if what == "event"} == {"copies to the host"}
    per_step = {(what, name[-1]): count / 2 for (what, name), count in more.items() if what != "event"}
    # Each worker looks once at its accumulators, at the norms, and at the log that it shadows; the last at the losses.
    assert per_step == {("copy", "0"): 3, ("copy", "1"): 3, ("copy", "2"): 4, ("value", "2"): JOB["microbatches"]}, more
    copies_of_a_step = (to_host[1] - to_host[0]) / 2
    assert rooms[2] <= copies_of_a_step < 30, "all that may be in flight at once; one lost in each step would be 30"
