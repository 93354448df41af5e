"""A case keeps the scenario as it was at the beginning of its run."""

from __future__ import annotations

import errno
import re
import resource
import shutil
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from engine.core.errors import EnvironmentLacksError, StorageError
from engine.core.history.run_records import ScenarioRecord
from engine.files.events_file import read_history
from engine.files.jobs.library import find_scenario
from engine.files.jobs.scenario_file import load_scenario
from engine.files.run_folder import create_run_folder, latest_name, run_names
from engine.harness.case import scenario_record, whole_text
from engine.harness.case_runner import in_new_folder
from engine.runtime.agent.scribe_work import scribe_for
from engine.runtime.faults.registry import kinds


def test_a_scenario_whose_file_is_gone_meanwhile_is_told_as_it_was(tmp_path: Path) -> None:
    path = shutil.copyfile(find_scenario("kill-first-stage"), tmp_path / "mine.yaml")
    text = path.read_text()
    loaded = load_scenario(str(path), kinds(), 7, [f"results={tmp_path}", "steps=9"])
    kept = whole_text(loaded)
    path.unlink()
    record = scenario_record(loaded, kept)
    assert record == ScenarioRecord(scenario="scenario.yaml", text=text, seed=7, settings=("steps=9",))


def test_a_run_that_fails_before_training_records_its_end(tmp_path: Path) -> None:
    """Such a run read as one whose launcher was killed: `bamboo status` ended with 69."""
    arguments = ["run", "--model", "mlp", "--etcd", "127.0.0.1:1", "--results", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "bamboo_cli", *arguments], check=False, capture_output=True, timeout=60
    )
    history = read_history(tmp_path / "latest" / "events.jsonl")
    assert history.training_ended is not None
    assert history.ended is not None
    assert (done.returncode, history.training_ended.exit_code, history.ended.exit_code) == (69, 69, 69)
    assert (history.ended.outcome, "127.0.0.1:1" in history.error) == ("failed", True)
    assert [*history.records][-1] == history.ended


def test_a_disk_that_is_full_is_said_of_the_file_that_was_to_be_written(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bamboo_cli", "inject", "--scenario", "kill-first-stage", "--results", str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
    )
    told = (
        r"job: the one in the scenario \(mlp on auto\)\n"
        rf"bamboo: cannot write '{tmp_path}/[^/]*/scenario.yaml': File too large\n"
    )
    assert (done.returncode, done.stdout) == (74, "")
    assert re.fullmatch(told, done.stderr), done.stderr
    assert [*tmp_path.iterdir()] == [], "a run that has recorded nothing leaves no folder, and no link to it"


@pytest.mark.parametrize("limit", [pytest.param(12, marks=pytest.mark.soak), 18, 96])
def test_too_few_descriptors_leave_nothing_or_a_run_with_its_end(tmp_path: Path, limit: int) -> None:
    """A run with so few read as one whose launcher was killed, or had an empty folder."""
    done = subprocess.run(
        [sys.executable, "-m", "bamboo_cli", "run", "--model", "mlp", "--results", str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)),
    )
    assert done.returncode in (4, 74), done.stderr
    for each in tmp_path.glob("2*"):
        ended = read_history(each / "events.jsonl").ended
        assert (ended and (ended.outcome, ended.exit_code)) == ("failed", done.returncode)


def _fail(results: Path, error: Exception) -> None:
    with scribe_for(is_in_process=False) as scribe, in_new_folder(scribe, str(results), "mlp", print) as folder:
        folder.run_json.write_text("{}")
        assert latest_name(results) == folder.path.name
        raise error


def test_an_error_before_the_first_record_leaves_nothing(tmp_path: Path) -> None:
    before = create_run_folder(tmp_path, "mlp", datetime(2026, 1, 1), "0a0a", str)
    for error, kind in ((OSError(errno.EMFILE, "many"), EnvironmentLacksError), (StorageError("full"), StorageError)):
        with pytest.raises(kind):
            _fail(tmp_path, error)
        assert (run_names(tmp_path), latest_name(tmp_path)) == ([before.path.name], before.path.name)
