"""The phases and the stall of a recovery against the commits of the same run; and the source of the state."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import pytest

from engine.core.checks.recoveries import recoveries
from engine.core.history.run_history import RunHistory
from engine.core.history.run_records import CommitRecord
from engine.core.job.job import Job
from engine.files.events_file import read_history
from engine.report.load import RunTables, load
from engine.runtime.agent.session import run_session
from engine.runtime.process.fork_client import ForkServer
from tests.kills import parse_kills

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180), pytest.mark.usefixtures("shared_etcd")]


def run(server: ForkServer, folder: Path, kills: list[str], **fields: Any) -> RunHistory:
    """Runs a job whose stages sleep, with kills, and returns its history."""
    job = Job(
        model="timed",
        model_args={"layers": fields["stages"], "forward_ms": 3, "backward_ms": 6, "width": 16},
        data_args={"features": 16},
        microbatches=4,
        validate_every=0,
        **fields,
    )
    ending = run_session(job, folder / "events.jsonl", folder, faults=parse_kills(kills, job), server=server)
    assert ending.error is None, ending.error
    return read_history(folder / "events.jsonl")


def test_phases_add_up_and_a_stall_is_the_gap_less_a_usual_step(tmp_path: Path, server: ForkServer) -> None:
    history = run(server, tmp_path, ["5:1:F:1", "10:2:F:1", "15:3:F:1"], stages=5, steps=17)
    found = recoveries(history.records)
    assert [(each.step, each.rung) for each in found] == [(5, "shadow"), (10, "shadow"), (15, "shadow")]
    commits_ns = {each.step: each.at_ns for each in history.of(CommitRecord)}
    lasted_ns = {step: commits_ns[step] - commits_ns[step - 1] for step in commits_ns if step}
    for each in found:
        assert each.pause_ns is not None and each.merged_ns is not None and each.stall is not None
        assert sum(each.phases_ns.values()) == each.pause_ns
        assert each.begin_ns + each.pause_ns + each.merged_ns == each.resume_ns == commits_ns[each.step]
        usual_ns = median(lasted_ns[step] for step in range(each.step - (4 if each.step == 5 else 3), each.step))
        longer_ns, stall_ns = lasted_ns[each.step] - int(usual_ns), each.stall.least_ns
        assert stall_ns == each.stall.most_ns
        # It is never less than the time without any action, which lies in the pause.
        assert stall_ns == longer_ns or longer_ns < stall_ns <= each.pause_ns
    table = load(history).recovery
    assert (table["plan_bytes"] > 0).all() and (table["heal_bytes"] > 0).all()


def test_without_shadows_the_state_comes_from_another_pipeline(tmp_path: Path, server: ForkServer) -> None:
    fields = {"stages": 2, "pipelines": 2, "redundancy": "reroute", "steps": 4}
    run_of: RunTables = load(run(server, tmp_path, ["1:1:B:1"], **fields))
    (row,) = run_of.recovery.to_dict("records")
    assert row["rung"] == "other pipeline"
    assert row["verdict"].startswith("worker 1 was killed (SIGKILL)")  # and its last action, if known
    assert row["heal_bytes"] > 0
