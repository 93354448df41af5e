"""Epochs of a job: the steps that they stand for, and the layer that counts if one has steps."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from engine.core.config.job import Job
from engine.core.config.offered import ANYTHING
from engine.core.errors import BambooError, UserError
from engine.core.samples.ledger import passes
from engine.files.jobs.job_file import merge
from engine.files.jobs.job_layers import Layer, document_layer, flag_layer
from engine.files.strict_yaml import read_text
from engine.harness import job_checks
from engine.models.sources.count_samples import answer_about

COUNTING = replace(ANYTHING, steps_of=lambda job: 7 * job.epochs)


def file(text: str) -> Layer:
    return document_layer(read_text(text, "job.yaml"))


RECORD = json.dumps(asdict(Job(epochs=2, steps=30)))


@pytest.mark.parametrize(
    ("layers", "steps_and_epochs"),
    [
        ([file("epochs: 3")], (21, 3)),
        ([file("steps: 9"), flag_layer({"epochs": "2"})], (14, 2)),
        ([file("epochs: 3"), flag_layer({"steps": "9"})], (9, 0)),
        ([file("epochs: 3"), flag_layer({"epochs": "0"})], (80, 0)),
        ([file(RECORD)], (30, 2)),
        ([file(RECORD), flag_layer({"epochs": "3"})], (21, 3)),
    ],
    ids=["a file", "a flag over steps", "steps over epochs", "none", "a record", "a flag over a record"],
)
def test_the_last_layer_that_has_epochs_or_steps_counts(layers: list[Layer], steps_and_epochs: tuple[int, int]) -> None:
    job = merge(layers, COUNTING).job
    assert (job.steps, job.epochs) == steps_and_epochs


def test_the_steps_come_from_the_epochs() -> None:
    assert merge([file("epochs: 3")], COUNTING).origins["steps"] == "job.yaml:1:9"
    assert merge([file("epochs: 3")], ANYTHING).job.steps == Job().steps  # this command opens no data


def test_one_layer_has_epochs_or_steps() -> None:
    with pytest.raises(UserError, match="expected epochs or steps, found 3"):
        merge([file("epochs: 3\nsteps: 9")], COUNTING)


def test_every_sample_is_trained_as_often_as_there_are_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_checks, "_num_samples", lambda of_data, folder: 50)
    for epochs in range(1, 9):
        job = Job(pipelines=2, microbatches=3, microbatch_size=2, epochs=epochs)
        steps = job_checks.steps_of_epochs(job)
        assert passes(job, steps, 50) >= epochs > passes(job, steps - 1, 50)
    monkeypatch.setattr(job_checks, "_num_samples", lambda of_data, folder: 0)
    with pytest.raises(UserError, match="expected a finite training set"):
        job_checks.steps_of_epochs(job)


def test_a_program_of_its_own_counts_the_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command itself imports neither torch nor the user's code."""
    (tmp_path / "counted.py").write_text("print('loud')\ndef data():\n    return [(0.0, 1.0)] * 9\n")
    monkeypatch.chdir(tmp_path)
    job = Job(model="m:f", data="counted:data", epochs=2, microbatches=1, microbatch_size=4)
    assert job_checks.steps_of_epochs(job) == 5


def test_data_that_cannot_be_opened_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_data.py").write_text("def bad():\n    1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(job_checks, "ask", lambda module, question: answer_about(Job(**question)))
    for name, words in (("bad", "in the factory broken_data:bad: ZeroDivisionError"), ("gone", "a factory in broken_")):
        with pytest.raises(BambooError, match=words):
            job_checks.steps_of_epochs(Job(model="m:f", data=f"broken_data:{name}", epochs=2))
