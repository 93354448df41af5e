"""Random streams that are not replicated: their positions, to detect and undo draws."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from engine.runtime.device.device import HOST, Device

PYTHON, NUMPY, TORCH = "Python's random", "numpy's generator", "torch's default generator"
OF_DEVICE = "torch's generator of the device"
_NAMES = (TORCH, OF_DEVICE)  # in the order of `Device.generators`


def positions(owned: Mapping[str, object] = {}, device: Device = HOST) -> dict[str, object]:
    """Returns the positions of the process-wide streams (numpy's only if numpy is loaded) and of `owned` generators."""
    streams: dict[str, object] = {PYTHON: random.getstate()}
    streams |= {name: _position(each) for name, each in zip(_NAMES, device.generators(), strict=False)}
    if numpy_random := sys.modules.get("numpy.random"):
        streams[NUMPY] = _of_numpy(numpy_random)
    return streams | {name: _position(generator) for name, generator in owned.items()}


def own_generators(layer: nn.Module) -> dict[str, object]:
    """Returns the generators that the modules of a layer have as attributes, by their names in messages."""
    return {
        f"the generator {path}.{name}".replace(" .", " "): value
        for path, module in layer.named_modules()
        for name, value in vars(module).items()
        if _position(value) is not None
    }


def _position(generator: object) -> object:
    """Returns the position of a generator; None for any other object."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if type(generator).__module__.startswith("numpy.random"):
        if hasattr(generator, "bit_generator"):
            return repr(generator.bit_generator.state)
        if hasattr(generator, "get_state"):  # numpy's legacy RandomState
            return _of_numpy(generator)
    return None


def _of_numpy(holder: Any) -> object:
    name, keys, *others = holder.get_state()
    return (name, keys.tobytes(), *others)


def displace(seed: int, device: Device = HOST) -> None:
    """Moves all process-wide streams: a result that depends on one of them then changes with `seed`."""
    random.seed(seed)
    device.seed(seed)
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed(seed)


@contextlib.contextmanager
def set_back(device: Device = HOST) -> Iterator[None]:
    """Restores the positions of all process-wide streams at the end of the block."""
    of_python = random.getstate()
    of_torch = [(each, each.get_state()) for each in device.generators()]
    numpy_random = sys.modules.get("numpy.random")
    of_numpy = numpy_random.get_state() if numpy_random else None
    try:
        yield
    finally:
        random.setstate(of_python)
        for generator, state in of_torch:
            generator.set_state(state)
        if numpy_random := sys.modules.get("numpy.random"):
            numpy_random.seed() if of_numpy is None else numpy_random.set_state(of_numpy)
