"""What crosses a border between stages, as a specification that can be sent."""

from __future__ import annotations

import json

import torch

from engine.runtime.device.device import HOST
from engine.runtime.transport.transport import TensorSpec, border_of, difference
from tests.looped import looped


@looped("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8])
@looped("shape", [(), (0,), (4, 0, 2), (3, 5)])
def test_a_spec_survives_a_message(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    spec = TensorSpec(shape, dtype, dtype.is_floating_point)
    assert TensorSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    assert TensorSpec.of(spec.zeros(HOST)) == spec
    assert (spec.empty(HOST).shape, spec.empty(HOST).dtype) == (shape, dtype)
    assert not spec.empty(HOST).requires_grad
    assert spec.as_gradient() == TensorSpec(shape, dtype, False)


def test_what_was_learned_passes() -> None:
    tensors = (torch.zeros(2, 3, requires_grad=True), torch.zeros(4, dtype=torch.int64))
    assert difference(border_of(tensors), tensors) == ""


def test_every_tensor_that_differs_is_named() -> None:
    learned = border_of((torch.zeros(2), torch.zeros(3), torch.zeros(4)))
    assert difference(learned, (torch.zeros(9), torch.zeros(3), torch.zeros(4).int())) == (
        "[9] torch.float32 instead of [2] torch.float32 and [4] torch.int32 instead of [4] torch.float32"
    )


def test_a_gradient_that_alone_differs_is_named() -> None:
    assert difference(border_of((torch.zeros(2, requires_grad=True),)), (torch.zeros(2),)) == (
        "[2] torch.float32 without a gradient instead of [2] torch.float32 with a gradient"
    )


def test_another_number_of_tensors_is_named() -> None:
    assert difference(border_of((torch.zeros(2), torch.zeros(3))), (torch.zeros(2),)) == "1 tensors instead of 2"
