"""What `bamboo init` writes can be read and run, and takes nobody's file away."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from engine.core.errors import StorageError, UserError
from engine.files.job_file import resolve_job
from engine.files.scenario_file import load_scenario
from engine.files.starter import INSTALL, JOB, SCENARIO, WORKFLOW, starter, workflow, write_new
from engine.runtime.faults.registry import kinds

ROOT = Path(__file__).parents[2]


def test_the_files_are_good(tmp_path: Path) -> None:
    assert write_new(tmp_path, starter(with_workflow=True)) == [tmp_path / name for name in (JOB, SCENARIO, WORKFLOW)]
    assert resolve_job(None, {}, project=tmp_path).job.stages == 3
    assert load_scenario(str(tmp_path / SCENARIO), kinds()).scenario.name == "first"
    jobs = yaml.safe_load((tmp_path / WORKFLOW).read_text())["jobs"]
    assert jobs["cells"]["strategy"]["matrix"] == "${{ fromJSON(needs.plan.outputs.matrix) }}"
    assert next(each["run"] for each in jobs["plan"]["steps"] if "run" in each) == INSTALL


def test_without_a_workflow(tmp_path: Path) -> None:
    write_new(tmp_path, starter(with_workflow=False))
    assert not (tmp_path / ".github").exists()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / JOB).write_text("mine")
    with pytest.raises(UserError, match="no such file yet"):
        write_new(tmp_path, starter(with_workflow=True))
    assert [path.name for path in tmp_path.iterdir()] == [JOB]
    assert (tmp_path / JOB).read_text() == "mine"


def test_a_dangling_link_is_a_file_too(tmp_path: Path) -> None:
    (tmp_path / JOB).symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError):
        write_new(tmp_path, starter(with_workflow=False))


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "scenarios").write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        write_new(tmp_path, starter(with_workflow=False))


def test_our_own_workflow_is_that_of_users() -> None:
    assert (ROOT / WORKFLOW).read_text() == workflow("python -m pip install --constraint constraints.txt .")
