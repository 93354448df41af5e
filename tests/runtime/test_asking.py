"""The memory for workers is that of one host, and not that of a GPU."""

from __future__ import annotations

from typing import Literal

import pytest

from engine.core.job.job import Job
from engine.core.protocol.state import Options, begin
from engine.runtime.agent.newcomers import _memory_of

STATE = begin(Options(stages=2, redundant=True), (0, 1), ((1,), (0,)), 9, 0)


@pytest.mark.parametrize(
    ("device", "nodes", "is_known"),
    [
        ("cpu", {}, True),
        ("cpu", {0: "one", 1: "one"}, True),
        ("cpu", {0: "one", 1: "two"}, False),
        ("cuda", {0: "one", 1: "one"}, False),
    ],
)
def test_free_memory_is_known_of_one_host_without_gpus(
    device: Literal["cpu", "cuda"], nodes: dict[int, str], is_known: bool
) -> None:
    found = _memory_of(Job(device=device), STATE._replace(nodes=nodes))()
    assert (found is not None and found > 0) is is_known
