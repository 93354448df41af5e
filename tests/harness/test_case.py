"""A case keeps the scenario as it was at the beginning of its run."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from pathlib import Path

from engine.core.history.run_records import ScenarioRecord
from engine.files.events_file import read_history
from engine.files.scenarios.library import find_scenario
from engine.files.scenarios.scenario_file import load_scenario
from engine.harness.cases.case import scenario_record
from engine.runtime.faults.registry import kinds


def test_a_scenario_whose_file_is_gone_meanwhile_is_told_as_it_was(tmp_path: Path) -> None:
    path = shutil.copyfile(find_scenario("kill-first-stage"), tmp_path / "mine.yaml")
    text = path.read_text()
    loaded = load_scenario(str(path), kinds(), 7, [f"results={tmp_path}", "steps=9"])
    copy = path.rename(tmp_path / "scenario.yaml")
    record = scenario_record(loaded, copy)
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
    (folder,) = (each for each in tmp_path.iterdir() if not each.is_symlink())
    told = f"job: of the scenario (mlp on auto)\nbamboo: cannot write '{folder / 'scenario.yaml'}': File too large\n"
    assert (done.returncode, done.stdout, done.stderr) == (74, "", told)
