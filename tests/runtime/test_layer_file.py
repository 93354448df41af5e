"""Files of layers: every bit and stride comes back; damaged bytes and strides are refused; safetensors reads it."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load
from torch import Tensor, nn

from engine.core.errors import StorageError
from engine.core.manifest import StoredLayer, Strides, _tensors_in
from engine.runtime.checkpoint.loader import LayerImage, tensors_of
from tests.looped import looped
from tests.runtime.test_state_hash import DTYPES

BASE = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)


def written(tensors: dict[str, Tensor]) -> tuple[bytes, tuple[tuple[str, tuple[int, ...]], ...]]:
    image = LayerImage(tensors.items())
    image.fill(reversed(tensors.items()))
    return bytes(image.data), image.strides


def unhashed(data: bytes, strides: Strides) -> StoredLayer:
    return StoredLayer(_tensors_in(data), dict(strides))


def from_bytes(data: bytes, strides: Strides) -> dict[str, Tensor]:
    return tensors_of(unhashed(data, strides))


def same(one: Tensor, other: Tensor) -> bool:
    bits = [each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(*bits)


STATE = {
    **{f"optimizer/{dtype}": torch.arange(5).to(dtype) for dtype in DTYPES},
    "weight/transposed": BASE[0].t(),
    "weight/sliced": torch.arange(40.0).reshape(4, 10)[:, 1:6:2],
    "weight/one": torch.arange(3.0).as_strided((1, 3), (7, 1)),
    "weight/channels_last": torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "buffer/0/expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
    "buffer/0/number": torch.tensor(float("nan")),
    "buffer/0/empty": torch.empty(0, 4),
    "buffer/0/empty.of.ints": torch.empty(3, 0, dtype=torch.int64),
    "weight/parameter": nn.Parameter(BASE.clone()),
}


def test_every_bit_and_every_stride_comes_back() -> None:
    data, strides = written(STATE)
    found = from_bytes(data, strides)
    assert found.keys() == STATE.keys()
    for name, tensor in STATE.items():
        assert same(found[name], tensor), name
        assert found[name].stride() == tensor.stride(), name
        assert not found[name].requires_grad
    assert {name for name, _ in strides} == {
        *("weight/transposed", "weight/sliced", "weight/one", "weight/channels_last", "buffer/0/expanded")
    }


def test_safetensors_reads_it_and_would_write_tensors_in_the_same_order() -> None:
    data, _ = written(STATE)
    found = load(data)
    assert all(same(found[name], tensor) for name, tensor in STATE.items())
    assert all(each.data_ptr() % each.itemsize == 0 for each in found.values() if each.numel())
    assert (8 + int.from_bytes(data[:8], "little")) % 8 == 0


def test_a_file_without_tensors_is_a_file() -> None:
    data, strides = written({})
    assert from_bytes(data, strides) == {}


def test_the_header_has_the_given_order_and_the_tensors_that_of_safetensors() -> None:
    one, other = (written(each)[0] for each in (STATE, dict(reversed(STATE.items()))))
    begin = 8 + int.from_bytes(one[:8], "little")
    assert list(json.loads(one[8:begin])) == list(STATE) == list(reversed(json.loads(other[8:begin])))
    assert one[begin:] == other[begin:]


def test_an_image_is_filled_again_with_the_tensors_of_another_step() -> None:
    image = LayerImage(STATE.items())
    image.fill(STATE.items())
    later = {name: torch.zeros(200, dtype=t.dtype).as_strided(t.shape, t.stride()) for name, t in STATE.items()}
    assert image.takes(later.items())
    image.fill(later.items())
    assert bytes(image.data) == written(later)[0]


@pytest.mark.parametrize(
    "tensor", [BASE.double(), BASE[:1], BASE.transpose(1, 2).contiguous().transpose(1, 2), BASE.reshape(3, 2, 4)]
)
def test_an_image_takes_tensors_of_its_own_form_only(tensor: Tensor) -> None:
    image = LayerImage([("weight/a", BASE)])
    assert image.takes([("weight/a", BASE + 1)])
    assert not image.takes([("weight/a", tensor)])
    assert not image.takes([("weight/b", BASE)])
    assert not image.takes([])


@pytest.mark.parametrize("at", [0, 3, 8, 20, -1])
def test_bytes_that_are_cut_off_are_refused(at: int) -> None:
    data, strides = written({"weight/a": BASE})
    with pytest.raises(ValueError, match="not the file of a layer"):
        from_bytes(data[:at], strides)


@looped("stride", [(1,), (-4, 1), (1, 2, 3), (2**70, 1), (2**62, 2**62), ("a", 1)])
def test_strides_that_do_not_fit_are_refused(stride: tuple[int, ...]) -> None:
    data, _ = written({"weight/a": BASE[0]})
    with pytest.raises(StorageError, match="no tensor can have the strides"):
        from_bytes(data, (("weight/a", stride),))


def test_a_header_that_reaches_beyond_its_file_is_refused() -> None:
    text = json.dumps({"weight/a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}).encode()
    with pytest.raises(ValueError, match="not the file of a layer"):
        from_bytes(len(text).to_bytes(8, "little") + text + bytes(35), ())


def test_a_dtype_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(StorageError, match=r"buffer/0/a: its dtype is torch\.complex128"):
        LayerImage([("buffer/0/a", torch.zeros(2, dtype=torch.complex128))])
