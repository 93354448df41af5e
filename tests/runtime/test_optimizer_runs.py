"""Whole jobs with other optimizers, groups and schedules: killed, resumed, and equal to a plain loop of torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core.errors import ExitCode
from engine.core.job.job import Job
from engine.core.job.torch_parts import OPTIMIZERS
from engine.files.checkpoint_folder import CheckpointName, checkpoints_at
from engine.runtime.checkpoint.export import export
from tests.e2e.plain_loop import PlainLoop
from tests.e2e.plain_loop import train as train_plainly
from tests.kills import parse_kills
from tests.runtime.kept_states import run_and_keep
from tests.runtime.thread_runs import run_in_threads

USER = "tests.runtime.user_optimizers"
MLP: dict[str, Any] = {
    **{"model": "mlp", "model_args": {"depth": 3, "width": 16}, "stages": 2, "microbatches": 2, "steps": 6},
    **{"warmup_steps": 2, "clip_norm": 0.5, "validate_every": 0},
}
GPT: dict[str, Any] = MLP | {"model": "gpt", "model_args": {"width": 16, "tied": True, "depth": 2}, "stages": 3}
GROUPS = "bias$|norm: weight_decay=0; block0: lr=0.5, eps=1e-06"
SCHEDULES: dict[str, dict[str, Any]] = {
    "constant_factor": {"factor": 0.25, "total_iters": 2},
    "cosine_annealing": {"eta_min": 1e-4},
    "cosine_restarts": {"T_0": 2, "T_mult": 2},
    "cyclic": {"base_lr": 1e-4, "step_size_up": 2},
    "exponential": {"gamma": 0.7},
    "linear_factor": {"total_iters": 3},
    "multistep": {"milestones": "1,3"},
    "onecycle": {"pct_start": 0.4},
    "polynomial": {"power": 2.0},
    "step": {"step_size": 2},
}
SHARP: dict[str, dict[str, Any]] = {
    "nadam in groups, onecycle": GPT
    | {"optimizer": "nadam", "lr_schedule": "onecycle", "lr_args": SCHEDULES["onecycle"], "param_groups": GROUPS},
    "adafactor, multistep": MLP
    | {"optimizer": "adafactor", "lr_schedule": "multistep", "lr_args": SCHEDULES["multistep"], "pipelines": 2},
    "a user's Lion, averaged": MLP
    | {"ema": 0.75}
    | {"optimizer": f"{USER}:Lion", "lr_schedule": "exponential", "lr_args": {"gamma": 0.7}},
    "adamw in groups, averaged": GPT | {"param_groups": "bias|norm: weight_decay=0; token: lr=0.5", "ema": 0.9},
}
HALF: dict[str, Any] = {"dtype": "float16", "scaler_args": {"init_scale": 2.0**18, "growth_interval": 2}, "steps": 14}
SHARP["float16, with losses that are not finite"] = (
    MLP | HALF | {"model": f"{USER}:overflowing", "model_args": {}, "optimizer": "adam", "steps": 5}
)
WIDE: dict[str, dict[str, Any]] = {
    **{name: MLP | {"optimizer": name} for name in OPTIMIZERS if name not in ("muon",)},
    **{
        f"gpt with {name}": GPT | {"optimizer": name, "param_groups": "bias: lr=0.5"}
        for name in OPTIMIZERS
        if name not in ("muon",)
    },
    **{f"float16, {name}": MLP | HALF | {"optimizer": name} for name in ("adamw", "sgd", "rmsprop", "adagrad")},
    "float16, with steps that are skipped": MLP | HALF | {"optimizer": "adam"},
    "float16 in two pipelines": MLP | HALF | {"pipelines": 2, "log_every": 1},
    "float16, odd factors": MLP
    | HALF
    | {"scaler_args": {"init_scale": 3e5, "growth_factor": 1.7, "growth_interval": 1}},
    **{f"by {name}": MLP | {"lr_schedule": name, "lr_args": args} for name, args in SCHEDULES.items()},
}


def all_are_equal(fields: dict[str, Any], folder: Path, kills: list[str]) -> None:
    job = Job(**fields, check_pure=":" in fields.get("optimizer", ""))  # an optimizer of the user is tried
    expected = train_plainly(job)
    whole, origins = run_and_keep(job, folder)
    assert [row.texts() for row in whole.view.run_state.rows] == expected
    killed = run_in_threads(job, parse_kills(kills, job))
    assert (killed.outcome, killed.error) == ("finished", None)
    assert [row.texts() for row in killed.view.run_state.rows] == expected
    again = replace(job, stages=1, redundancy="none")
    resumed = run_in_threads(again, origin=origins[2])
    assert (resumed.outcome, resumed.error) == ("finished", None)
    assert [row.texts() for row in resumed.view.run_state.rows] == [row for row in expected if int(row[0]) > 2]


@pytest.mark.parametrize("name", SHARP)
def test_killed_resumed_and_plain_are_one_trajectory(name: str, tmp_path: Path) -> None:
    all_are_equal(SHARP[name], tmp_path, ["2:1:B:1"])


def test_averages_of_the_weights_are_exported(tmp_path: Path) -> None:
    job = Job(**GPT | {"steps": 3, "ema": 0.5})
    _, origins = run_and_keep(job, tmp_path / "kept")
    loop = PlainLoop(job)
    for step in range(job.steps):
        loop.step(step)
    folder, last = checkpoints_at(tmp_path / "kept"), origins[-1]
    export(folder, folder.manifest(CheckpointName(last.step, last.file)), tmp_path / "averaged.pt", ema=True)
    exported = torch.load(tmp_path / "averaged.pt", weights_only=True)
    names = [f"{loop.model.layers[layer].name}.{name}" for layer, name in loop.trained]
    for name, average in zip(names, loop.averaged.module.parameters(), strict=True):
        assert torch.equal(exported[name], average), name


@pytest.mark.soak
@pytest.mark.parametrize("name", WIDE)
def test_every_optimizer_and_every_schedule(name: str, tmp_path: Path) -> None:
    all_are_equal(WIDE[name], tmp_path, ["1:0", "4:1:F:1"] if "gpt" in name else ["3:1"])


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"optimizer": f"{USER}:Drawing"}, "differs between an owner and a shadow"),
        ({"optimizer": "adam", "optimizer_args": {"betas": "0.9,2"}}, "Invalid beta parameter"),
        (
            {"param_groups": "nothing: lr=0.1"},
            "param_groups: expected patterns that match a parameter, found 'nothing' (the ",
        ),
        ({"param_groups": ".: lr=0.1; bias: lr=1"}, "an earlier group has each of its parameters, such as "),
        (
            {"optimizer": f"{USER}:Lion", "param_groups": ".: beta=0.1"},
            "param_groups.beta: expected one of lr, betas, ",
        ),
        ({"lr_schedule": f"{USER}:calls"}, "a function of the step alone"),
        ({"lr_schedule": f"{USER}:bad_factor"}, "finite rates of at least 0"),
        ({"lr_schedule": "torch.optim.lr_scheduler:ReduceLROnPlateau"}, "a schedule of the step alone"),
    ],
)
def test_a_mistake_ends_the_job_before_training(fields: dict[str, Any], told: str) -> None:
    ending = run_in_threads(Job(**MLP | fields))
    assert ending.exit_code == ExitCode.USAGE
    assert told in str(ending.error)
    assert ending.view.run_state.committed == -1
