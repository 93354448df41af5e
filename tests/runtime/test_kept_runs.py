"""Checkpoints of runs in one process: whole, with the hashes of the trajectory, after deaths too; the newest stay."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from engine.core.checkpoint_rules import KeptMessage
from engine.core.history.run_records import UnkeptRecord
from engine.core.job.job import Job
from engine.core.manifest import LayerHash
from engine.files.checkpoint_folder import CheckpointFolder, checkpoints_at
from engine.runtime.agent.checkpoints import Checkpoints
from engine.runtime.agent.keeper import Keeper, start_thread
from engine.runtime.agent.run_state import Ending, RunState
from tests.kills import parse_kills
from tests.runtime.small_jobs import NORMED as WITH_BUFFERS
from tests.runtime.thread_runs import run_in_threads

SMALL: dict[str, Any] = {"model": "mlp", "stages": 2, "microbatches": 2, "validate_every": 0}
NORMED: dict[str, Any] = WITH_BUFFERS


def kept_steps(ending: Ending, folder: CheckpointFolder) -> list[int]:
    """Returns the steps of the checkpoints, each of which has every byte and the hashes of the trajectory."""
    assert (ending.outcome, ending.error) == ("finished", None)
    steps = []
    for name in folder.names():
        manifest = folder.verify(name)
        rows = [row for row in ending.view.run_state.rows if row.step == name.step]
        assert manifest.layers == tuple(LayerHash(row.layer, row.state, row.buffers) for row in rows)
        assert manifest.loss == rows[0].loss
        steps.append(name.step)
    return steps


def test_a_run_keeps_its_last_weights(tmp_path: Path) -> None:
    job = Job(**SMALL, steps=3, audit=0, checkpoints=str(tmp_path / "kept"))
    ending = run_in_threads(job)
    assert kept_steps(ending, checkpoints_at(job.checkpoints)) == [2]
    assert (ending.view.run_state.kept, ending.view.run_state.not_kept) == (2, "")


def test_every_k_steps_and_the_last_are_kept_though_workers_die_and_the_newest_stay(tmp_path: Path) -> None:
    job = Job(**NORMED, stages=3, steps=7, validate_every=0, checkpoint_every="2", keep=2, checkpoints=str(tmp_path))
    ending = run_in_threads(job, parse_kills(["3:1", "6:0"], job))
    assert kept_steps(ending, checkpoints_at(job.checkpoints)) == [5, 6]


def test_the_best_one_stays_though_workers_die(tmp_path: Path) -> None:
    """The largest loss of a model that learns is that of its first validation, which is old at the end."""
    of_best: dict[str, Any] = {"validate_every": 2, "validation_microbatches": 1, "best": "loss:max", "keep": 1}
    job = Job(**NORMED, stages=3, steps=7, checkpoint_every="end", checkpoints=str(tmp_path), **of_best)
    ending = run_in_threads(job, parse_kills(["2:1", "5:0"], job))
    assert ending.view.run_state.best() == 1
    assert kept_steps(ending, checkpoints_at(job.checkpoints)) == [1, 6]


def test_buffers_of_two_pipelines_are_kept_for_each(tmp_path: Path) -> None:
    job = Job(**NORMED, stages=2, pipelines=2, steps=2, validate_every=0, checkpoints=str(tmp_path))
    ending = run_in_threads(job)
    folder = checkpoints_at(job.checkpoints)
    assert kept_steps(ending, folder) == [1]
    manifest = folder.manifest(folder.names()[0])
    kept = folder.layer(manifest, 1).tensors
    assert {"buffer/0/norm.running_mean", "buffer/1/norm.running_mean"} < kept.keys()


def test_a_run_that_keeps_nothing_writes_nothing(tmp_path: Path) -> None:
    job = Job(**SMALL, steps=2, checkpoint_every="0", checkpoints=str(tmp_path / "kept"))
    assert run_in_threads(job).outcome == "finished"
    assert not (tmp_path / "kept").exists()


def test_a_place_that_cannot_be_written_costs_the_checkpoint_only(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("no folder")
    job = Job(**SMALL, steps=2, checkpoints=str(tmp_path / "kept"))
    ending = run_in_threads(job)
    assert ending.outcome == "finished"
    (note,) = ending.view.run_state.notes
    assert note.startswith("step 1 is not kept as a checkpoint: cannot write ")
    assert (ending.view.run_state.kept, note.endswith(ending.view.run_state.not_kept)) == (None, True)


def test_a_part_without_a_manifest_is_removed_at_the_end(tmp_path: Path) -> None:
    place = str(tmp_path / "checkpoints")
    part = checkpoints_at(place).write_part(1, 0, [b"of a worker that died"])
    job, records = Job(**SMALL, steps=2), list[Any]()
    recorder: Any = SimpleNamespace(write=records.append)
    with Keeper(start_thread, job, str(tmp_path)) as keeper:
        checkpoints = Checkpoints(keeper, RunState(job), recorder)
        checkpoints.await_parts(1, 0)
        checkpoints.kept(KeptMessage(1, part, 0, 0, 0))
        checkpoints.close()
    assert [(type(each), each.step) for each in records] == [(UnkeptRecord, 1)]
    assert not list(Path(place).rglob("*.safetensors"))
