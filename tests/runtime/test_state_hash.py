"""Hashes of state: every bit, name, dtype and shape counts, for every dtype."""

from __future__ import annotations

import hashlib
import itertools
import struct

import torch
from torch import Tensor, nn

from engine.runtime.stage.state_hash import hash_tensors
from tests.looped import looped

BASE = torch.arange(12, dtype=torch.float32).reshape(3, 4)
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64),
)


def test_the_hash_is_of_names_dtypes_shapes_and_bytes() -> None:
    text = (
        b"weight torch.float32 [2]\n" + struct.pack("<ff", 1.5, -0.0) + b"steps torch.int64 []\n" + struct.pack("<q", 7)
    )
    tensors = [("weight", torch.tensor([1.5, -0.0])), ("steps", torch.tensor(7))]
    assert hash_tensors(tensors) == hashlib.sha256(text).hexdigest()


def test_no_tensors_have_the_hash_of_nothing() -> None:
    assert hash_tensors([]) == hashlib.sha256(b"").hexdigest()


@looped("dtype", DTYPES)
def test_every_bit_counts(dtype: torch.dtype) -> None:
    size = torch.empty(0, dtype=dtype).element_size()
    tensor = torch.zeros(3, dtype=dtype)
    hashes = {hash_tensors([("x", tensor)])}
    bits = 1 if dtype is torch.bool else 8 * size
    for element, bit in itertools.product(range(3), range(bits)):
        changed = tensor.clone()
        changed.view(torch.uint8).view(-1)[element * size + bit // 8] ^= 1 << bit % 8
        hashes.add(hash_tensors([("x", changed)]))
    assert len(hashes) == 1 + 3 * bits


DIFFERENT: dict[str, list[tuple[str, Tensor]]] = {
    "base": [("a", BASE)],
    "name": [("b", BASE)],
    "shape": [("a", BASE.reshape(4, 3))],
    "flat": [("a", BASE.reshape(12))],
    "transposed": [("a", BASE.t())],
    "dtype": [("a", BASE.double())],
    "bits reread": [("a", BASE.view(torch.int32))],
    "sign of zero": [("a", torch.where(BASE == 0, -0.0, BASE))],
    "twice": [("a", BASE), ("a", BASE)],
    "in two": [("a", BASE[:2]), ("a", BASE[2:])],
    "empty": [("a", torch.empty(0))],
    "empty of another shape": [("a", torch.empty(0, 4))],
    "empty of another dtype": [("a", torch.empty(0, dtype=torch.int32))],
    "nothing": [],
    "number": [("a", torch.tensor(1.0))],
    "list of one": [("a", torch.tensor([1.0]))],
    "order": [("a", BASE), ("b", BASE[:1])],
    "other order": [("b", BASE[:1]), ("a", BASE)],
}


def test_whatever_differs_has_another_hash() -> None:
    hashes = {what: hash_tensors(tensors) for what, tensors in DIFFERENT.items()}
    assert len(set(hashes.values())) == len(DIFFERENT), hashes


def test_how_a_tensor_lies_in_memory_does_not_count() -> None:
    strided = torch.zeros(3, 8)[:, ::2].copy_(BASE)
    assert not strided.is_contiguous()
    parameter = nn.Parameter(BASE.clone())
    expected = hash_tensors([("a", BASE)])
    for tensor in (strided, BASE.t().contiguous().t(), parameter, BASE.clone(), BASE.expand(1, 3, 4)[0]):
        assert hash_tensors([("a", tensor)]) == expected


def test_a_nan_is_its_bits() -> None:
    quiet, other = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert hash_tensors([("a", quiet)]) == hash_tensors([("a", quiet.clone())])
    assert hash_tensors([("a", quiet)]) != hash_tensors([("a", other)])
