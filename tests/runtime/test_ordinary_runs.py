"""Runs of ordinary modules equal a plain torch loop on the unsplit module, for every number of stages, with deaths.

Torch adds the gradients of a tied parameter in another order than bamboo, which keeps one sum for each use. The loop
gives each use its own sum, too; `test_where_torch_adds_in_another_order` shows the difference.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.core.checks.trajectory import trajectory_hash
from engine.core.job.job import Job
from engine.core.random_key import random_key
from engine.files.checkpoint_folder import CheckpointName, checkpoints_at
from engine.models.data import Columns
from engine.models.data_sources import open_data
from engine.models.layers import Batch
from engine.models.losses import default_loss
from engine.models.user_factory import made_by
from engine.runtime.checkpoint.export import export
from tests.kills import parse_kills
from tests.runtime.kept_states import run_and_keep
from tests.runtime.thread_runs import run_in_threads

pytestmark = pytest.mark.timeout(300)

_COMMON: dict[str, Any] = {
    "microbatches": 4,
    "steps": 2,
    "lr": 0.01,
    "warmup_steps": 0,
    "lr_schedule": "constant",
    "clip_norm": 0.0,
    "validate_every": 2,
    "validation_microbatches": 1,
}
_MODULES = "tests.e2e.ordinary_modules"
JOBS = {
    "language model": Job(model=f"{_MODULES}:language_model", data="text", **_COMMON),
    "resnet18": Job(model=f"{_MODULES}:resnet18", data="digits", **_COMMON),
    "encoder and decoder": Job(model=f"{_MODULES}:encoder_decoder", data="synthetic", **_COMMON),
}
State = dict[str, Tensor]
SAMPLE = [("language model", 3, 1, "1:2"), ("encoder and decoder", 4, 1, "1:1:B:2")]
ALL = [
    (name, stages, pipelines, f"1:{stage}:{moment}")
    for name in JOBS
    for stages in (1, 2, 3, 4)
    for pipelines in (1, 2)
    for stage, moment in ((0, "B:1"), (stages - 1, "F:2"))
]


def plain_loop(job: Job, *, unties: bool = True) -> State:
    """Returns the state_dict of the module of pipeline 0 after a plain loop, without layers, stages or engine."""
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        module: nn.Module = made_by("model", job.model, job.model_args, random_key(job.seed, "model"))
    replicas = [module, *(copy.deepcopy(module) for _ in range(job.pipelines - 1))]
    names = list(dict(module.named_parameters()))
    uses = [_untied(each) if unties else {name: each.get_parameter(name) for name in names} for each in replicas]
    for others in uses[1:]:
        for name, each in others.items():
            each.data = uses[0][name].data
    trained = [uses[0][name] for name in names]
    optimizer = torch.optim.AdamW(trained, lr=job.lr, foreach=False, fused=False)
    data = open_data(job)
    for step in range(job.steps):
        for pipeline, replica in enumerate(replicas):
            for microbatch in range(job.microbatches):
                batch = data.microbatch(step, pipeline, microbatch, job.microbatch_size)
                (_loss(replica, batch, data.facts.form) / job.microbatches).backward()
        gradients = {name: _mean([replica[name].grad for replica in uses]) for name in uses[0]}
        for name, each in uses[0].items():
            if name not in names:  # a further use
                first = next(other for other in names if uses[0][other].data_ptr() == each.data_ptr())
                gradients[first] = _summed([gradients[first], gradients[name]])
        for name, each in zip(names, trained, strict=True):
            each.grad = gradients[name]
        optimizer.step()
        for each in (each for replica in uses for each in replica.values()):
            each.grad = None
    return module.state_dict()


def _untied(module: nn.Module) -> dict[str, nn.Parameter]:
    """Gives each use of a tied parameter a parameter of its own, in the same memory; returns all by name."""
    seen: dict[int, str] = {}
    for name, each in list(module.named_parameters(remove_duplicate=False)):
        if seen.setdefault(id(each), name) != name:
            owner = module.get_submodule(name.rpartition(".")[0])
            setattr(owner, name.rpartition(".")[2], nn.Parameter(each.data))
    return dict(module.named_parameters())


def _summed(gradients: list[Tensor | None]) -> Tensor | None:
    total: Tensor | None = None
    for each in gradients:
        if each is not None:
            total = each if total is None else total + each
    return total


def _mean(gradients: list[Tensor | None]) -> Tensor | None:
    total = _summed(gradients)
    return None if total is None else total / len(gradients)


def _loss(module: nn.Module, batch: Batch, form: object) -> Tensor:
    inputs, targets = batch.inputs[0], batch.targets[0]
    if isinstance(form, Columns):
        args, kwargs = form.taken_by(module.forward).chosen(batch.inputs)
        made = module(*args, **kwargs)
        loss = made.get("loss") if isinstance(made, dict) else None
        outputs = next(each for each in made.values() if each is not None) if isinstance(made, dict) else made
        return loss if loss is not None else default_loss((outputs,), batch.targets)
    if "labels" in inspect.signature(module.forward).parameters:
        return module(inputs, labels=targets).loss
    made = module(inputs)
    return default_loss(tuple(made.values()) if isinstance(made, dict) else (made,), (targets,))


def weights(job: Job, place: Path) -> tuple[str, State]:
    """Returns the trajectory of a run, and its exported weights."""
    ending, origins = run_and_keep(job, place / "checkpoints")
    folder, last = checkpoints_at(origins[-1].place), origins[-1]
    output = place / "model.pt"
    export(folder, folder.manifest(CheckpointName(last.step, last.file)), output)
    return trajectory_hash(ending.view.run_state.rows), torch.load(output)


def trajectory(job: Job, *kills: str) -> str:
    ending = run_in_threads(job, parse_kills(kills, job))
    assert ending.error is None, ending.error
    return trajectory_hash(ending.view.run_state.rows)


@cache
def expected(name: str, pipelines: int) -> State:
    return plain_loop(replace(JOBS[name], pipelines=pipelines))


def assert_equal(found: State, wanted: State) -> None:
    assert set(found) == set(wanted)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.parametrize(("name", "stages", "pipelines", "kill"), SAMPLE)
def test_a_run_equals_a_plain_loop_and_a_death_changes_nothing(
    name: str, stages: int, pipelines: int, kill: str, tmp_path: Path
) -> None:
    job = replace(JOBS[name], stages=stages, pipelines=pipelines)
    found, state = weights(job, tmp_path)
    assert_equal(state, expected(name, pipelines))
    assert trajectory(job, kill) == found


@pytest.mark.soak
@pytest.mark.parametrize(("name", "stages", "pipelines", "kill"), ALL)
def test_every_cut_has_one_trajectory(name: str, stages: int, pipelines: int, kill: str, tmp_path: Path) -> None:
    job = replace(JOBS[name], stages=stages, pipelines=pipelines)
    found, state = weights(job, tmp_path)
    assert_equal(state, expected(name, pipelines))
    assert found == trajectory(replace(job, stages=1, partition="parameters"))
    if stages * pipelines > 1:
        assert trajectory(job, kill) == found
        assert trajectory(replace(job, partition="parameters", redundancy="eager"), kill) == found


def test_exported_weights_begin_another_run(tmp_path: Path) -> None:
    job = replace(JOBS["language model"], stages=2, steps=1)
    _, state = weights(job, tmp_path)
    again = replace(job, init=str(tmp_path / "model.pt"), lr=1e-30, stages=3, optimizer_args={"weight_decay": 0.0})
    _, begun = weights(again, tmp_path / "again")
    assert_equal(begun, state)
    module: nn.Module = made_by("model", job.model, {}, 0)
    module.load_state_dict(state)


def test_a_parameter_of_two_layers_is_exported_once(tmp_path: Path) -> None:
    job = replace(JOBS["language model"], model=f"{_MODULES}:shared_embedding", stages=2, steps=1)
    _, origins = run_and_keep(job, tmp_path / "checkpoints")
    folder = checkpoints_at(origins[-1].place)
    manifest = folder.manifest(CheckpointName(origins[-1].step, origins[-1].file))
    done = export(folder, manifest, tmp_path / "folder", largest=1)
    assert done == (7, 4 * (256 * 16 + 3 * (16 * 16 + 16)))
    assert len(list((tmp_path / "folder").glob("*.safetensors"))) == 7


def test_where_torch_adds_in_another_order() -> None:
    job = JOBS["language model"]
    tied, untied = plain_loop(job, unties=False), expected("language model", 1)
    different = [name for name in tied if not torch.equal(tied[name], untied[name])]
    assert "transformer.wte.weight" in different
    # One microbatch has one sum of two gradients, which is the same in both orders.
    single = replace(job, microbatches=1)
    assert_equal(plain_loop(single, unties=False), plain_loop(single))
