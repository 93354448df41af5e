"""The memory of GPUs: counted bytes on the double beside the prediction, and the records of steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from engine.core.history.run_records import MemoryRecord
from engine.core.job.job import Job
from engine.core.ownership import Grid, Ownership
from engine.files.events_file import read_history
from engine.models.layers import LayerSpec, Model
from engine.models.losses import default_loss
from engine.report.load import RunTables, load
from engine.runtime.agent import session
from engine.runtime.agent.session import run_session
from engine.runtime.device.action_clock import BLOCK, LiveBytes, in_blocks
from engine.runtime.device.device import HOST
from engine.runtime.process.thread_server import ThreadServer
from engine.runtime.stage.memory_watch import MemoryWatch, microbatch_bytes
from engine.runtime.stage.stage import Stage
from engine.runtime.stage.state_hash import hash_tensors
from tests.doubles.fake_gpu import fake_gpu
from tests.runtime.thread_runs import with_store_double

PATIENT: dict[str, Any] = {"hang_after": "60s", "silent_after": "60s", "check_pure": False, "checkpoint_every": "0"}
GPT = Job(
    **PATIENT, stages=2, microbatches=3, microbatch_size=2, steps=2, validate_every=0, warmup_steps=0,
    device="cuda", share_gpu=True, model_args={"width": 64, "depth": 2, "heads": 2},
)  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "none": {"redundancy": "none"},
    "eager": {"redundancy": "eager"},
    "on the host": {"retain": "cpu"},
    "bfloat16": {"dtype": "bfloat16"},
    "streamed": {"log_every": 1},
    "gpipe": {"schedule": "gpipe"},
    "zb1p": {"schedule": "zb1p"},
    "recomputed": {"activation_checkpoint": 1},
    "two pipelines": {"pipelines": 2, "redundancy": "reroute"},
    "sgd": {"optimizer": "sgd"},
    "adam": {"optimizer": "adam"},
    "tied": {"model_args": {"width": 64, "depth": 2, "heads": 2, "tied": True}},
    "blocks": {"blocks": 2},
}


def held(job: Job, folder: Path, monkeypatch: pytest.MonkeyPatch) -> RunTables:
    """Runs a job on the double, and holds the bytes that it counts against the prediction, for each worker."""
    monkeypatch.setattr(session, "refuse_what_this_host_lacks", lambda job: None)
    monkeypatch.setattr("engine.core.job.memory_model.WORKSPACES", 0)  # the double has no cuBLAS
    with fake_gpu(counts_memory=True), ThreadServer() as server, with_store_double():
        ending = run_session(job, folder / "events.jsonl", folder, server=server)
    assert (ending.outcome, ending.error) == ("finished", None)
    history = read_history(folder / "events.jsonl")
    run = load(history)
    found = (run.workers["device_predicted_mib"] / run.workers["device_mib"]).tolist()
    assert len(found) == job.num_workers
    assert all(0.95 <= ratio <= 1.05 for ratio in found), found
    assert (run.memory["reserved_mib"] >= run.memory["allocated_mib"]).all()
    return run


def test_the_prediction_holds_for_gpt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its end, and during it for the first step, which has no state of optimizers before its own end."""
    run = held(GPT, tmp_path, monkeypatch)
    first, second = (
        run.memory[run.memory["step"] == step].set_index("worker")["allocated_mib"].sort_index() for step in (0, 1)
    )
    assert (first < second).all() and len(second) == 2


@pytest.mark.soak
@pytest.mark.parametrize("name", OTHERS)
def test_the_prediction_holds_for_other_jobs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held(replace(GPT, **OTHERS[name]), tmp_path, monkeypatch)


@pytest.fixture
def stage() -> Stage:
    layers = tuple(
        LayerSpec(f"{at}", "Sequential", lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))) for at in "012"
    )
    return Stage(Job(), Model(layers, default_loss), 0, 0, 2)


def test_the_bytes_of_a_microbatch_are_counted_and_leave_no_trace(stage: Stage) -> None:
    before = hash_tensors(each for layer in stage.layers.values() for each in layer.state_dict().items())
    position = torch.get_rng_state()
    rows = in_blocks(16 * 8 * 4)
    found = microbatch_bytes(stage, (torch.ones(16, 8),), None)
    # The inputs; of each layer the product and the output, two statistics, and three buffers as they were before.
    assert found.residual == rows + 2 * (2 * rows + 2 * in_blocks(8 * 4) + 3 * BLOCK)
    assert found.largest == 8 * 8 * 4
    assert found.backward >= 2 * rows
    assert before == hash_tensors(each for layer in stage.layers.values() for each in layer.state_dict().items())
    assert torch.equal(position, torch.get_rng_state())
    assert (stage.residuals, stage.losses, stage.counted, stage.added, stage.peak_stash) == ({}, {}, 0, 0, 0)
    assert all(each.grad is None for each in stage.trained())


def test_memory_counts_once_until_nobody_holds_it() -> None:
    with LiveBytes() as live:
        kept = torch.ones(1000)
        view = kept[:10].view(5, 2)
        del kept
        torch.ones(10_000).add_(1).sum()
        assert live.begin() == in_blocks(4000) == 4096
        assert live.most == 4096
        view.clone()
        assert live.most == 4096 + 512
        del view
        assert live.begin() == 0


def test_a_step_is_told_if_its_memory_is_another_one_than_before() -> None:
    peaks = iter([(1000, 2000), (1005, 2000), (1011, 2000), (1011, 3000)])

    class Gpu:
        def memory_peak(self) -> tuple[int, int]:
            return next(peaks)

    told: list[MemoryRecord] = []
    watch = MemoryWatch(0, cast(Any, SimpleNamespace(device=Gpu())), (), told.append)
    for step in range(4):
        watch.step_ends(step, Ownership(Grid(1, 1), (0,)), lambda: ())
    assert [(each.step, each.allocated, each.reserved) for each in told] == [
        (0, 1000, 2000),
        (2, 1011, 2000),
        (3, 1011, 3000),
    ]
    assert not any(each.predicted for each in told), "no stage was tried"


def test_nothing_is_told_about_the_memory_of_the_host() -> None:
    replicas = SimpleNamespace(device=HOST)
    watch = MemoryWatch(0, cast(Any, replicas), (), lambda record: pytest.fail("told"))
    watch.begin(cast(Any, None))
    watch.step_ends(0, Ownership(Grid(1, 1), (0,)), lambda: pytest.fail("asked for a program"))
