"""Jobs that follow their figures, through kills and resumes: plateaus and early stops with the bits of a plain loop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.core.errors import ExitCode
from engine.core.job.bit_fields import twin_of
from engine.core.job.job import Job
from engine.observers.observers import LoggerFeed
from engine.runtime.agent.session import run_session
from engine.runtime.process.thread_server import ThreadServer
from tests.e2e.plain_loop import PlainLoop
from tests.e2e.plain_loop import train as train_plainly
from tests.kills import parse_kills
from tests.runtime.kept_states import run_and_keep
from tests.runtime.thread_runs import run_in_threads, with_store_double
from tests.runtime.user_optimizers import halving

MLP: dict[str, Any] = {
    **{"model": "mlp", "model_args": {"depth": 3, "width": 16}, "stages": 2, "microbatches": 2, "steps": 9},
    **{"warmup_steps": 1, "validate_every": 1, "validation_microbatches": 2, "pipelines": 2, "lr": 0.2},
    "check_pure": False,
}
PLATEAU = MLP | {"lr_schedule": "plateau", "lr_args": {"factor": 0.5, "patience": 0, "threshold": 0.1}}
STOPS = PLATEAU | {"early_stop": "loss:2", "steps": 40}
TRAIN = PLATEAU | {"lr_args": PLATEAU["lr_args"] | {"monitor": "train_loss"}, "validate_every": 0}
OWN = "tests.runtime.user_optimizers:halving"
KILLS = ["3:1:B:1", "5:0"]


@pytest.mark.parametrize("fields", [STOPS, TRAIN], ids=["early stop", "train loss"])
def test_killed_resumed_and_plain_are_one_trajectory(fields: dict[str, Any], tmp_path: Path) -> None:
    job = Job(**fields)
    expected = train_plainly(job)
    last = int(expected[-1][0])
    whole, origins = run_and_keep(job, tmp_path)
    rates = {each.monitors.plateau.rate for each in origins if each.monitors.plateau is not None}
    assert len(rates) > 1, "the rate falls, or nothing is shown"
    killed = run_in_threads(job, parse_kills(KILLS, job))
    for ending in (whole, killed, *([run_in_threads(twin_of(job))] if job.early_stop else [])):
        assert (ending.outcome, ending.error) == ("finished", None)
        assert [row.texts() for row in ending.view.run_state.rows] == expected
        assert bool(ending.view.run_state.stopped_early) == bool(job.early_stop)
    # Of the last one, the run had not seen the validation: it is made up for.
    unseen = replace(origins[last - 2], monitors=origins[last - 3].monitors)
    for origin in (origins[last - 1], unseen) if job.validate_every else (origins[2],):
        resumed = run_in_threads(replace(job, stages=1, redundancy="none"), origin=origin)
        assert (resumed.outcome, resumed.error) == ("finished", None)
        later = [row for row in expected if int(row[0]) > origin.step]
        assert [row.texts() for row in resumed.view.run_state.rows] == later


def test_the_best_step_is_known_after_a_resume(tmp_path: Path) -> None:
    job = Job(**MLP | {"stages": 1, "pipelines": 1, "best": "loss:max", "redundancy": "none"})
    whole, origins = run_and_keep(job, tmp_path)
    best = whole.view.run_state.best()
    assert best is not None and best < 6, "else the test shows nothing"
    assert run_in_threads(job, origin=origins[6]).view.run_state.best() == best


def test_a_schedule_of_ones_own_gets_the_last_value_of_a_figure(tmp_path: Path) -> None:
    own = {"lr_schedule": "tests.runtime.user_optimizers:above", "lr_args": {"limit": 1.0, "monitor": "train_loss"}}
    job = Job(**MLP | own | {"validate_every": 0})
    whole, origins = run_and_keep(job, tmp_path)
    rows = [row.texts() for row in whole.view.run_state.rows]
    losses = [origin.monitors.monitored for origin in origins]
    assert losses == whole.view.run_state.losses, "the mean over the pipelines"
    killed = run_in_threads(job, parse_kills(KILLS, job))
    assert [row.texts() for row in killed.view.run_state.rows] == rows
    resumed = run_in_threads(job, origin=origins[3])
    assert [row.texts() for row in resumed.view.run_state.rows] == [row for row in rows if int(row[0]) > 3]


@pytest.mark.parametrize("schedule", ["exponential", OWN, "plateau", "linear"])
def test_loggers_get_the_rate_that_the_workers_used(schedule: str, tmp_path: Path) -> None:
    args = {"exponential": {"gamma": 0.7}, "plateau": TRAIN["lr_args"]}.get(schedule, {})
    job = Job(**MLP | {"validate_every": 0, "lr_schedule": schedule, "lr_args": args, "steps": 6})
    with ThreadServer() as server, with_store_double():
        faults = parse_kills(["3:1"], job)
        run_session(job, tmp_path / "events.jsonl", tmp_path, server=server, faults=faults)
    seen = dict[int, Any]()
    LoggerFeed(
        SimpleNamespace(step=lambda done: seen.update({done.step: done.lr})), tmp_path / "events.jsonl"
    ).read_on()
    if schedule == OWN:
        rates = [job.lr, *(job.lr * halving(step) for step in range(job.steps - 1))]
    else:
        loop = PlainLoop(job)
        rates = [(loop.rate(step), loop.step(step))[0] for step in range(job.steps)]
    assert [*seen.values()] == rates and len({*rates}) > 1


def test_a_figure_that_no_validation_gives_ends_the_job() -> None:
    ending = run_in_threads(Job(**MLP, early_stop="f1:2"))
    assert ending.exit_code == ExitCode.USAGE
    assert "early_stop: a validation gives no 'f1'; the first evaluation set has loss" in str(ending.error)
