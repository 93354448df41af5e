"""A model whose module registers a handler for overlapped pairs; it reverses them, which the events show."""

from __future__ import annotations

from torch import nn

from engine.runtime.worker.executor import Call, register

FEATURES = 32  # of the synthetic vectors


def backward_first(forward: Call, backward: Call) -> None:
    """Runs a pair in the other order."""
    backward()
    forward()


register("OVERLAP_F_B", backward_first)


def line() -> list[nn.Module]:
    """Returns four layers with dropout, so that a wrong order of random numbers shows."""
    return [nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Dropout(0.2)) for _ in range(3)] + [nn.Linear(FEATURES, 1)]
