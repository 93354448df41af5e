"""The built-in models learn, so the pipeline is of use beyond equal bits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import psutil
import pytest

from engine.core.job.job import Job
from engine.models.data_sources import open_data
from engine.models.datasets import TokenData
from engine.runtime.agent.run_state import Ending
from engine.runtime.process.fork_client import ForkServer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]  # some 15 s of the processor each


def unigram_entropy(data: TokenData) -> float:
    """Returns the entropy of single bytes of the validation text, in nats: the loss without any context."""
    counts = Counter(data.validation_tokens.tolist())
    return -sum(count / counts.total() * math.log(count / counts.total()) for count in counts.values())


@pytest.mark.soak
def test_the_default_gpt_learns_more_than_how_often_each_byte_occurs(train: Callable[..., Ending]) -> None:
    job = Job(steps=40, validate_every=40, validation_microbatches=16)
    data = open_data(job)
    assert isinstance(data, TokenData)
    entropy = unigram_entropy(data)
    assert 3.0 < entropy < 3.3
    (found,) = train(job).view.run_state.validations[39]
    assert found.loss < entropy - 0.3


def work_s(server: ForkServer) -> float:
    """Returns the processor seconds of the workers of past runs; other processes do not count."""
    times = psutil.Process(server.pid).cpu_times()
    return float(times.children_user + times.children_system)


@pytest.mark.soak
def test_resnet18_reads_digits(train: Callable[..., Ending], server: ForkServer) -> None:
    job = Job(
        model="resnet18", stages=2, microbatches=2, microbatch_size=30, steps=36, lr=1e-3, warmup_steps=3,
        audit=0, validate_every=36, validation_microbatches=12,
    )  # fmt: skip
    before_s = work_s(server)
    (found,) = train(job).view.run_state.validations[35]
    assert found.samples == 360  # all of them
    assert found.metrics["accuracy"] >= 0.9
    assert 0 < work_s(server) - before_s < 120
