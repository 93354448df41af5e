"""The schedule changes while a run goes on, and workers die before, between and behind the changes: the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.core.checks.trajectory import trajectory_hash
from engine.core.history.run_history import RunHistory
from engine.core.history.run_records import EpochRecord, TensorsRecord
from engine.core.job.job import Job
from engine.core.program.schedule_csv import rows_to_csv
from engine.core.program.schedule_search import even_profile, searched
from engine.core.protocol.events import WantedSchedule
from engine.core.protocol.schedule_change import change_of
from engine.files.events_file import read_history
from engine.runtime.agent.agent import Agent
from engine.runtime.agent.session import run_session
from engine.runtime.process.clock import now_ns
from engine.runtime.process.thread_server import ThreadServer
from tests.kills import parse_kills
from tests.runtime.small_jobs import NORMED, small_job
from tests.runtime.thread_runs import with_store_double

JOB = small_job(
    **NORMED, stages=4, stages_per_worker=2, schedule="interleaved", pipelines=2, steps=14, check_pure=False
)


@contextmanager
def using(schedules: Mapping[int, str]) -> Iterator[None]:
    """Tells the coordinator the wanted schedule when a step is committed."""
    decide, left = Agent.decide, dict(schedules)

    def telling(self: Agent, given: Any) -> Any:
        found = decide(self, given)
        if (name := left.pop(self.node.state.committed, None)) is not None:
            schedule, owners = change_of(self.run_state.job, self.node.state, name)
            decide(self, WantedSchedule(now_ns(), schedule, "a test", owners))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Agent, "decide", telling)
        yield


def run(job: Job, folder: Path, schedules: Mapping[int, str], kills: tuple[str, ...] = ()) -> tuple[str, RunHistory]:
    """Returns the hash of the trajectory and the records of a run."""
    folder.mkdir()
    with ThreadServer() as server, with_store_double(), using(schedules):
        ending = run_session(job, folder / "events.jsonl", folder, server=server, faults=parse_kills(kills, job))
    assert (ending.outcome, ending.error) == ("finished", None)
    return trajectory_hash(ending.view.run_state.rows), read_history(folder / "events.jsonl")


@pytest.fixture(scope="module")
def still(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the trajectory of the job under its own schedule."""
    return run(replace(JOB, redundancy="lazy"), tmp_path_factory.mktemp("runs") / "still", {})[0]


@pytest.mark.parametrize("kills", [(), ("1:1:F:1", "7:2:F:1")], ids=["whole", "with deaths"])
def test_slots_move_for_another_placement_and_back_with_the_same_bits(
    tmp_path: Path, still: str, kills: tuple[str, ...]
) -> None:
    # The trial of the layers tells the sizes of residuals, and so which ones go to the host.
    job = replace(JOB, redundancy="lazy", offload="host", offload_time=0.1, check_pure=True)
    moved, history = run(job, tmp_path / "moved", {1: "zbv", 9: "own"}, kills)
    assert moved == still
    epochs = [each for each in history.of(EpochRecord) if not kills or each.verdict or each.planned]
    schedules = [each.schedule for each in epochs]
    assert schedules[0] == schedules[-1] == ""
    assert "zbv" in schedules
    assert any(of[-1] for each in history.of(TensorsRecord) for of in each.peak), "residuals were on the host"
    if kills:
        assert [each.schedule for each in epochs if each.verdict] == ["", "zbv"]
    else:
        owners = {each.owners for each in epochs if each.schedule == "zbv"}
        assert (0, 1, 1, 0, 2, 3, 3, 2) in owners, "all slots have moved to the places of zbv"
        assert epochs[-1].owners == (0, 1, 0, 1, 2, 3, 2, 3)


def test_a_step_of_another_schedule_is_repaired_by_it(tmp_path: Path) -> None:
    job = replace(JOB, stages_per_worker=1, schedule="1f1b", pipelines=1, steps=10)
    still, _ = run(job, tmp_path / "still", {})
    changed, history = run(job, tmp_path / "changed", {1: "zb1p", 5: "own"}, ("4:2:F:2",))
    assert changed == still
    assert [each.schedule for each in history.of(EpochRecord)] == ["", "zb1p", "zb1p", ""]
    assert [bool(each.verdict) for each in history.of(EpochRecord)] == [False, False, True, False]


def test_slices_change_their_schedule_between_deaths_and_run_what_was_found_with_the_same_bits(tmp_path: Path) -> None:
    job = small_job(
        model="gpt",
        model_args={"width": 16, "heads": 2, "depth": 8},
        stages=6,
        stages_per_worker=2,
        schedule="interleaved",
        slices=2,
        microbatches=4,
        steps=10,
        offload="host",
        offload_time=0.1,
    )
    still, _ = run(job, tmp_path / "still", {})
    changed, history = run(job, tmp_path / "changed", {1: "zbv", 6: "own"}, ("1:1:F:1", "4:2:F:3"))
    assert changed == still
    assert "zbv" in [each.schedule for each in history.of(EpochRecord) if each.verdict]
    found = searched(6, 2, 4, even_profile(6, 1, 1, 1, 0.2).times(1 / 2), 1.5, 20_000, slices=2)
    placement = next(row.placement for row in found.rows if row.schedule == "found")
    of_file = replace(job, schedule=rows_to_csv(found.lists), placement=placement)
    assert run(of_file, tmp_path / "found", {}, ("3:1:F:2",))[0] == still
