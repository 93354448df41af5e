"""Residuals on the host: the bytes that stay on the device, and the bits, of runs whose workers are threads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.core.history.run_records import HostLinkRecord, TensorsRecord
from engine.core.job.job import Job
from engine.core.job.tensor_model import TensorBytes
from engine.files.events_file import read_history
from engine.runtime.agent.session import run_session
from engine.runtime.process.thread_server import ThreadServer
from engine.runtime.stage import offload
from tests.runtime.thread_runs import with_store_double

JOB = Job(
    model="gpt",
    stages=6,
    microbatches=12,
    microbatch_size=2,
    steps=2,
    validate_every=0,
    redundancy="none",
    checkpoint_every="0",
    model_args={"width": 64, "heads": 2, "depth": 12},
)


TOGETHER: dict[str, dict[str, Any]] = {
    "blocks": {"stages": 3, "blocks": 2, "elastic": True, "redundancy": "lazy"},
    "recomputed": {"schedule": "gpipe", "stages": 2, "activation_checkpoint": 2},
    "streamed by shadows that compute": {"schedule": "gpipe", "stages": 3, "redundancy": "eager", "log_every": 2},
    "two pipelines": {"schedule": "zb1p", "stages": 4, "pipelines": 2},
    "slices": {"schedule": "zb1p", "stages": 3, "slices": 2},
}


def run(job: Job, folder: Path) -> tuple[list[list[str]], dict[int, TensorBytes], list[int]]:
    """Returns the trajectory, the tensors of each worker at its peak, and the most microbatches that each stashes."""
    folder.mkdir()
    with ThreadServer() as server, with_store_double():
        ending = run_session(job, folder / "events.jsonl", folder, server=server)
    assert (ending.outcome, ending.error) == ("finished", None)
    most: dict[int, TensorBytes] = {}
    for record in read_history(folder / "events.jsonl").of(TensorsRecord):
        rows = [TensorBytes(*of) for _, _, *of in record.peak]
        most[record.worker] = max(rows, key=lambda each: each.offloaded)
    return [list(row.texts()) for row in ending.view.run_state.rows], most, [w.peak_stash for w in ending.view.workers]


def test_a_worker_keeps_half_of_the_stash_on_its_device_and_all_bits(tmp_path: Path) -> None:
    rows, most, stashed = run(JOB, tmp_path / "none")
    offloaded_rows, offloaded, least = run(replace(JOB, offload="host"), tmp_path / "host")
    assert offloaded_rows == rows
    assert (stashed[0], least[0]) == (6, 3)
    assert offloaded[0].stash <= 0.6 * most[0].stash and offloaded[0].offloaded > 0
    links = {each.worker: each for each in read_history(tmp_path / "host" / "events.jsonl").of(HostLinkRecord)}
    copied = 2 * 11  # the first worker sends eleven of twelve residuals there and back
    assert links[0].step == 1
    assert links[0].bytes % copied == 0 and links[0].busy_ns > 0 < links[0].copy_time


def stashed_bytes(job: Job, folder: Path) -> tuple[list[list[str]], int]:
    """Returns the trajectory, and the most bytes that a worker has on its device for backwards to come."""
    folder.mkdir()
    with ThreadServer() as server, with_store_double():
        ending = run_session(job, folder / "events.jsonl", folder, server=server)
    assert (ending.outcome, ending.error) == ("finished", None)
    peaks = [record.peak for record in read_history(folder / "events.jsonl").of(TensorsRecord)]
    most = max(sum(TensorBytes(*sizes).stash for _, _, *sizes in peak) for peak in peaks)
    return [list(row.texts()) for row in ending.view.run_state.rows], most


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("workers", "parts", "offloaded"),
    [
        # Of P microbatches P / 2 + 1 and P / 3 + 4 / 3, and of these half where no part for the weights keeps more.
        (4, {"v-half": 0.77, "v-min": 0.51}, {"v-half": 0.52, "v-min": 0.77}),
        pytest.param(24, {"v-half": 0.55, "v-min": 0.40}, {"v-half": 0.5, "v-min": 0.5}, marks=pytest.mark.soak),
    ],
)
def test_schedules_for_little_memory_stash_their_part_of_the_bytes_of_1f1b(
    workers: int, parts: dict[str, float], offloaded: dict[str, float], tmp_path: Path
) -> None:
    """Two halves keep two inputs where the whole keeps one, an eightieth more here; outputs of stages stay too."""
    job = Job(
        model="tests.runtime.small_jobs:even",
        model_args={"depth": 2 * workers},
        data="synthetic",
        stages=workers,
        microbatches=2 * workers,
        microbatch_size=64,
        steps=1,
        validate_every=0,
        redundancy="none",
        checkpoint_every="0",
    )
    rows, whole = stashed_bytes(job, tmp_path / "1f1b")
    for name, part in parts.items():
        little = replace(job, stages=2 * workers, stages_per_worker=2, schedule=name)
        its_rows, stash = stashed_bytes(little, tmp_path / name)
        hosted = replace(little, offload="host", offload_time=0.1)
        offloaded_rows, stays = stashed_bytes(hosted, tmp_path / f"{name} on the host")
        print(
            f"{name}: {stash / whole:.3f} of 1f1b's {whole:,} bytes, {stays / stash:.3f} of it with copies to the host"
        )
        assert rows == its_rows == offloaded_rows
        assert stash <= part * whole
        assert 0 < stays <= offloaded[name] * stash


def test_what_a_backward_for_the_input_leaves_is_on_the_host_until_that_for_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ZB1P all that the last worker stashes waits for backwards for the weights; elsewhere, some leaves twice."""
    job = replace(JOB, schedule="zb1p", stages=4, model_args={"width": 64, "heads": 2, "depth": 6})
    rows, most, stashed = run(job, tmp_path / "none")
    let_go, freed = offload._Offloaded.let_go, list[float]()

    def noted(leaves: offload._Offloaded) -> int:
        num_bytes = let_go(leaves)
        freed.append(num_bytes / sum(each for _, each in leaves._watched))
        return num_bytes

    monkeypatch.setattr(offload._Offloaded, "let_go", noted)
    offloaded_rows, offloaded, least = run(replace(job, offload="host", offload_time=0.02), tmp_path / "host")
    assert offloaded_rows == rows
    assert (stashed, least) == ([4] * 4, [2] * 4)
    assert min(freed) > 0.99, "what leaves frees its memory, also the second time"
    for worker, sizes in offloaded.items():
        assert sizes.offloaded > 0 and sizes.stash <= 0.6 * most[worker].stash, worker


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] * (name not in ("recomputed", "slices"))) for name in TOGETHER]
)
def test_residuals_on_the_host_beside_other_options(name: str, tmp_path: Path) -> None:
    job = replace(JOB, **TOGETHER[name] | {"microbatches": 6, "model_args": {"width": 16, "heads": 2, "depth": 4}})
    rows, _, _ = run(job, tmp_path / "none")
    offloaded_rows, offloaded, _ = run(replace(job, offload="host", offload_time=0.1), tmp_path / "host")
    assert offloaded_rows == rows
    assert any(each.offloaded > 0 for each in offloaded.values())
