"""What is known of missing gradients: on a device without a wait, or with one for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.runtime.device.missing_gradients import is_missing, look_at, made, marked, marked_as, none_like
from engine.runtime.stage.stage import cut_off
from tests.doubles.fake_gpu import PLACE, FakeGpu, fake_gpu
from tests.runtime.test_device import MLP, same_bits
from tests.runtime.test_unused_parameters import JOB, MODELS

CASES: dict[str, list[float]] = {
    "missing": [-0.0, -0.0],
    "zeros": [0.0, 0.0],
    "one is there": [-0.0, 1.0],
    "one zero": [-0.0, 0.0],
    "small": [-0.0, -1e-40],
    "not a number": [-0.0, float("nan")],
    "usual": [2.0, -0.0],
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    monkeypatch.setattr("engine.runtime.agent.session.refuse_what_this_host_lacks", lambda job: None)
    with fake_gpu() as gpu:
        yield gpu


def bits(tensor: Tensor) -> list[int]:
    return list(tensor.cpu().view(torch.int32).tolist())


@pytest.mark.parametrize("name", CASES)
def test_a_gradient_on_a_device_is_what_it_is_on_the_host_and_nobody_waits(gpu: FakeGpu, name: str) -> None:
    of_host = made(torch.tensor(CASES[name], device="cpu"))
    there = torch.tensor(CASES[name], device=PLACE)
    of_device = made(there)
    assert not is_missing(of_device) and not gpu.streams.waits
    assert bits(of_device) == bits(of_host)
    assert is_missing(there) == is_missing(torch.tensor(CASES[name], device="cpu")) == (name == "missing")


def test_one_look_knows_all_gradients(gpu: FakeGpu) -> None:
    found = [torch.tensor(values, device=PLACE, dtype=dtype) for values in CASES.values() for dtype in (torch.float32,)]
    found += [torch.tensor([-0.0], device=PLACE, dtype=torch.bfloat16), torch.tensor([-0.0], device=PLACE).double()]
    others = [torch.zeros(0, device=PLACE), torch.zeros(2, device=PLACE, dtype=torch.int64)]
    look_at([*found, *others])
    waits = gpu.streams.waits.copy()
    # One for all, and one for each whose first element is minus zero.
    assert sum(waits.values()) == 1 + sum(values[0] == 0 and str(values[0]) == "-0.0" for values in CASES.values()) + 2
    assert [is_missing(each) for each in found] == [name == "missing" for name in CASES] + [True, True]
    look_at(found)
    assert gpu.streams.waits == waits
    assert [is_missing(each) for each in others] == [True, False]


def test_a_mark_stays_with_the_bits(gpu: FakeGpu) -> None:
    leaf = torch.ones(2, device=PLACE, requires_grad=True)
    missing = none_like(leaf)
    (cut,) = cut_off((missing,))
    assert cut is not missing and is_missing(cut) and is_missing(marked_as(missing.clone(), cut))
    assert not is_missing(marked(torch.full((2,), -0.0, device=PLACE), False)), "a mark saves the look"
    assert not gpu.streams.waits
    assert is_missing(missing + missing) and gpu.streams.waits, "a sum is another tensor"


@pytest.mark.parametrize("fields", [{}, pytest.param({"pipelines": 2}, marks=pytest.mark.soak)], ids=["one", "two"])
def test_what_has_no_gradient_has_the_bits_of_the_host(gpu: FakeGpu, fields: dict[str, Any]) -> None:
    same_bits(gpu, {**JOB, "model": f"{MODELS}:routed", "steps": 3, **fields})


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.soak)])
def test_narrow_layers_have_the_bits_of_the_host(gpu: FakeGpu, dtype: str) -> None:
    same_bits(gpu, {**MLP, "dtype": dtype, "steps": 2})


@pytest.mark.soak
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_gpts_have_the_bits_of_the_host(gpu: FakeGpu, dtype: str) -> None:
    """The first scale of the loss is so large that the first steps are skipped."""
    gpt: dict[str, Any] = {
        "model": "gpt",
        "model_args": {"width": 8, "depth": 2, "heads": 1, "tied": True},
        "log_every": 1,
    }
    same_bits(gpu, {**MLP, **gpt, "dtype": dtype, "steps": 4, "scaler_args": {"init_scale": 2.0**40}})
