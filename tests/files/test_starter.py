"""The files of `bamboo init` can be read and run, and replace no file."""

from __future__ import annotations

import json
from email.message import Message
from importlib.metadata import PathDistribution, version
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from bamboo_cli.app import app
from engine.core.errors import StorageError, UserError
from engine.core.job.hugging_face import MODEL as HUGGING_FACE
from engine.core.job.hugging_face import TEXT
from engine.files.jobs.starter import (
    CONSTRAINTS,
    GITLAB,
    INCLUDES,
    JOB,
    MATRIX,
    REQUIREMENTS,
    SCENARIO,
    WORKFLOW,
    reference,
    starter,
    workflow,
    write_new,
)


def test_the_files_are_good_and_have_one_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scenario had a copy of the job, and the workflow ran matrices of another model."""
    monkeypatch.chdir(tmp_path)
    told = CliRunner().invoke(app, ["init", "--ci", "github"]).output
    assert told.splitlines()[:5] == [JOB, SCENARIO, MATRIX, WORKFLOW, CONSTRAINTS]
    assert "put a bamboo wheel into wheels/" in told  # this one is installed from a folder
    found = CliRunner().invoke(app, ["validate", JOB, SCENARIO, MATRIX])
    assert found.exit_code == 0, found.output
    assert found.output.splitlines() == [
        f"{JOB}: valid: a job: mlp in 1 x 3 stages, 20 steps",
        f"{SCENARIO}: valid: 1 fault, expects recovered; job: ./bamboo.yaml (overridden: steps)",
        f"{MATRIX}: valid: a matrix of 6 cells; job: ./bamboo.yaml (overridden: steps)",
    ]


def test_both_systems_run_the_same_commands_for_the_users_own_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands of GitHub's are executed by tests/e2e/test_starter_workflow.py."""
    monkeypatch.chdir(tmp_path)
    words = ["init", "--model", "mine:Net", "--data", "mine:data", "--stages", "2", "--ci"]
    for name in ("github", "gitlab"):
        told = CliRunner().invoke(app, [*words, name], catch_exceptions=False).output
    assert told.splitlines()[-1].endswith(f"bamboo matrix {MATRIX} --trust-code") and "next: set" not in told
    job = yaml.safe_load((tmp_path / JOB).read_text())
    assert (job["model"], job["data"], job["stages"]) == ("mine:Net", "mine:data", 2)
    steps = yaml.safe_load((tmp_path / WORKFLOW).read_text())["jobs"]["faults"]["steps"]
    *before, after = [each["run"].replace(WORKFLOW, GITLAB) for each in steps if "run" in each]
    gitlab = yaml.safe_load((tmp_path / GITLAB).read_text())["bamboo"]
    assert (gitlab["script"], gitlab["after_script"]) == (before, [after])
    assert yaml.safe_load((tmp_path / INCLUDES).read_text()) == {"include": [{"local": GITLAB}]}
    pins = (tmp_path / CONSTRAINTS).read_text().splitlines()
    assert f"numpy=={version('numpy')}" in pins and not any(each.startswith("bamboo") for each in pins)
    assert all("+" not in each for each in pins), "the build of torch is the runner's"
    with pytest.raises(UserError, match=r"--model: expected package.module:factory, found 'mine:Net-1'"):
        CliRunner().invoke(app, ["init", "--model", "mine:Net-1"], catch_exceptions=False)
    told = CliRunner().invoke(app, ["init", "--model", "mine:Other"], catch_exceptions=False).output
    assert f"next: set model: mine:Other in {JOB}" in told


def test_a_model_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The options of `bamboo run --hf` were none of `bamboo init`, and the runner had no transformers."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "novel.txt").write_text("words")
    words = ["init", "--hf", "tiny", "--hf-random", "--data", "novel.txt", "--ci", "github"]
    CliRunner().invoke(app, words, catch_exceptions=False)
    job = yaml.safe_load((tmp_path / JOB).read_text())
    assert (job["model"], job["model_args"]) == (HUGGING_FACE, {"path": "tiny", "random": True})
    assert (job["data"], job["data_args"]) == (TEXT, {"file": "novel.txt", "tokenizer": "tiny"})
    assert (tmp_path / REQUIREMENTS).read_text().split() == ["transformers", "accelerate", "datasets"]
    found = CliRunner().invoke(app, ["validate", JOB, SCENARIO, MATRIX])
    assert found.exit_code == 0, found.output
    with pytest.raises(UserError, match="--hf: expected no other model with it, found 'mine:Net'"):
        CliRunner().invoke(app, ["init", "--hf", "tiny", "--model", "mine:Net"], catch_exceptions=False)


def test_without_a_workflow(tmp_path: Path) -> None:
    write_new(tmp_path, starter())
    assert not (tmp_path / ".github").exists()


def test_what_exists_is_kept_and_the_rest_is_written(tmp_path: Path) -> None:
    """A project with a job got no workflow: nothing was written if one of the files existed."""
    (tmp_path / JOB).write_text("mine")
    told = CliRunner().invoke(app, ["init", str(tmp_path)]).output
    assert told.startswith(f"{tmp_path / JOB} (kept: it exists)\n{tmp_path / SCENARIO}\n")
    assert (tmp_path / JOB).read_text() == "mine"


def test_a_dangling_link_is_a_file_too(tmp_path: Path) -> None:
    (tmp_path / JOB).symlink_to(tmp_path / "nowhere")
    assert tmp_path / JOB not in write_new(tmp_path, starter())
    assert not (tmp_path / "nowhere").exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "scenarios").write_text("")
    with pytest.raises(StorageError, match=r"cannot (make|write)"):
        write_new(tmp_path, starter())


GIT = {"url": "https://h/o/bamboo", "vcs_info": {"vcs": "git", "commit_id": "abc"}}


@pytest.mark.parametrize(
    ("origin", "projects", "expected"),
    [
        (GIT, [], "git+https://h/o/bamboo@abc"),
        (GIT | {"url": "https://me:secret@h/o/bamboo"}, [], ""),
        ({"url": "https://h/bamboo.whl", "archive_info": {}}, [], "https://h/bamboo.whl"),
        (
            {"url": "file:///home/me/bamboo", "dir_info": {}},
            ["Docs, https://d", "Source, https://h/o"],
            "git+https://h/o",
        ),
        ({"url": "file:///home/me/bamboo.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}}, [], ""),
        (None, [], ""),
    ],
)
def test_the_workflow_names_the_place_of_this_installation(
    tmp_path: Path, origin: object, projects: list[str], expected: str
) -> None:
    """It named a package of the public index that does not exist, and whose name anybody could take."""
    metadata = Message()
    for each in projects:
        metadata["Project-URL"] = each
    (tmp_path / "METADATA").write_text(metadata.as_string())
    if origin is not None:
        (tmp_path / "direct_url.json").write_text(json.dumps(origin))
    assert reference(PathDistribution(tmp_path)) == expected
    assert yaml.safe_load(workflow(expected))["env"]["BAMBOO"] == expected
    assert "bamboo-train" not in workflow(expected)


def test_a_command_gets_a_scenario_and_the_same_commands_on_both_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of GitHub are executed by tests/e2e/test_starter_workflow.py."""
    monkeypatch.chdir(tmp_path)
    command = "torchrun --nproc-per-node 2 'my train.py' {folder}"
    for name in ("github", "gitlab"):
        words = ["init", "--command", command, "--limit", "90s", "--ci", name]
        told = CliRunner().invoke(app, words, catch_exceptions=False).output
    assert told.splitlines()[-1] == f"next: bamboo inject {SCENARIO} --trust-code"
    assert not (tmp_path / JOB).exists()
    found = CliRunner().invoke(app, ["validate", SCENARIO])
    assert found.output == f"{SCENARIO}: valid: 1 fault, expects recovered; launcher: torchrun\n"
    scenario = yaml.safe_load((tmp_path / SCENARIO).read_text())
    assert scenario["command"] == ["torchrun", "--nproc-per-node", "2", "my train.py", "{folder}"]
    assert scenario["faults"][0]["at"]["rank"] == 1 and scenario["expect"]["recovery"] == {"max": "90s"}
    steps = yaml.safe_load((tmp_path / WORKFLOW).read_text())["jobs"]["faults"]["steps"]
    *before, after = [each["run"].replace(WORKFLOW, GITLAB) for each in steps if "run" in each]
    gitlab = yaml.safe_load((tmp_path / GITLAB).read_text())["bamboo"]
    assert (gitlab["script"], gitlab["after_script"]) == (before, [after])
    refused = CliRunner().invoke(app, ["init", "--command", "torchrun 'a", "--limit", "3", "--model", "gpt"])
    assert isinstance(refused.exception, UserError)
    assert [each.field for each in refused.exception.problems] == ["--model", "--limit", "--command"]
