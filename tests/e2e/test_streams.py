"""Real kills of jobs that stream: no bit changes, and streamed work is not redone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.core.action import Op
from engine.core.faults.fault import WHENS
from engine.core.job.job import Job
from engine.runtime.process.fork_client import ForkServer
from tests.e2e.kill_forecast import PLACES, Kill, Sort, plan_kills
from tests.e2e.kill_runs import Runs, actions_of, differences, job_of
from tests.e2e.test_real_kills import STEPS_TO_HEAL
from tests.kills import parse_kills

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.usefixtures("shared_etcd")]

SORTS = tuple(Sort(Op.STREAM, when, place) for when in WHENS for place in PLACES)
SETTINGS = ("gpt-lazy", "gpt-eager-2", "resnet18-lazy", "kinds-lazy")
LONGEST = "resnet18-eager"


@pytest.fixture(name="runs", scope="module")
def _runs(tmp_path_factory: pytest.TempPathFactory, server: ForkServer) -> Runs:
    return Runs(tmp_path_factory.mktemp("streams"), server)


def plan_of(setting: str) -> tuple[Job, tuple[Kill, ...]]:
    """Returns a job that streams, and its kills; all settings together have every sort, some next to receipts."""
    job, number = replace(job_of(setting), log_every=1), (*SETTINGS, LONGEST).index(setting)
    wanted = [*SORTS[number :: len(SETTINGS)], Sort(Op.B, "after", "first")]
    return job, plan_kills(job, wanted, seed=31, most=4)


def test_streams_are_struck_everywhere() -> None:
    assert {kill.sort for setting in SETTINGS for kill in plan_of(setting)[1]} >= {*SORTS}


@pytest.mark.parametrize("setting", [*SETTINGS, pytest.param(LONGEST, marks=pytest.mark.soak)])
def test_a_death_changes_no_bit(runs: Runs, setting: str) -> None:
    job, kills = plan_of(setting)
    job = replace(job, steps=kills[-1].step + STEPS_TO_HEAL)
    assert runs.strike(job, kills) == [], [kill.text for kill in kills]


def test_what_has_been_streamed_is_not_redone(runs: Runs) -> None:
    """The forward before the third backward needs a forward that the shadow runs after it has received a stream."""
    job = Job(model="mlp", stages=2, microbatches=4, steps=5, validate_every=0, log_every=1)
    ending, events = runs.run(job, parse_kills(["3:1:B:2:after"], job))
    assert list(differences(ending, runs.twin(job))) == []
    done = list(actions_of(events, 0, 3))
    assert "1STREAM0" in done
    assert [each for each in done if each.startswith("1B")] in (["1B1", "1B2", "1B3"], ["1B2", "1B3"])
