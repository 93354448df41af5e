"""Real kills of models whose forwards read what earlier ones left: three models, schedules and kills, each with each.

Rule: the kills are the same for every model and schedule, and were chosen without a look at what a recovery does: one
when all is logged, one at the vote, one in the last backward of a middle stage. Each run is held against its twin.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from engine.core.config.job import Job
from engine.core.faults.fault import After, Fault, Worker
from engine.core.schedules.registry import SCHEDULES
from engine.runtime.process.fork_client import ForkServer
from tests.e2e.kill_runs import Runs, differences, lives
from tests.kills import parse_kill

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

STAGES, MICROBATCHES = 4, 4
SMALL: dict[str, Any] = {
    "stages": STAGES,
    "microbatches": MICROBATCHES,
    "microbatch_size": 2,
    "steps": 6,
    "validate_every": 3,
    "audit": 1,
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
    """Returns what runs jobs, and each twin once."""
    return Runs(tmp_path_factory.mktemp("kills"), server)


def strike(runs: Runs, job: Job, *faults: Fault) -> None:
    """Carries out faults that kill one worker, and checks that nothing comes of it but its absence."""
    ending, events = runs.run(job, faults, silence_s=30)
    (*_, dies) = faults
    victims = [event["of"] for event in events if event["event"] == "fault" and event["fault"] == dies.id]
    assert len(victims) == 1
    assert [*differences(ending, runs.twin(job)), *lives(events, victims)] == []


def test_there_are_27_combinations() -> None:
    assert len(list(product(MODELS, PLACED, KILLS))) == 27
    assert PLACED.keys() <= SCHEDULES.keys()


@pytest.mark.parametrize("kill", KILLS)
@pytest.mark.parametrize("schedule", PLACED)
@pytest.mark.parametrize("model", MODELS)
def test_nothing_comes_of_a_kill(runs: Runs, model: str, schedule: str, kill: str) -> None:
    backward = "W" if schedule == "zbv" else "B"
    job = Job(**SMALL | MODELS[model] | PLACED[schedule])
    strike(runs, job, parse_kill(kill.format(backward=backward), job))


def test_a_forward_that_its_heir_has_not_counted_finds_the_buffers_of_before(runs: Runs) -> None:
    """The regression: an heir held what a slot had logged, but had run none of its forwards.

    A worker owns stages 1 and 2, and dies when stage 1 is logged and stage 2 is being logged. Its heir has the log of
    stage 1, so nothing of that counts again; but stage 2 is trained anew, from activations of stage 1, whose forwards
    must be run again for them. They were redone as forwards that have counted, with the buffers of then, which that
    replica had never had: it used those that it had for every microbatch. With BatchNorm nobody sees it: in training
    it does not read its averages; a spectral norm reads the vectors that the forward before has left. So a forward that
    its owner has not counted runs as one that has not, and they make the right buffers one after the other.
    """
    job = Job(**SMALL | MODELS["spectral"] | PLACED["zbv"])
    stands = replace(parse_kill("3:2:LOG:before", job), do="hang", parameters={"for_ns": 10**10, "gil": "released"})
    dies = Fault("dies", After(stands.id, None, 5 * 10**8), (Worker(1),))  # when the log of stage 1 has arrived
    strike(runs, job, stands, dies)
