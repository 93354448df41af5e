"""What a host that takes over knows of the run: its name, and what each newcomer is told."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.core.faults.scenario import Scenario
from engine.core.job.job import Job
from engine.core.messages import PartitionMessage, WelcomeMessage
from engine.files.jobs.checkpoint_place import places_of
from engine.files.run_folder import CHECKPOINTS_FOLDER, RunFolder
from engine.harness.case import Case, facts_text
from engine.harness.host_agent import home_of, taught, wait_for_words

OWN = Path("/h2/results/mlp-h2-2")


def welcome(worker: int, checkpoints: str = "", start: str = "ab") -> WelcomeMessage:
    return WelcomeMessage(worker, {}, (0,), ((),), (0,), 1, (), checkpoints=checkpoints, run="mlp-1", start=start)


@pytest.mark.parametrize("place", ["", "/shared/kept", "s3://bucket/kept", "kept"])
def test_checkpoints_go_on_under_the_name_with_which_the_run_began(place: str) -> None:
    assert home_of(welcome(0, place), OWN).name == "mlp-1"


def test_checkpoints_in_the_folder_of_the_run_stay_there() -> None:
    first = Path("/h1/results/mlp-1")
    assert home_of(welcome(0, str(first / CHECKPOINTS_FOLDER)), OWN) == first


def test_a_host_that_knows_of_no_worker_has_its_own_name() -> None:
    assert home_of(None, OWN) == OWN


def test_what_newcomers_are_told_is_that_of_the_last_start() -> None:
    cut = [PartitionMessage((0, each)) for each in range(2)]
    hosts = {
        "a": [welcome(0), welcome(2), cut[0]],
        "b": [welcome(1)],  # it was told no cut yet
        "c": [welcome(3, start="cd"), cut[1], cut[1]],  # it has no worker since all began again
        "d": [],
    }
    away = {name: SimpleNamespace(past_orders=each) for name, each in hosts.items()}
    welcomes, place = taught(cast(Any, away), {"a", "b"})
    assert (sorted(welcomes), place) == ([0, 1, 2], [cut[0]])
    assert {each.start for each in welcomes.values()} == {"ab"}


def test_the_folder_of_the_next_host_leads_to_all_checkpoints_of_the_run(tmp_path: Path) -> None:
    job = Job(model="mlp", checkpoints=str(tmp_path / "kept"))
    folder = RunFolder(tmp_path / "mlp-h2-2")
    folder.path.mkdir()
    folder.run_json.write_text(facts_text(Case("mlp", Scenario("mlp", "", job, ()), begun_as="mlp-1"), "mlp-h2-2"))
    (place,) = places_of(folder)
    assert (place.run, place.asked) == ("mlp-1", "mlp-h2-2")


def test_a_host_may_come_late_if_the_one_that_waits_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """All time is over at the first look; the words that came meanwhile are taken after it."""
    came, late, never = (threading.Event() for _ in range(3))
    came.set()
    now_s = iter(range(0, 10**6, 100))
    monkeypatch.setattr("time.monotonic", lambda: float(next(now_s)))

    looks = iter(range(3))

    def comes(patience_s: float) -> bool:
        if next(looks, None) is None:
            late.set()
        return late.is_set()

    monkeypatch.setattr(late, "wait", comes)
    hosts = [SimpleNamespace(resent=each) for each in (came, late, never)]
    monkeypatch.setattr(never, "wait", lambda patience_s: False)
    wait_for_words(cast(Any, hosts))
    assert [each.is_set() for each in (came, late, never)] == [True, True, False]
