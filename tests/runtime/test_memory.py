"""The memory of tensors as bytes: in place, of any dtype, and alive as long as it is used."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from engine.runtime.transport.peer_link import host_room, memory_of, tensor_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
def test_bytes_are_those_of_the_tensor_in_place(dtype: torch.dtype) -> None:
    tensor = torch.ones(3, 5, dtype=dtype)
    memory = memory_of(tensor)
    assert bytes(memory) == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert (memory.format, memory.ndim, memory.readonly) == ("B", 1, False)
    memory[:] = bytes(len(memory))
    assert not tensor.any()


def test_a_tensor_with_a_gradient_or_without_elements_has_bytes() -> None:
    assert bytes(memory_of(torch.ones(1, requires_grad=True))) == b"\0\0\x80?"
    assert bytes(memory_of(torch.ones(0, 7))) == b""


def test_a_tensor_lives_as_long_as_a_part_of_its_memory() -> None:
    tensor = torch.ones(1000)
    is_alive, part = weakref.ref(tensor), memory_of(tensor)[8:16]
    del tensor
    gc.collect()
    assert is_alive() is not None and bytes(part) == b"\0\0\x80?" * 2
    del part
    gc.collect()
    assert is_alive() is None


@pytest.mark.parametrize("size", [0, 1, 4096])
def test_a_room_is_a_tensor_of_its_bytes_which_keeps_it(size: int) -> None:
    room = host_room(size)
    tensor = tensor_of(room)
    room[:] = bytes(range(256)) * (size // 256) if size > 1 else b"\7" * size
    expected = bytes(room)
    del room
    gc.collect()
    assert tensor.numpy().tobytes() == expected and tensor.dtype is torch.uint8


def test_a_memory_leads_back_to_its_tensor_and_to_no_other_storage() -> None:
    tensor = torch.ones(5, dtype=torch.uint8)
    assert tensor_of(memory_of(tensor)) is tensor
    assert tensor_of(memory_of(tensor)[1:3]) is tensor
