"""Each command says of a file of another kind what it is and which command takes it; a run is repeated by run.json."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bamboo_cli.app import app
from engine.core.errors import UserError
from engine.core.job.job import Job
from engine.files.jobs.job_file import resolve_job
from tests.looped import looped

FILES = {
    "job.yaml": "model: mlp\nsteps: 6\n",
    "s.yaml": "version: 1\nname: x\nabout: z\njob: job.yaml\nfaults: [{at: {step: 1, stage: 1}, do: kill}]\n",
    "m.yaml": "version: 1\nname: x\nabout: z\njob: job.yaml\ncases:\n"
    "  - {name: a, faults: [{at: {step: 1, stage: 1}, do: kill}]}\n",
}
RECORD = {
    "job": asdict(Job(model="mlp", stages=3, optimizer_args={"weight_decay": 1e-05})),
    "origins": {"stages": "--stages"},
    "host": {"cpu": "\u00e9", "threads": 1},
}


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file of each kind in the current folder."""
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text)
    write_record()


def write_record(**more: object) -> None:
    Path("run.json").write_text(json.dumps(RECORD | {"result": None} | more, indent=2) + "\n")


@looped(
    ("command", "problem"),
    [
        ("run s.yaml", "s.yaml: expected a job or the record of a run, found a scenario (run it with: bamboo inject "),
        ("run m.yaml", "m.yaml: expected a job or the record of a run, found a matrix (run it with: bamboo matrix m."),
        ("run nan", "nan: expected a job file, found a scenario (run it with: bamboo inject nan)"),
        (
            "run matrix-smoke",
            "matrix-smoke: expected a job file, found a matrix (run it with: bamboo matrix matrix-smoke)",
        ),
        ("inject m.yaml", "m.yaml: expected a scenario, found a matrix (run it with: bamboo matrix m.yaml)"),
        ("inject job.yaml", "job.yaml: expected a scenario, found a job (run it with: bamboo run job.yaml)"),
        ("inject --scenario run.json", "run.json: expected a scenario, found the record of a run (run it with: "),
        (
            "matrix job.yaml",
            "job.yaml: expected a scenario or a matrix, found a job (run it with: bamboo run job.yaml)",
        ),
        ("inject", "inject: expected one scenario, found none (such as: bamboo inject kill-middle-stage)"),
        ("inject s.yaml --scenario m.yaml", "inject: expected one scenario, found s.yaml and m.yaml"),
    ],
)
def test_a_file_of_another_kind_is_named_with_its_command(command: str, problem: str) -> None:
    """`bamboo run` said of each key of a scenario that it is no field of a job."""
    result = CliRunner().invoke(app, command.split())
    assert isinstance(result.exception, UserError)
    assert str(result.exception).startswith(problem)
    assert len(result.exception.problems) == 1


def test_a_scenario_may_be_the_argument_of_inject() -> None:
    """It was refused for a missing --scenario, although `bamboo matrix` takes its file as an argument."""
    plans = [
        CliRunner().invoke(app, ["inject", *each, "--dry-run"]).output
        for each in (["s.yaml"], ["--scenario", "s.yaml"])
    ]
    assert plans[0] == plans[1] != ""


@looped("name", [*FILES, "run.json", "matrix-smoke", "kill-first-stage"])
def test_validate_takes_all_of_them(name: str) -> None:
    """`bamboo validate matrix-smoke` said that it is a matrix, and refused it."""
    assert f"{name}: valid: " in CliRunner().invoke(app, ["validate", name]).output


def test_a_run_is_repeated_by_its_record() -> None:
    """It was refused, although the record of a run promises all that it takes to repeat the run."""
    Path("bamboo.yaml").write_text("stages: 2\nmodel_args: {width: 8}\n")
    resolved = resolve_job(Path("run.json"), {"BAMBOO_SEED": "5", "HOME": "."}, ["steps=3"], {"lr": "0.5"})
    line = Path("run.json").read_text().partition('"stages"')[0].count("\n") + 1
    assert asdict(resolved.job) == RECORD["job"] | {"steps": 3, "lr": 0.5, "device": "cpu"}
    assert (resolved.origins["steps"], resolved.origins["stages"]) == ("--set", f"run.json:{line}:15")
    assert resolved.with_faults == ""


def test_a_repeated_run_begins_with_the_weights_that_it_had() -> None:
    Path("w.pt").write_bytes(b"other")
    write_record(job=RECORD["job"] | {"init": "w.pt"}, init={"file": "w.pt", "sha256": "1" * 64})
    ended = CliRunner().invoke(app, ["run", "run.json"])
    now = hashlib.sha256(b"other").hexdigest()
    assert isinstance(ended.exception, UserError)
    for text in (f"init: expected SHA-256 {'1' * 64} as in that run, found {now} of 'w.pt'", "--init FILE"):
        assert text in str(ended.exception)
    assert not list(Path("results").glob("*"))
    assert resolve_job(Path("run.json"), {}, [], {"init": "v.pt"}).init == ""


@pytest.mark.parametrize(
    ("more", "command"),
    [
        ({"kill": ["5:2", "9:0:F"]}, "bamboo run run.json --kill 5:2 --kill 9:0:F"),
        (
            {"scenario": {"seed": 3, "settings": ["steps=9"]}},
            "bamboo inject --scenario scenario.yaml --seed 3 --set steps=9",
        ),
    ],
)
def test_a_record_says_how_to_repeat_the_faults(more: dict[str, object], command: str) -> None:
    write_record(**more)
    assert resolve_job(Path("run.json"), {}).with_faults == command
    Path("latest").symlink_to(".")  # leads to another run as soon as the job is repeated
    assert resolve_job(Path("latest/run.json"), {}).with_faults == command
    told = CliRunner().invoke(app, ["run", "run.json", "--explain"]).stderr
    assert told == f"the job of that run, without its faults; with them: {command}\n"


def test_a_mistake_in_a_record_has_its_place() -> None:
    write_record(job={"stages": 3, "stage": 2})
    with pytest.raises(
        UserError, match=r"run.json:4:5: stage: expected a field of the job \(did you mean 'stages'\?\)"
    ):
        resolve_job(Path("run.json"), {})
