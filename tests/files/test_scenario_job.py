"""A scenario or matrix means the user's job: a job file that it names, or ./bamboo.yaml; its source is said."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bamboo_cli.app import app
from engine.core.errors import UserError
from engine.core.faults.fault import ANY_HOSTS
from engine.core.job.job import Job
from engine.core.job.job_rules import ANYTHING
from engine.files.jobs.library import scenario_names
from engine.files.jobs.matrix_file import read_matrix
from engine.files.jobs.scenario_file import LoadedScenario, load_document, load_scenario
from engine.files.strict_yaml import read_text
from engine.harness.case import case_of_file, scenario_record, whole_text
from engine.runtime.faults.registry import kinds
from tests.looped import looped

HEAD = "version: 1\nname: x\nabout: z\n"
FAULTS = "faults: [{at: {step: 1, stage: 1}, do: kill}]\n"
JOB = "model: mlp\nstages: 3\nsteps: 6\n"
MATRIX = """\
cases:
  - name: one
    faults: [{at: {step: 1, stage: last}, do: kill}]
  - name: two
    job: {redundancy: eager}
    faults: [{at: {step: 1, stage: last}, do: kill}]
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project, which is the current folder, with a folder for scenarios."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scenarios").mkdir()
    return tmp_path


def scenario(job: str = "") -> LoadedScenario:
    Path("scenarios/s.yaml").write_text(HEAD + job + FAULTS)
    return load_scenario("scenarios/s.yaml", kinds())


def said(command: str, *arguments: str) -> str:
    result = CliRunner().invoke(app, [command, *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_without_a_job_it_is_that_of_the_current_folder() -> None:
    """The job was the default gpt, without a word, although ./bamboo.yaml named the user's model."""
    Path("bamboo.yaml").write_text(JOB)
    loaded = scenario()
    assert (loaded.scenario.job.model, loaded.scenario.job.stages, loaded.job_from) == ("mlp", 3, "./bamboo.yaml")
    assert (loaded.origins["stages"], loaded.origins["seed"]) == ("bamboo.yaml:2:9", "default")
    assert case_of_file(loaded).origins == loaded.origins
    assert "job: ./bamboo.yaml" in said("validate", "scenarios/s.yaml")
    assert said("inject", "--scenario", "scenarios/s.yaml", "--dry-run").startswith("job: ./bamboo.yaml\n")


def test_without_any_file_it_is_the_default_one_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAMBOO_STAGES", "2")  # the environment changes no scenario
    assert scenario().scenario.job == Job(device="cpu")
    assert "job: the default one (gpt on auto)" in said("validate", "scenarios/s.yaml")
    plan = json.loads(said("inject", "--scenario", "scenarios/s.yaml", "--dry-run", "--json"))
    assert plan["job_from"] == "the default one (gpt on auto)"


def test_a_job_file_is_named_from_the_folder_of_the_scenario() -> None:
    """`job: FILE` was refused: expected a mapping."""
    Path("mine.yaml").write_text(JOB)
    Path("bamboo.yaml").write_text("model: gpt\n")
    loaded = scenario("job: ../mine.yaml\n")
    assert (loaded.scenario.job, loaded.job_from) == (Job(model="mlp", stages=3, steps=6, device="cpu"), "./mine.yaml")
    loaded = scenario("job: {from: ../mine.yaml, steps: 8, model_args: {width: 8}}\n")
    assert loaded.scenario.job == Job(model="mlp", stages=3, steps=8, model_args={"width": 8}, device="cpu")
    assert loaded.job_from == "./mine.yaml (overridden: steps, model_args)"
    assert (loaded.origins["steps"], loaded.origins["stages"]) == ("scenarios/s.yaml:4:34", "mine.yaml:2:9")


def test_a_whole_job_stays_as_it_is() -> None:
    Path("bamboo.yaml").write_text(JOB)
    loaded = scenario("job: {model: gpt, stages: 2}\n")
    assert (loaded.scenario.job, loaded.job_from) == (
        Job(stages=2, device="cpu"),
        "the one in the scenario (gpt on auto)",
    )


@looped("name", scenario_names())
def test_the_library_carries_its_own_jobs(name: str) -> None:
    Path("bamboo.yaml").write_text("stages: 2\nlr: 9\n")
    loaded = load_scenario(name, kinds(), on=ANY_HOSTS)
    assert loaded.source.is_whole and loaded.scenario.job.lr == Job().lr


@pytest.mark.parametrize(
    ("job", "problem"),
    [
        (
            "job: ../nothere.yaml\n",
            "scenarios/../nothere.yaml: expected a file that can be read, found No such file or",
        ),
        ("job: {from: 3}\n", "scenarios/s.yaml:4:13: job.from: expected the path of a job file, found 3"),
        ("job: ../bad.yaml\n", "bad.yaml:1:9: stages: expected a whole number, found 'x'"),
        ("job: {from: ../bamboo.yaml, stagse: 2}\n", "scenarios/s.yaml:4:29: job.stagse: expected a field of the job"),
        ("job: {from: ../bamboo.yaml, steps: 1}\n", "scenarios/s.yaml:5:22: faults.0.at.step: expected a step from 0"),
    ],
)
def test_mistakes_are_told_in_the_file_that_has_them(job: str, problem: str) -> None:
    Path("bamboo.yaml").write_text(JOB)
    Path("bad.yaml").write_text("stages: x\n")
    with pytest.raises(UserError) as raised:
        scenario(job)
    assert str(raised.value).startswith(problem)


def test_a_run_keeps_the_scenario_with_its_job() -> None:
    """A replay must not depend on a job file, which changes."""
    Path("bamboo.yaml").write_text(JOB + "results: elsewhere\n")
    Path("scenarios/s.yaml").write_text(HEAD + FAULTS)
    loaded = load_scenario("scenarios/s.yaml", kinds(), offered=ANYTHING.trusting(True))
    assert [each.field for each in loaded.foreign] == ["results"]
    record = scenario_record(loaded, whole_text(loaded))
    Path("bamboo.yaml").write_text("stages: 7\n")
    again = load_document(Path("again.yaml"), read_text(record.text, "again.yaml"), kinds(), record.seed)
    assert again.source.is_whole
    assert asdict(again.scenario.job) == asdict(loaded.scenario.job) | {"results": "results"}
    assert (again.faults, record.scenario) == (loaded.faults, "scenario.yaml")


@pytest.mark.parametrize(
    ("head", "job_from"), [("", "./bamboo.yaml"), ("job: ../mine.yaml\n", "./mine.yaml")], ids=["none", "a file"]
)
def test_a_matrix_has_a_job_as_a_scenario_has(head: str, job_from: str) -> None:
    """The stage `last` is that of the job file, the fields of a case override it, and cells carry the whole job."""
    Path("bamboo.yaml").write_text(JOB)
    Path("mine.yaml").write_text(JOB.replace("3", "4"))
    Path("scenarios/m.yaml").write_text(HEAD + head + MATRIX)
    found = read_matrix("scenarios/m.yaml", kinds())
    stages = 4 if head else 3
    jobs = [each.loaded.scenario.job for each in found.cells]
    assert [(each.stages, each.redundancy) for each in jobs] == [(stages, "lazy"), (stages, "eager")]
    assert [each.loaded.faults[0].in_words("stage") for each in found.cells] == [
        f"kill before {stages - 1}B4 of step 1"
    ] * 2
    assert found.job_from == f"{job_from} (overridden: redundancy)"
    assert f"a matrix of 2 cells; job: {job_from} (overridden: redundancy)\n" in said("validate", "scenarios/m.yaml")
    for each in found.cells:  # as a lane gets them, in another folder
        text = json.dumps(each.cell.values)
        again = load_document(Path("elsewhere/cell.yaml"), read_text(text, "cell.yaml"), kinds())
        assert (again.scenario, again.source.is_whole) == (each.loaded.scenario, True)


def test_a_setting_moves_the_last_stage_of_a_matrix() -> None:
    """With `--set stages=2` the stage `last` was still the one of the file, which the job no longer had."""
    Path("scenarios/m.yaml").write_text(HEAD + "job: {model: mlp, stages: 3}\n" + MATRIX)
    found = read_matrix("scenarios/m.yaml", kinds(), ["stages=2"])
    assert [each.loaded.faults[0].in_words("stage") for each in found.cells] == ["kill before 1B4 of step 1"] * 2


def test_the_default_job_is_written_out_too() -> None:
    """A kept scenario without a job would mean the job of the folder in which it is run again."""
    text = whole_text(scenario())
    Path("bamboo.yaml").write_text(JOB)
    assert load_document(Path("k.yaml"), read_text(text, "k.yaml"), kinds()).scenario.job == Job(device="cpu")
