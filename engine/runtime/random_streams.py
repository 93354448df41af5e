"""The process-wide streams of random numbers: where each of them stands, so that a draw shows and can be undone."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator

import torch

PYTHON, NUMPY, TORCH = "Python's random", "numpy's generator", "torch's default generator"


def positions() -> dict[str, object]:
    """Returns where each stream stands; numpy's only once somebody has loaded it."""
    found: dict[str, object] = {PYTHON: random.getstate(), TORCH: torch.default_generator.get_state().numpy().tobytes()}
    if numpy_random := sys.modules.get("numpy.random"):
        _, keys, *others = numpy_random.get_state()
        found[NUMPY] = (keys.tobytes(), *others)
    return found


@contextlib.contextmanager
def set_back() -> Iterator[None]:
    """Leaves all streams where they stood before."""
    of_python, of_torch = random.getstate(), torch.default_generator.get_state()
    numpy_random = sys.modules.get("numpy.random")
    of_numpy = numpy_random.get_state() if numpy_random else None
    try:
        yield
    finally:
        random.setstate(of_python)
        torch.default_generator.set_state(of_torch)
        if numpy_random := sys.modules.get("numpy.random"):
            numpy_random.seed() if of_numpy is None else numpy_random.set_state(of_numpy)
