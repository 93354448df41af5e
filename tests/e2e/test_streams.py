"""Real kills of jobs that stream: no bit changes, and what has been streamed is not redone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from engine.core.action import Op
from engine.core.job import Job
from engine.core.kill_text import parse_kills
from engine.runtime.children import ForkServer
from tests.e2e.kill_forecast import Sort, plan_kills
from tests.e2e.kill_runs import Runs, actions_of, differences, job_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

SORTS = [Sort(Op.STREAM, "before", "middle"), Sort(Op.STREAM, "after", "last"), Sort(Op.B, "after", "first")]


@pytest.fixture(name="runs", scope="module")
def _runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with ForkServer() as server:
        yield Runs(tmp_path_factory.mktemp("streams"), server)


@pytest.mark.parametrize("setting", ["gpt-lazy", "gpt-eager-2", "resnet18-lazy", "resnet18-eager"])
def test_a_death_changes_no_bit(runs: Runs, setting: str) -> None:
    job = replace(job_of(setting), log_every=1)
    kills = plan_kills(job, SORTS, seed=1, most=4)
    assert {*SORTS} <= {kill.sort for kill in kills}
    assert runs.strike(job, kills) == [], [kill.text for kill in kills]


def test_what_has_been_streamed_is_not_redone(runs: Runs) -> None:
    """The forward that comes before the third backward needs one that the shadow runs after it has taken a stream."""
    job = Job(model="mlp", stages=2, microbatches=4, steps=5, validate_every=0, log_every=1)
    ending, events = runs.run(job, parse_kills(["3:1:B:2:after"], job))
    assert list(differences(ending, runs.twin(job))) == []
    done = list(actions_of(events, 0, 3))
    assert "1STREAM0" in done
    assert [each for each in done if each.startswith("1B")] in (["1B1", "1B2", "1B3"], ["1B2", "1B3"])
