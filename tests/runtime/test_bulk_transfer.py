"""Bulk transfers whose first receive was posted ahead: each receive is posted once, and the same bits arrive."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch

from engine.runtime.device.device import HOST
from engine.runtime.transport.transfers import arriving, chunks_of, post_bulk, receive_bulk, send_bulk
from engine.runtime.transport.transport import TensorSpec
from tests.looped import looped

MIB = 1 << 20


class Line:
    """A channel to itself that refuses a message whose receive was not posted, or posted in another size."""

    device = HOST

    def __init__(self) -> None:
        self.sent: deque[tuple[Any, ...]] = deque()
        self.posted: deque[tuple[Any, ...]] = deque()

    def send(self, target: int, key: Any, tensors: Any) -> None:
        self.sent.append((key, tensors))

    def post(self, source: int, key: Any, border: Any) -> None:
        self.posted.append((key, tuple(spec.shape for spec in border)))

    def take(self, source: int, key: Any) -> Any:
        posted, (sent, tensors) = self.posted.popleft(), self.sent.popleft()
        assert posted == (key, tuple(tuple(each.shape) for each in tensors))
        assert sent == key
        return tensors


@looped("is_posted", [False, True])
@looped(("sizes", "is_one"), [((3, 0, 5), True), ((3, MIB), False), ((40 * MIB,), False), ((0,), True)])
def test_a_receive_that_was_posted_ahead_is_not_posted_again(
    is_posted: bool, sizes: tuple[int, ...], is_one: bool
) -> None:
    line: Any = Line()
    tensors = [torch.arange(size, dtype=torch.int32).to(torch.uint8) for size in sizes]
    specs = [TensorSpec.of(each) for each in tensors]
    if is_posted:
        assert post_bulk(line, 0, "key", specs) is is_one
    send_bulk(line, (0,), "key", tensors)
    got = receive_bulk(line, 0, "key", specs, is_posted)
    assert all(torch.equal(*pair) for pair in zip(got, tensors, strict=True))
    assert not line.sent
    assert not line.posted


def test_a_receiver_that_takes_each_tensor_as_it_arrives_keeps_no_other() -> None:
    line: Any = Line()
    tensors = [torch.full((size,), number, dtype=torch.uint8) for number, size in enumerate((9, 2 * MIB, 20 * MIB, 0))]
    send_bulk(line, (0,), "key", tensors)
    kept: list[weakref.ref[torch.Tensor]] = []
    arrived = []
    for index, tensor in arriving(line, 0, "key", [TensorSpec.of(each) for each in tensors]):
        assert torch.equal(tensor, tensors[index])
        assert not any(each() is not None for each in kept)
        kept.append(weakref.ref(tensor))
        arrived.append(index)
        del tensor
    assert sorted(arrived) == [0, 1, 2, 3]


def test_small_tensors_are_sent_together_in_chunks_of_16_mib_at_most() -> None:
    assert [len(chunk) for chunk in chunks_of([1_000_000] * 18)] == [16, 2]
    assert [len(chunk) for chunk in chunks_of([MIB // 2] * 33)] == [32, 1]
