"""The stash of schedules for little memory beside that of 1F1B, in bytes of the tensors that real workers held."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.core.history.run_records import TensorsRecord
from engine.core.job.job import Job
from engine.core.job.tensor_model import TensorBytes
from engine.files.events_file import read_history
from engine.runtime.agent.session import run_session
from engine.runtime.process.thread_server import ThreadServer
from tests.runtime.thread_runs import with_store_double

JOB = Job(model="gpt", microbatch_size=2, steps=1, validate_every=0, redundancy="none", checkpoint_every="0")


def stash_of(schedule: str, workers: int, folder: Path) -> int:
    """Returns the bytes of the stash of the worker with the most, of a job whose layers are all alike."""
    v = 1 if schedule == "1f1b" else 2
    stages, blocks = v * workers, 4 // v  # of each stage, beside the embedding and the head
    job = replace(
        JOB,
        stages=stages,
        stages_per_worker=v,
        schedule=schedule,
        microbatches=2 * workers,
        model_args={"width": 64, "heads": 2, "depth": stages * blocks},
        partition=",".join(str(1 + stage * blocks) for stage in range(1, stages)),
    )
    folder.mkdir()
    with ThreadServer() as server, with_store_double():
        ending = run_session(job, folder / "events.jsonl", folder, server=server)
    assert (ending.outcome, ending.error) == ("finished", None)
    sizes: dict[int, int] = {}
    for record in read_history(folder / "events.jsonl").of(TensorsRecord):
        stash = sum(TensorBytes(*of).stash for _, _, *of in record.peak)
        sizes[record.worker] = max(stash, sizes.get(record.worker, 0))
    assert len(sizes) == workers
    return max(sizes.values())


@pytest.mark.parametrize(
    ("workers", "parts"),
    [
        (4, {"v-min": 4 / 8, "v-half": 6 / 8}),
        pytest.param(16, {"v-min": 6 / 16, "v-half": 18 / 32}, marks=pytest.mark.soak),
    ],
)
def test_the_stash_in_bytes_is_the_part_of_1f1b_s_that_the_formula_gives(
    workers: int, parts: dict[str, float], tmp_path: Path
) -> None:
    """A little more: a half stage has an input of its own, and the first worker has the residuals of the head, too."""
    whole = stash_of("1f1b", workers, tmp_path / "1f1b")
    measured = {schedule: stash_of(schedule, workers, tmp_path / schedule) / whole for schedule in parts}
    for schedule, part in parts.items():
        assert part <= measured[schedule] <= 1.08 * part, measured
