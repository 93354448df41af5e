"""A logger gets each committed step, validation, recovery and the end; the shipped ones use their own packages."""

from __future__ import annotations

import csv
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from engine.core.job.job import Job, logger_names
from engine.files.jobs.job_layers import foreign_values
from engine.files.jobs.job_value import FieldValue
from engine.observers import observers as registry
from engine.observers.loggers import FILE, RecoveryDone, StepDone, TrainingDone
from engine.observers.observer_process import words
from engine.observers.observers import LOGGERS, LoggerFeed, LoggerProgress, ProgressPage, logger_problems, made_logger
from tests.core.made_records import lines_of, made

SECOND_NS = 10**9
JOB = made("job").job


def commit(step: int, at_s: float, loss: float = 2.0) -> dict[str, Any]:
    return {"event": "commit", "step": step, "at_ns": int(at_s * SECOND_NS), "loss": loss, "grad_norm": 0.5}


EVENTS: list[dict[str, Any]] = [
    {"event": "job"},
    {"event": "epoch", "epoch": 1, "at_ns": 0, "verdict": ()},
    {"event": "go", "epoch": 1, "at_ns": SECOND_NS},
    commit(0, 1.5, 3.0),
    {
        **{"event": "validation", "step": 0, "name": "held", "samples": 8},
        **{"loss": 4.0, "metrics": {"f1": 0.25}, "at_ns": 2 * SECOND_NS},
    },
    {"event": "partition", "starts": (0, 1), "layers": ("in", "out")},
    {"event": "norms", "step": 1, "norms": ((0, 0.3), (1, 0.4))},
    commit(1, 2.5),
    {"event": "epoch", "epoch": 2, "at_ns": 3 * SECOND_NS},
    {"event": "go", "epoch": 2, "at_ns": 3 * SECOND_NS},
    commit(2, 4.5),
    {"event": "training_ended", "outcome": "finished", "exit_code": 0, "at_ns": 5 * SECOND_NS},
]


class Notes:
    """Keeps the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *values: self.calls.append((name, values[0]))


def followed(logger: object, folder: Path) -> LoggerFeed:
    (folder / "events.jsonl").write_text(lines_of(EVENTS))
    following = LoggerFeed(logger, folder / "events.jsonl")
    following.read_on()
    return following


def test_a_logger_gets_all_that_is_committed_in_order(tmp_path: Path) -> None:
    notes = Notes()
    following = followed(notes, tmp_path)
    names = ["start", "cover", "step", "validation", "step", "recovery", "step", "finish"]
    assert [name for name, _ in notes.calls] == names
    job, _, first, validation, second, recovery, third, end = (value for _, value in notes.calls)
    assert (first.layer_norms, second.layer_norms, third.layer_norms) == ({}, {"0.in": 0.3, "1.out": 0.4}, {})
    assert job == JOB and following.is_over and following.last_step == 2
    assert (first.step, first.loss, first.grad_norm, first.seconds) == (0, 3.0, 0.5, 0.5)
    assert first.samples == JOB.pipelines * JOB.microbatches * JOB.microbatch_size
    assert first.metrics.keys() == {"loss", "grad_norm", "lr", "samples_per_s"}
    assert (validation.step, validation.name, validation.samples) == (0, "held", 8)
    assert (validation.loss, validation.metrics) == (4.0, {"f1": 0.25})
    assert third.seconds == 2.0, "since the commit before the recovery"
    assert third.recoveries == (recovery,) and recovery.step == 2 and recovery.stall_ms == 1000.0
    assert (end.outcome, end.exit_code, end.steps, end.error) == ("finished", 0, 3, "")


def test_the_events_may_grow_and_a_logger_may_lack_methods(tmp_path: Path) -> None:
    steps: list[StepDone] = []
    following = LoggerFeed(SimpleNamespace(step=steps.append), tmp_path / "events.jsonl")
    following.read_on()
    for end in (4, 6, len(EVENTS)):
        (tmp_path / "events.jsonl").write_text(lines_of(EVENTS[:end]))
        following.read_on()
    assert [each.step for each in steps] == [0, 1, 2] and following.is_over


def test_csv_has_a_row_for_each_and_is_readable_at_any_time(tmp_path: Path) -> None:
    followed(made_logger("csv"), tmp_path)
    with (tmp_path / FILE).open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["loss"], row["validation_loss"]) for row in rows if not row["recovery"]] == [
        ("0", "3.0", ""),
        ("0", "", "4.0"),
        ("1", "2.0", ""),
        ("2", "2.0", ""),
    ]
    assert [row["step"] for row in rows if row["recovery"]] == ["2"]
    assert [(row["evaluated"], row["metrics"]) for row in rows if row["evaluated"]] == [("held", "f1=0.25")]


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    module = ModuleType(name)
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, name, module)


def test_wandb_gets_the_job_the_figures_of_each_step_and_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: dict[str, Any] = {}
    logged: list[tuple[dict[str, float], int]] = []
    summary: dict[str, int] = {}
    ended: list[int] = []

    def log(data: dict[str, float], step: int | None = None, commit: bool | None = None) -> None:
        assert step is not None
        logged.append((data, step))

    def finish(exit_code: int | None = None, *, quiet: bool | None = None) -> None:
        ended.append(exit_code if exit_code is not None else -1)

    def init(*, project: str, name: str, dir: str, config: dict[str, Any]) -> SimpleNamespace:
        begun.update(project=project, name=name, dir=dir, config=config)
        return SimpleNamespace(log=log, finish=finish, summary=summary)

    stand_in(monkeypatch, "wandb", init=init)
    followed(made_logger("wandb"), tmp_path)
    assert (begun["name"], begun["dir"]) == (tmp_path.name, str(tmp_path))
    assert begun["config"].keys() == {each.name for each in fields(Job)}
    assert [step for _, step in logged] == [0, 0, 1, 2, 2]
    assert logged[0][0]["train/loss"] == 3.0 and logged[1][0] == {"held/loss": 4.0, "held/f1": 0.25}
    assert summary == {"recoveries": 1} and ended == [0]


def test_mlflow_gets_the_job_the_figures_of_each_step_and_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params: dict[str, str] = {}
    logged: list[int] = []
    told: list[str] = []

    def start_run(run_id: str | None = None, experiment_id: str | None = None, run_name: str | None = None) -> None:
        told.append(str(run_name))

    def log_metrics(metrics: dict[str, float], step: int | None = None, synchronous: bool | None = None) -> None:
        assert metrics and step is not None
        logged.append(step)

    functions = {"start_run": start_run, "log_params": params.update, "log_metrics": log_metrics}
    stand_in(monkeypatch, "mlflow", **functions, end_run=told.append)
    followed(made_logger("mlflow"), tmp_path)
    assert params["model"] == JOB.model and logged == [0, 0, 1, 2, 2] and told == [tmp_path.name, "FINISHED"]


@pytest.mark.parametrize(("outcome", "code", "told"), [("interrupted", 130, "KILLED"), ("failed", 3, "FAILED")])
def test_mlflow_gets_the_end_of_a_run_that_has_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: str, code: int, told: str
) -> None:
    ended: list[str] = []
    others = dict.fromkeys(("start_run", "log_params"), lambda *values, **named: None)
    stand_in(monkeypatch, "mlflow", **others, end_run=ended.append)
    logger: Any = made_logger("mlflow")
    logger.start(JOB, tmp_path)
    logger.finish(TrainingDone(outcome, code, 1, "", 0.0))
    assert ended == [told]


def test_tensorboard_has_no_figure_of_a_stall_that_is_not_known(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger: Any = made_logger("tensorboard")
    logger.start(JOB, tmp_path)
    logger.recovery(RecoveryDone(2, (1,), "shadow", None, 0, "worker 1 was lost"))
    logger.finish(TrainingDone("finished", 0, 3, "", 0.0))
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert found.Tags()["scalars"] == []
    assert len(found.Tensors("recovery/text_summary")) == 1


def test_tensorboard_writes_what_its_own_reader_finds(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    followed(made_logger("tensorboard"), tmp_path)
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(each.step, each.value) for each in found.Scalars("train/loss")] == [(0, 3.0), (1, 2.0), (2, 2.0)]
    assert [each.value for each in found.Scalars("held/f1")] == [0.25]
    assert len(found.Tensors("recovery/text_summary")) == 1


def test_wrong_names_and_packages_that_are_not_installed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    assert logger_problems("") == logger_problems("csv, mine:Log") == []
    near, absent = logger_problems("csvv,wandb")
    assert near.hint == "did you mean 'csv'?" and "mine" not in str(near)
    assert absent.expected == "the package wandb" and absent.hint.startswith("pip install 'bamboo-train[wandb]'")
    assert {each.extra for each in LOGGERS.values()} == {"", "tensorboard", "wandb", "mlflow", "otel"}
    assert logger_problems("prometheus,prometheus:9464,prometheus:/var/a.prom") == []
    for wrong, expected in (("prometheus:a.txt", "prometheus, prometheus:FILE.prom or"), ("csv:1", "csv alone")):
        (problem,) = logger_problems(wrong)
        assert problem.expected.startswith(expected)


def test_code_in_a_list_of_loggers_needs_trust_as_any_code_does() -> None:
    assert logger_names(" csv,, mine:Log ,csv") == ("csv", "mine:Log")
    assert Job(logger="csv,mine:Log").names_code and not Job(logger="csv").names_code
    (refused,) = foreign_values([FieldValue(("logger",), "csv,mine:Log", "a.yaml:1:1", "a.yaml", 1, 1, "trust it")])
    assert "import mine and call Log" in refused.hint
    (refused,) = foreign_values(
        [FieldValue(("logger",), "prometheus:/a.prom", "a.yaml:1:1", "a.yaml", 1, 1, "trust it")]
    )
    assert refused.hint == "it would write to that file, or open that port; trust it"


def test_an_error_is_one_line_with_the_users_own_place() -> None:
    def fails() -> None:
        raise ValueError("no\x1b[2J\nway")

    with pytest.raises(ValueError, match="no") as caught:
        fails()
    assert words(caught.value).startswith("ValueError: no")
    assert (
        f"{__file__}:" in words(caught.value) and "\n" not in words(caught.value) and "\x1b" not in words(caught.value)
    )


def test_progress_is_read_as_it_was_written() -> None:
    slate = ProgressPage.new()
    assert slate.read() == LoggerProgress(has_started=False)
    slate.write(LoggerProgress(5, is_over=True, error="e" * 5_000))
    assert slate.read() == LoggerProgress(5, True, "e" * 1_000)
    slate.close()
