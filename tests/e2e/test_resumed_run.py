"""A run of real processes whose state is lost goes on from a checkpoint; then it stops, and its command resumes it."""

from __future__ import annotations

import csv
import json
import shlex
from dataclasses import replace
from pathlib import Path

from engine.core.errors import ExitCode
from engine.core.history.process_records import ResumedRecord
from engine.core.job.job import Job
from engine.files.events_file import read_history
from tests.e2e.conftest import Launch
from tests.runtime.thread_runs import run_in_threads

JOB = ("run", "--model", "mlp", "--stages", "4", "--steps", "12", "--microbatches", "4")
TWICE = ("--kill", "5:1", "--kill", "5:2:F:0", "--kill", "8:1", "--kill", "8:2:F:0")


def rows_of(folder: Path) -> dict[tuple[str, str], list[str]]:
    with open(folder / "trajectory.csv") as file:
        return {(row[0], row[1]): row[2:] for row in list(csv.reader(file))[1:]}


def test_lost_neighbours_cost_the_steps_behind_the_checkpoint_and_then_the_command_resumes(
    launch: Launch, tmp_path: Path
) -> None:
    keeping = ("--checkpoint-every", "2", "--restarts", "1", "--results", str(tmp_path / "runs"))
    ended = launch(*JOB, *keeping, *TWICE, "--no-twin").wait()
    assert ended.code == ExitCode.STOPPED_RESUMABLE, ended.stderr
    (first,) = (tmp_path / "runs").glob("2*")
    history = read_history(first / "events.jsonl")
    assert [(each.step, each.lost) for each in history.of(ResumedRecord)] == [(3, 1)]
    assert "it has used its 1 restart per hour" in ended.stderr
    (command,) = {line.split("next   ")[1] for line in ended.stderr.splitlines() if "next   bamboo run" in line}
    resumed = launch(*shlex.split(command)[1:], "--json").wait()
    assert resumed.code == ExitCode.OK, resumed.stderr
    summary = json.loads(resumed.stdout)
    assert (summary["steps"], summary["resumed_after"]) == (12, 7)
    found = rows_of(first) | rows_of(Path(summary["run_dir"]))
    job = Job(model="mlp", stages=2, steps=12, microbatches=4)
    whole = {
        (str(row.step), str(row.layer)): list(row.texts())[2:]
        for row in run_in_threads(replace(job, validate_every=0)).view.run_state.rows
    }
    assert {key: row for key, row in found.items() if whole[key] != row} == {}
    assert found.keys() == whole.keys()
