"""Epochs of a job: the steps that they stand for, and the layer that counts if one has steps."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from engine.core.checkpoint_rules import KeepRule, keeping_of
from engine.core.errors import BambooError, UserError
from engine.core.faults.kill_text import kill_scenario
from engine.core.job.job import Job
from engine.core.job.job_rules import ANYTHING
from engine.core.job.samples import epoch_at, passes
from engine.files.jobs.forms import job_schema
from engine.files.jobs.job_file import merge
from engine.files.jobs.job_layers import Layer, document_layer, flag_layer
from engine.files.jobs.scenario_file import load_document
from engine.files.strict_yaml import read_text
from engine.harness import job_checks
from engine.models.data_sources import answer_about
from engine.runtime.faults.registry import kinds
from tests.looped import looped

COUNTING = replace(ANYTHING, samples_of=lambda job: 7 * 32)  # a step of the default job has 32 samples


def file(text: str) -> Layer:
    return document_layer(read_text(text, "job.yaml"))


RECORD = json.dumps(asdict(Job(epochs=2, steps=30)))


@looped(
    ("layers", "steps_and_epochs"),
    [
        ([file("epochs: 3")], (21, 3)),
        ([file("steps: 9"), flag_layer({"epochs": "2"})], (14, 2)),
        ([file("epochs: 3"), flag_layer({"steps": "9"})], (9, 0)),
        ([file("epochs: 3"), flag_layer({"epochs": "0"})], (80, 0)),
        ([file(RECORD)], (30, 2)),
        ([file(RECORD), flag_layer({"epochs": "3"})], (21, 3)),
    ],
)
def test_the_last_layer_that_has_epochs_or_steps_counts(layers: list[Layer], steps_and_epochs: tuple[int, int]) -> None:
    job = merge(layers, COUNTING).job
    assert (job.steps, job.epochs) == steps_and_epochs


def test_the_steps_come_from_the_epochs() -> None:
    assert merge([file("epochs: 3")], COUNTING).origins["steps"] == "job.yaml:1:9"
    not_counted = merge([file("epochs: 3")], ANYTHING).job
    assert (not_counted.steps, not_counted.has_steps) == (0, False)


def test_one_layer_has_epochs_or_steps() -> None:
    with pytest.raises(UserError, match=r"found 9 \(give epochs or steps, not both\)"):
        merge([file("epochs: 3\nsteps: 9")], COUNTING)


def test_every_sample_is_trained_as_often_as_there_are_epochs() -> None:
    sizes = "pipelines: 2\nmicrobatches: 3\nmicrobatch_size: 2\n"
    for epochs in range(1, 9):
        job = merge([file(f"{sizes}epochs: {epochs}")], replace(ANYTHING, samples_of=lambda job: 50)).job
        assert passes(job, job.steps, 50) >= epochs > passes(job, job.steps - 1, 50)
        assert epoch_at(job, job.steps, 50) == epochs
    assert [epoch_at(job, step, 50) for step in (0, 4, 5, 8, 9)] == [1, 1, 2, 2, 3]
    assert epoch_at(job, 3, 0) == epoch_at(Job(), 3, 50) == 0
    with pytest.raises(UserError, match="epochs: expected a finite training set"):
        merge([file("epochs: 3")], replace(ANYTHING, samples_of=lambda job: 0))


@looped(
    ("text", "every"),
    [
        ("validate_every: 1epoch\ncheckpoint_every: 2 epochs", (7, "14")),
        ("validate_every: 0.5epochs\ncheckpoint_every: 0.001epochs", (4, "1")),
        ("epochs: 3\nvalidate_every: 3epochs", (21, "10m")),
        ("epochs: 3\nvalidate_every: '9'\ncheckpoint_every: 10m", None),
        ("validate_every: epoch", None),
        ("validate_every: 0epochs", None),
        ("validate_every: 1.2345epochs", None),
        ("checkpoint_every: 0 epochs", None),
        ("steps: 1epoch", None),
    ],
)
def test_validations_and_checkpoints_may_be_epochs_apart(text: str, every: tuple[int, str] | None) -> None:
    if every is None:
        with pytest.raises(UserError):
            merge([file(text)], COUNTING)
        return
    found = merge([file(text)], COUNTING)
    assert (found.job.validate_every, found.job.checkpoint_every) == every
    assert "epoch)" in found.origins["validate_every"].replace("epochs", "epoch")
    schema = job_schema()["properties"]
    for line in text.splitlines():
        name, value = line.split(": ")
        assert name == "epochs" or re.fullmatch(schema[name]["pattern"], value)


def test_epochs_of_a_flag_count_and_those_of_data_without_an_end_are_refused() -> None:
    flags = flag_layer({"validate_every": "2epochs", "checkpoint_every": "1epoch"})
    assert merge([file("validate_every: 5"), flags], COUNTING).job.validate_every == 14
    steps = merge([file("validate_every: 2epochs"), flag_layer({"validate_every": "5"})], ANYTHING)
    assert steps.job.validate_every == 5
    kept = merge([flags], ANYTHING).job.checkpoint_every  # not counted: the rules do not know its steps
    assert keeping_of(kept) == KeepRule(in_epochs=True)
    with pytest.raises(UserError, match="validate_every: expected a finite training set"):
        merge([flags], replace(ANYTHING, samples_of=lambda job: 0))


def test_no_fault_is_checked_against_steps_that_are_not_known() -> None:
    file_text = "version: 1\nname: mine\nabout: Some faults.\njob: {epochs: 9, stages: 2, checkpoint_every: 1epoch}\n"
    at = "faults:\n- {id: one, do: kill, at: {step: 5000, stage: 0, action: CHECKPOINT}}\n"
    drawn = "- {id: some, do: kill, target: {role: random}, every: {mtbf: 5 steps, count: 3}}\n"
    loaded = load_document(Path("mine.yaml"), read_text(file_text + at + drawn, "mine.yaml"), kinds())
    assert [each.id for each in loaded.faults] == ["one"]
    counting = replace(ANYTHING, samples_of=lambda job: 320)
    with pytest.raises(UserError, match=r"at\.step: expected a step from 0 to 89, found 5000"):
        load_document(Path("mine.yaml"), read_text(file_text + at, "mine.yaml"), kinds(), offered=counting)
    kill_scenario(["5000:1"], merge([file("epochs: 3")]).job)


def test_a_dry_run_counts_what_needs_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(of_data: str, folder: str) -> int:
        if "gone.bin" in of_data:
            raise UserError([])
        return 50

    monkeypatch.setattr(job_checks, "_num_samples", counted)
    found = [
        job_checks.samples_without_code(Job(data=data, collate=collate))
        for data, collate in (("tokens.bin", ""), ("mine:data", ""), ("tokens.bin", "mine:padded"), ("gone.bin", ""))
    ]
    assert found == [50, None, None, None]


def test_a_program_of_its_own_counts_the_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command itself imports neither torch nor the user's code."""
    (tmp_path / "counted.py").write_text("print('loud')\ndef data():\n    return [(0.0, 1.0)] * 9\n")
    monkeypatch.chdir(tmp_path)
    job = Job(model="m:f", data="counted:data", epochs=2, microbatches=1, microbatch_size=4)
    assert job_checks.samples_of(job) == 9


def test_data_that_cannot_be_opened_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_data.py").write_text("def bad():\n    1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(job_checks, "ask", lambda module, question: answer_about(Job(**question)))
    for name, words in (("bad", "in the factory broken_data:bad: ZeroDivisionError"), ("gone", "a factory in broken_")):
        with pytest.raises(BambooError, match=words):
            job_checks.samples_of(Job(model="m:f", data=f"broken_data:{name}", epochs=2))
