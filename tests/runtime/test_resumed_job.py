"""A job that begins after a checkpoint is the rest of the job: the same bits, cut and owned in any other way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.core.checkpoint_rules import Ladder, Resumption
from engine.core.checks.trajectory import TrajectoryRow, first_difference
from engine.core.errors import ExitCode
from engine.core.job.job import Job
from engine.core.manifest import DamagedCheckpointError
from engine.files.checkpoint_folder import checkpoints_at
from engine.harness.state_lost import Restarts
from engine.runtime.agent.run_state import Ending
from tests.kills import parse_kills
from tests.runtime.kept_states import run_and_keep
from tests.runtime.thread_runs import run_in_threads

GPT = Job(model_args={"width": 16, "dropout": 0.1, "tied": True}, steps=5, microbatches=4, stages=3, check_pure=False)
MLP = Job(model="mlp", optimizer="sgd", optimizer_args={"momentum": 0.9}, steps=5, microbatches=2, stages=2, blocks=2)
RESNET = Job(
    model="resnet18", model_args={"width": 4}, steps=3, microbatches=2, stages=2, pipelines=2, check_pure=False
)
JOBS = {"gpt": GPT, "mlp": MLP, "resnet": RESNET}
OTHERS: dict[str, dict[str, Any]] = {
    "one stage": {"stages": 1, "blocks": 1, "redundancy": "none"},
    "blocks": {"stages": 2, "blocks": 2, "redundancy": "eager", "activation_checkpoint": 2},
    "two on each": {"stages": 4, "stages_per_worker": 2, "schedule": "interleaved", "blocks": 1},
    "fewer workers": {"stages": 4, "workers": 2, "schedule": "gpipe", "blocks": 1},
}


def rows_after(step: int, ending: Ending) -> list[TrajectoryRow]:
    return [row for row in ending.view.run_state.rows if row.step > step]


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, marks=pytest.mark.soak) if each == "resnet" else each for each in JOBS],
)
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    job = JOBS[request.param]
    return job, *run_and_keep(job, tmp_path_factory.mktemp(request.param))


def test_every_step_can_be_resumed_with_another_cut(kept: tuple[Job, Ending, list[Resumption]]) -> None:
    job, whole, origins = kept
    for number, origin in enumerate(origins[:-1]):
        changed = list(OTHERS.values())[(number - (job.pipelines > 1)) % len(OTHERS)]
        ending = run_in_threads(replace(job, **changed), origin=origin)
        assert (ending.outcome, ending.error) == ("finished", None)
        assert ending.view.run_state.committed == job.steps - 1
        assert len(ending.view.run_state.losses) == job.steps - 1 - origin.step
        found = ending.view.run_state.rows
        assert first_difference(found, rows_after(origin.step, whole)) is None
        assert {row.step for row in found} == set(range(origin.step + 1, job.steps))


def test_a_resumed_job_recovers_from_deaths(tmp_path: Path) -> None:
    whole, origins = run_and_keep(MLP, tmp_path)
    job = replace(MLP, stages=4, blocks=1)
    for kills in (["2:1"], ["2:0:B:1", "4:2"]):
        ending = run_in_threads(job, parse_kills(kills, job), origin=origins[1])
        assert (ending.outcome, ending.error) == ("finished", None)
        assert first_difference(ending.view.run_state.rows, rows_after(1, whole)) is None


def test_with_other_bits_a_run_goes_on_where_the_tensors_fit_and_else_tells_the_user(tmp_path: Path) -> None:
    plain = replace(MLP, optimizer_args={}, steps=3)
    _, (origin, *_) = run_and_keep(plain, tmp_path)
    origin = replace(origin, other_bits=True)
    ending = run_in_threads(replace(plain, optimizer="adamw", seed=7), origin=origin)
    assert (ending.outcome, ending.error, ending.view.run_state.committed) == ("finished", None, 2)
    for other, words in (
        (replace(plain, data_args={"outputs": 5}), "expected weight/"),
        (replace(plain, model_args={"depth": 9}), "expected 10 layers, found 4"),
    ):
        ending = run_in_threads(other, origin=origin)
        assert ending.exit_code == ExitCode.USAGE
        assert "--other-bits: expected a model that the tensors of the checkpoint fit" in str(ending.error)
        assert words in str(ending.error)
    ending = run_in_threads(replace(plain, data_args={"outputs": 5}), origin=replace(origin, other_bits=False))
    assert ending.exit_code == ExitCode.STORAGE


def test_a_checkpoint_that_a_worker_refuses_is_named_and_the_next_older_one_is_taken(tmp_path: Path) -> None:
    whole, origins = run_and_keep(MLP, tmp_path)
    folder = checkpoints_at(tmp_path)
    *_, name, _ = folder.names()
    manifest = folder.manifest(name)
    first, *others = manifest.layers
    folder.remove_parts(name.step, [name.file])  # its manifest; the parts stay, and every byte of theirs is right
    forged = folder.publish(replace(manifest, layers=(replace(first, state="0" * 64), *others)))
    with pytest.raises(DamagedCheckpointError, match="layer 0 have not the hashes of the trajectory"):
        folder.verify(forged)
    origin = replace(origins[3], file=forged.file)
    told: list[str] = []
    restarts = Restarts(Ladder(1), "", "", told.append, origin)
    ending = run_in_threads(MLP, origin=origin, revive=restarts.revive)
    assert (ending.outcome, ending.error) == ("finished", None)
    (note,) = (each for each in ending.view.run_state.notes if "training resumes" in each)
    assert note.endswith("training resumes from the checkpoint of step 2")
    assert "step-00000003/layer-0000." in note
    assert "the tensors of layer 0 have not the hashes of the trajectory" in note
    assert [each for each in told if "step-00000003: its tensors were refused" in each]
    assert first_difference(ending.view.run_state.rows, rows_after(2, whole)) is None
    named = run_in_threads(MLP, origin=origin, revive=replace(restarts, origin=replace(origin, is_named=True)).revive)
    assert named.exit_code == ExitCode.STORAGE


def test_a_damaged_part_ends_the_worker_before_training(tmp_path: Path) -> None:
    _, origins = run_and_keep(replace(MLP, steps=2), tmp_path)
    part = max((tmp_path / "step-00000000").glob("layer-0000.*"))
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    ending = run_in_threads(replace(MLP, steps=2), origin=origins[0])
    assert ending.exit_code == ExitCode.STORAGE
    assert part.name in str(ending.error)
