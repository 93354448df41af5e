"""`bamboo validate` and `bamboo schema`: their outputs and exit codes; the library is valid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from bamboo_cli.schema import schema
from bamboo_cli.validate import validate
from engine.core.faults.fault import ANY_HOSTS
from engine.files.jobs.forms import scenario_schema
from engine.files.jobs.library import library, scenario_names
from engine.files.jobs.scenario_file import load_scenario
from engine.runtime.faults.registry import kinds

APP = typer.Typer()
APP.command()(validate)
APP.command()(schema)

GOOD = "version: 1\nname: x\nabout: z\nfaults:\n  - {at: {step: 1, stage: 1}, do: kill}\n"


def call(*arguments: str) -> Result:
    return CliRunner().invoke(APP, [*arguments])


def test_a_good_file_and_a_bad_one(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(GOOD)
    bad.write_text(GOOD.replace("kill", "kil"))
    result = call("validate", str(good))
    text = f"{good}: valid: 1 fault, expects recovered; job: the default one (gpt on auto)\n"
    assert (result.exit_code, result.stdout) == (0, text)
    good.write_text(f"{GOOD}expect: {{steps_lost: 80}}\n")
    assert (
        call("validate", str(good)).stdout == f"{text[:-1]}; this expectation holds without any fault: steps_lost 80\n"
    )
    result = call("validate", str(bad), str(good))
    assert result.exit_code == 2
    assert f"bamboo: {bad}:5:35: faults.0.do: expected one of" in result.stderr
    assert f"{good}: valid" in result.stdout


def test_json_has_every_file_with_its_problems(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(GOOD.replace("stage: 1", "stage: 7"))
    result = call("validate", "--json", "kill-middle-stage", str(bad), "no-such-name")
    assert (result.exit_code, result.stderr) == (2, "")  # the file is worse than the name
    said = json.loads(result.stdout)
    assert said["exit_code"] == 2
    first, second, third = said["files"]
    assert first["valid"] and first["faults"] == ["kill before 2B2 of step 3"]
    assert not second["valid"]
    assert second["problems"][0] | {"source": ""} == {
        "field": "faults.0.at.stage",
        "expected": "a stage from 0 to 3",
        "found": "7",
        "hint": "the job has 4",
        "source": "",
        "line": 5,
        "column": 27,
    }
    assert third["error"].startswith("no scenario, matrix or job is called 'no-such-name'")
    assert [each["exit_code"] for each in said["files"]] == [0, 2, 5]


@pytest.mark.parametrize("arguments", [["no-such-name"], ["kill-middle-stage", "no-such-name"]])
def test_a_name_that_is_none_matches_nothing(arguments: list[str]) -> None:
    assert call("validate", *arguments).exit_code == 5


@pytest.mark.parametrize(
    "path",
    [each for each in sorted(library().glob("matrix-*.yaml")) if "axes:" in each.read_text()],
    ids=lambda path: path.stem,
)
def test_a_matrix_is_known_by_its_form(path: Path, tmp_path: Path) -> None:
    result = call("validate", str(path))
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"{path}: valid: a matrix of " in result.stdout
    bad = tmp_path / "m.yaml"
    bad.write_text(path.read_text().replace("cases:", "casse:"))
    result = call("validate", str(bad))
    assert result.exit_code == 2
    assert "casse: expected a field that is known here, found 'casse' (did you mean 'cases'?)" in result.stderr


def test_a_seed_chooses_the_random_faults(tmp_path: Path) -> None:
    path = tmp_path / "random.yaml"
    path.write_text(GOOD.replace("at: {step: 1, stage: 1}", "every: {mtbf: 5 steps, count: 3}"))
    drawn = [
        json.loads(call("validate", "--json", "--seed", seed, str(path)).stdout)["files"][0]["faults"]
        for seed in ("1", "1", "2")
    ]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("name", scenario_names())
def test_every_scenario_of_the_library_is_valid(name: str) -> None:
    loaded = load_scenario(name, kinds(), on=ANY_HOSTS)
    assert loaded.faults
    assert loaded.scenario.expect.leftovers == "none"
    assert loaded.scenario.expect.trajectory == "identical"


def test_the_schema_in_the_library_is_the_one_that_is_printed(tmp_path: Path) -> None:
    """After a change of the schema, write it again: bamboo schema --output scenarios/scenario.schema.json."""
    assert json.loads(call("schema", "matrix").stdout) == json.loads((library() / "matrix.schema.json").read_text())
    printed = json.loads(call("schema").stdout)
    assert printed == scenario_schema(kinds()) == json.loads((library() / "scenario.schema.json").read_text())
    path = tmp_path / "job.json"
    assert call("schema", "job", "--output", str(path)).exit_code == 0
    assert json.loads(path.read_text()) == json.loads(call("schema", "job").stdout)
    assert call("schema", "nonsense").exit_code == 2


def test_a_job_is_known_by_its_form_and_checked_too(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("model: mlp\nname: small\npipelines: 2\nsteps: 5\n")
    assert call("validate", str(path)).stdout == f"{path}: valid: a job: mlp in 2 x 4 stages, 5 steps\n"
    (said,) = json.loads(call("validate", "--json", str(path)).stdout)["files"]
    assert (said["job"]["model"], said["job"]["steps"]) == ("mlp", 5)
    path.write_text("model: mlp\nmodel_args: {widht: 3}\nstage: 2\n")
    result = call("validate", str(path))
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        f"bamboo: {path}:2:21: model_args.widht: expected one of depth, dropout, width, found 'widht' "
        "(did you mean 'width'?)",
        f"bamboo: {path}:3:1: stage: expected a field of the job (did you mean 'stages'?)",
    ]


def test_an_empty_file_may_have_been_meant_as_any(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing yet\n")
    result = call("validate", str(path))
    assert result.exit_code == 2
    assert result.stderr == f"bamboo: {path}:1:1: expected a scenario, a matrix or a job, found an empty file\n"


def test_a_scenario_with_nothing_but_its_job_is_no_job(tmp_path: Path) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text("name: x\njob: {steps: 3}\n")
    assert "expected faults or host_faults, found none of them" in call("validate", str(path)).stderr


def test_a_file_that_is_no_yaml_is_no_unknown_name(tmp_path: Path) -> None:
    """A module of the user's was looked for in the library, and 29 names were listed."""
    path = tmp_path / "moons.py"
    path.write_text("x = 1\n")
    result = call("validate", str(path))
    expected = "a scenario, matrix or job file (.yaml, .yml, .json), found a file with the suffix .py"
    assert (result.exit_code, result.stderr) == (2, f"bamboo: {path}: expected {expected}\n")
