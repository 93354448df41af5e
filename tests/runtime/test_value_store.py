"""Values that stay until the commit in host memory: one copy for the message and the store, ordered by events."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from engine.core.ownership import Grid, Ownership
from engine.core.value import Kind, Value
from engine.runtime.device.copies import StreamCopies, ToHost, tensors_of
from engine.runtime.device.device import Device
from engine.runtime.stage.replicas import ValueStore
from tests.doubles.fake_gpu import PLACE, FakeGpu, fake_gpu
from tests.doubles.fake_streams import FakeStream, StreamRaceError

ACROSS, WITHIN = Value(Kind.ACTIVATION, 0, 1, 0), Value(Kind.ACTIVATION, 0, 0, 0)


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    with fake_gpu() as gpu:
        yield gpu


def store(*, keeps: bool = True, on_host: bool = True) -> tuple[ValueStore, StreamCopies]:
    """Returns the store of a worker with the first two of three stages, on a GPU."""
    copies = StreamCopies(PLACE)
    made = ValueStore(keeps, Device(PLACE, is_host=False, copies=copies), on_host=on_host)
    made.enter(Ownership(Grid(3, 1), (0, 0, 1)))
    return made, copies


def send(values: ValueStore, copies: StreamCopies, *, between_gpus: bool = False) -> None:
    """Sends the value as a worker does: from the host, or from the device."""
    tensors = values.to_send(ACROSS)
    values.sent(ACROSS, tensors if between_gpus else copies.fetched(tensors))


@pytest.mark.parametrize("between_gpus", [False, True])
def test_a_value_leaves_the_device_when_it_is_sent_and_comes_back_for_a_use(gpu: FakeGpu, between_gpus: bool) -> None:
    values, copies = store()
    made = torch.ones(3, device=PLACE, requires_grad=True) * 2
    memory = StorageWeakRef(made.untyped_storage())
    values.make(ACROSS, (made,))
    del made
    send(values, copies, between_gpus=between_gpus)
    assert memory.expired()
    assert values.values() == (ACROSS,) and gpu.copies == {"to host": 1}
    assert isinstance(kept := values.to_send(ACROSS), ToHost) and copies.fetched(kept) is kept
    for _ in range(2):
        (back,) = values.consume(ACROSS)
        assert gpu.holds(back) and back.requires_grad and (back + 0).tolist() == [2, 2, 2]
    values.clear()
    assert values.values() == ()


def test_what_stays_at_its_worker_and_what_nobody_could_need_is_not_copied(gpu: FakeGpu) -> None:
    values, _ = store()
    values.make(WITHIN, (torch.ones(3, device=PLACE),))
    assert gpu.holds(values.consume(WITHIN)[0]) and values.values() == ()
    values, copies = store(keeps=False)
    values.make(ACROSS, (torch.ones(3, device=PLACE),))
    send(values, copies, between_gpus=True)
    assert values.values() == () and not gpu.copies


def test_on_the_device_a_value_stays_where_it_is(gpu: FakeGpu) -> None:
    values, copies = store(on_host=False)
    made = torch.ones(3, device=PLACE)
    values.make(ACROSS, (made,))
    send(values, copies)
    assert values.consume(ACROSS)[0].data_ptr() == made.data_ptr()
    assert gpu.copies == {"to host": 1}  # of the message


def use(values: ValueStore, copies: StreamCopies) -> None:
    values.make(ACROSS, (torch.ones(3, device=PLACE) * 2,))
    send(values, copies)
    torch.ones(3, device=PLACE)
    (values.consume(ACROSS)[0] + 1).cpu()


def _not_awaited(self: StreamCopies, leaving: ToHost) -> tuple[Tensor, ...]:
    return tuple(each.to(PLACE, non_blocking=True) for each in tensors_of(leaving))


Plant = Callable[[pytest.MonkeyPatch], None]
PLANTED: dict[str, tuple[Plant, str]] = {
    "the copy begins before the value is made": (
        lambda patch: patch.setattr(FakeStream, "wait_event", lambda stream, event: None),
        "stream 1 uses what stream 0 writes",
    ),
    "the value is used before it lies on the host": (
        lambda patch: patch.setattr(StreamCopies, "landed", _not_awaited),
        "stream 0 uses what stream 1 writes",
    ),
    "its memory is free while it is copied": (
        lambda patch: patch.setattr(Tensor, "record_stream", lambda tensor, stream: None),
        "free again which stream 1 uses",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_slip_is_found(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    plant, found = PLANTED[name]
    values = store()
    use(*values)
    waits = gpu.streams.waits.copy()
    assert not any(what in ("device", "stream", "event") for what, _ in waits)
    plant(monkeypatch)
    with pytest.raises(StreamRaceError, match=found):
        use(*values)
