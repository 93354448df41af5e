"""Factories may have any name that Python takes: one that begins with an underscore, or has letters beyond ASCII."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from engine.core.faults.scenario import Scenario
from engine.core.job.hugging_face import MODEL
from engine.core.job.job import FACTORY, Job
from engine.files.jobs.resolved_job import ResolvedJob
from engine.files.run_folder import RUN_NAME
from engine.harness import matrix_runner
from engine.harness.case import case_of_job, folder_name
from tests.e2e.launcher import Launcher

MODULE = """
from torch import nn
from engine.core.program.schedules import SCHEDULES
from engine.models.datasets import VectorData

def _\u00dcnet(*, width=8):
    return nn.Sequential(nn.Linear(32, width), nn.Linear(width, 32))

def _\u6570\u636e(*, seed):
    return VectorData(seed)

def \u043f\u043b\u0430\u043d(num_workers, stages_per_worker, num_microbatches):
    return SCHEDULES["gpipe"](num_workers, num_microbatches)
"""


@pytest.mark.e2e
def test_a_run_whose_factories_have_such_names_trains(tmp_path: Path) -> None:
    """Before, `m:_factory` was an AssertionError about the folder's name, and no name began beyond ASCII."""
    names = {"--model": "_\u00dcnet", "--data": "_\u6570\u636e", "--schedule": "\u043f\u043b\u0430\u043d"}
    factories = [word for flag, name in names.items() for word in (flag, f"m\u00f6del:{name}")]
    size = ["--stages", "2", "--microbatches", "2", "--steps", "1", "--audit", "0"]
    launcher = Launcher(tmp_path / "run", ["run", *factories, *size], {}, files={"m\u00f6del.py": MODULE})
    done = launcher.wait(60)
    assert done.code == 0, done.stderr
    (run,) = (tmp_path / "run" / "results").glob("2*")
    assert re.fullmatch(r"\d{8}-\d{6}-unet-[0-9a-f]{4}", run.name)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("_factory", "factory"),
        ("\u00dcnet", "unet"),
        ("__", "model"),
        ("\u6a21\u578b", "model"),
        ("x" * 100_000, "x" * 40),
        ("../../etc/passwd", "etc-passwd"),
        ("latest\n", "latest"),
        ("a\ud800b\0c", "ab-c"),
    ],
)
def test_any_text_gives_a_folder_a_name(text: str, name: str) -> None:
    """Before, the name of a factory became a part of the folder's name as it was."""
    assert folder_name(text, "model") == name
    assert re.fullmatch(RUN_NAME, f"20260101-000000-{name}-0000")


@pytest.mark.parametrize(
    ("path", "name"), [("org/Llama_3.1", "llama-3.1"), ("/models/gpt2/", "gpt2"), ("../..", "model"), ("", "model")]
)
def test_a_run_with_a_model_of_transformers_has_the_name_of_the_model(path: str, name: str) -> None:
    """Before, all had that of the factory, pretrained."""
    job = Job(model=MODEL, model_args={"path": path})
    for own, expected in (("", name), ("mine", "mine")):
        named = replace(job, name=own)
        assert case_of_job(ResolvedJob(named, {}), Scenario("", "", named, ())).name == expected


@pytest.mark.parametrize("name", ["m:_f", "m:\u00dcnet", "\u00fc.\u00f6:\u6a21\u578b", "_m._n:_1"])
def test_a_name_of_python_is_a_factory(name: str) -> None:
    """Before, a factory began with a letter of ASCII."""
    assert FACTORY.fullmatch(name)


@pytest.mark.parametrize("name", ["m:1f", "m:f\n", "m:", ":f", "m.:f", "m/n:f", "m:f.g", "m:f;g"])
def test_other_texts_are_no_factory(name: str) -> None:
    assert not FACTORY.fullmatch(name)


def test_the_file_of_a_cell_with_many_long_labels_fits() -> None:
    """Before, the labels of a cell became the name of a file, which may have 255 bytes."""
    label = "\u6a21" * 300
    cells = [f"case/{label}/{number}" for number in range(2)]
    names = [matrix_runner._file_name(cell) for cell in cells]
    assert len(set(names)) == 2 and max(len(f"shrunk-{name}.yaml".encode()) for name in names) <= 255
    assert matrix_runner._file_name("kill/1/last") == "kill-1-last"
