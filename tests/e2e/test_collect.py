"""`bamboo collect`: the folders of two hosts, made from a real run by its workers, are the run again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bamboo_cli.app import app
from engine.core.checks.recoveries import recoveries
from engine.core.errors import NothingMatchedError, StorageError, UserError
from engine.core.history.run_history import RunHistory
from engine.core.history.run_records import ActionRecord, CommitRecord
from engine.core.job.job import Job
from engine.files.events_file import read_history
from engine.runtime.agent.session import run_session
from engine.runtime.process.fork_client import ForkServer
from tests.e2e.host_splits import BOUND_NS, split
from tests.kills import parse_kills

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
HOUR_NS = 3_600_000_000_000


def collected(*words: object) -> dict[str, Any]:
    """Returns what the command prints as JSON; an error is raised as it is."""
    ended = CliRunner().invoke(app, ["collect", *map(str, words), "--json"], catch_exceptions=False)
    return dict(json.loads(ended.stdout))


def actions(history: RunHistory) -> list[tuple[int, int, str, int]]:
    return sorted(
        (each.worker, each.step, each.action, each.end_ns - each.start_ns) for each in history.of(ActionRecord)
    )


def test_what_two_hosts_have_recorded_is_the_run(tmp_path: Path, server: ForkServer) -> None:
    run = tmp_path / "run"
    run.mkdir()
    args: dict[str, Any] = {"layers": 3, "forward_ms": 2, "backward_ms": 4, "width": 16}
    job = Job(model="timed", model_args=args, data_args={"features": 16}, microbatches=4, stages=3, steps=5)
    ending = run_session(job, run / "events.jsonl", run, faults=parse_kills(["3:1"], job), server=server)
    assert ending.error is None, ending.error
    whole = read_history(run / "events.jsonl", every_action=True)
    a, b = split(run, frozenset({1, 2}), HOUR_NS, b_knows=True)

    told = collected(a, b)
    assert told["reference"] == "a"
    assert [(each["node"], bool(each["incomplete"])) for each in told["hosts"]] == [("a", True), ("b", False)]
    merged = read_history(Path(told["run_dir"]) / "events.jsonl", every_action=True)
    assert [each.step for each in merged.of(CommitRecord)] == [each.step for each in whole.of(CommitRecord)]
    assert actions(merged) == actions(whole)
    (before,), (after,) = (recoveries(each.records_of_recoveries) for each in (whole, merged))
    assert str(after).partition("; training")[0] == str(before).partition("; training")[0]
    assert after.uncertain_ns and not before.uncertain_ns
    for phase, taken_ns in before.phases_ns.items():
        assert abs(after.phases_ns[phase] - taken_ns) <= after.uncertain_ns.get(phase, 0) + 2 * BOUND_NS
    assert collected(a, b) == told  # anew: what was merged before is not merged again

    # The host that coordinated is lost with its disk: its decisions are those that host b has heard.
    shutil.rmtree(a)
    told = collected(b)
    alone = read_history(b / "collected" / "events.jsonl", every_action=True)
    assert [each.step for each in alone.of(CommitRecord)] == [each.step for each in whole.of(CommitRecord)]
    assert [each.epoch for each in alone.epochs] == [each.epoch for each in whole.epochs]
    absent = {each["node"]: each["incomplete"] for each in told["hosts"]}
    assert absent == {"b": [], "a": ["no folder of it was given"]}
    _refusals(run, b)


def _refusals(run: Path, b: Path) -> None:
    with pytest.raises(NothingMatchedError, match="not a run folder"):
        collected(b, b / "steps")
    with pytest.raises(UserError, match=r"b: FOLDER: expected a folder of run '.+', found one of 'r'"):
        collected(run, b)
    other = shutil.copytree(b, b.parent / "c")
    lines = (other / "events.jsonl").read_text().splitlines(keepends=True)
    (other / "events.jsonl").write_text("".join([lines[0].replace('"steps":5', '"steps":6'), *lines[1:]]))
    with pytest.raises(UserError) as refused:
        collected(b, other)
    (problem,) = refused.value.problems
    assert (problem.field, problem.found, problem.line) == ("steps", "6", 1)
    assert problem.source == str(other / "events.jsonl")
    (b / "events.jsonl").write_text("".join([*lines[:3], '{"event":"unheard of"}\n', *lines[3:]]))
    with pytest.raises(StorageError, match=r"b/events\.jsonl:4: unknown event 'unheard of'"):
        collected(b)
