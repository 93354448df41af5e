"""Kills of models whose forwards read state of earlier forwards: all combinations of three models, schedules and kills.

`make test` has each pair of them, in nine combinations; the soak has all. Rule: all models and schedules have the
same kills: one after the last log, one at the vote, one in the last backward of a middle stage. Each run is compared
with its twin.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest

from engine.core.faults.fault import After, Fault, Worker
from engine.core.job.job import Job
from engine.core.program.schedules import SCHEDULES
from engine.runtime.process.fork_client import ForkServer
from tests.e2e.kill_runs import Runs, differences, lives
from tests.kills import parse_kill

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.usefixtures("shared_etcd")]

STAGES, MICROBATCHES = 4, 4
SMALL: dict[str, Any] = {
    "stages": STAGES,
    "microbatches": MICROBATCHES,
    "microbatch_size": 2,
    "steps": 5,
    "validate_every": 3,
    "audit": 1,
    "check_pure": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "spectral": {"model": "tests.e2e.state_models:of_kind", "model_args": {"kind": "spectral"}},
    "aliased": {"model": "tests.e2e.state_models:of_kind", "model_args": {"kind": "aliased"}},
    "all-kinds": {"model": "tests.e2e.state_models:all_kinds"},
}
PLACED: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b"},
    "zbv": {"schedule": "zbv", "stages_per_worker": 2},
    "interleaved": {"schedule": "interleaved", "stages_per_worker": 2},
}
LAST = MICROBATCHES - 1
KILLS = ("3:2:LOG", "2:1:COMMIT:before", f"4:2:{{backward}}:{LAST}:after")


@pytest.fixture(name="runs", scope="module")
def _runs(tmp_path_factory: pytest.TempPathFactory, server: ForkServer) -> Runs:
    """Returns a runner of jobs; it runs each twin once."""
    return Runs(tmp_path_factory.mktemp("kills"), server)


def strike(runs: Runs, job: Job, *faults: Fault) -> None:
    """Runs faults that kill one worker, and checks that all else equals the twin."""
    ending, events = runs.run(job, faults, silent_after="30s", hang_after="30s")
    (*_, dies) = faults
    victims = [event["of"] for event in events if event["event"] == "fault" and event["fault"] == dies.id]
    assert len(victims) == 1
    assert [*differences(ending, runs.twin(job)), *lives(events, victims)] == []


ALL = [*product(MODELS, PLACED, KILLS)]
SQUARE = [(a, b, c) for i, a in enumerate(MODELS) for j, b in enumerate(PLACED) for c in [KILLS[(i + j) % 3]]]


def test_there_are_27_combinations_and_every_pair_in_nine() -> None:
    assert len(ALL) == 27
    for one, other in combinations(range(3), 2):
        assert {(each[one], each[other]) for each in SQUARE} == {(each[one], each[other]) for each in ALL}
    assert PLACED.keys() <= SCHEDULES.keys()


@pytest.mark.parametrize(
    ("model", "schedule", "kill"),
    [each if each in SQUARE else pytest.param(*each, marks=pytest.mark.soak) for each in ALL],
)
def test_nothing_comes_of_a_kill(runs: Runs, model: str, schedule: str, kill: str) -> None:
    backward = "W" if schedule == "zbv" else "B"
    job = Job(**SMALL | MODELS[model] | PLACED[schedule])
    strike(runs, job, parse_kill(kill.format(backward=backward), job))


def test_a_forward_that_its_heir_has_not_counted_finds_the_buffers_of_before(runs: Runs) -> None:
    """A regression: an heir had the log of a slot, but had run none of its forwards.

    A worker owns stages 1 and 2. It dies after stage 1 is logged, during the log of stage 2. Its heir has the log of
    stage 1, so those gradients are not computed again. Stage 2 is, and needs activations of stage 1, so the forwards of
    stage 1 run again. They ran as redone forwards, which read the buffers retained at the first run; this replica had
    none, and used its current buffers for every microbatch. BatchNorm hides the error, because in training it does not
    read its averages; a spectral norm reads the vectors of the forward before. So a forward that the heir has not
    counted now runs as a first forward, and they make the right buffers one after the other.
    """
    job = Job(**SMALL | MODELS["spectral"] | PLACED["zbv"])
    stands = replace(parse_kill("3:2:LOG:before", job), do="hang", parameters={"for_ns": 10**10, "gil": "released"})
    dies = Fault("dies", After(stands.id, None, 5 * 10**8), (Worker(1),))  # when the log of stage 1 has arrived
    strike(runs, job, stands, dies)
