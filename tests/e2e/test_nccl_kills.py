"""Real kills over the calls of NCCL: processes, `ctypes` and SIGKILL, with a strict double of the library between CPUs.

Each run has the bits of a twin over links, and no call in it breaks a rule of NCCL. `make test` has a share; the rest,
every schedule and every sort of kill with every redundancy, is in `make soak-nccl`.
"""

from __future__ import annotations

import re

import pytest

from engine.core.action import Op
from engine.core.job.job import Job
from engine.core.program.schedules import SCHEDULES
from tests.doubles.nccl_double import WHY_NOT
from tests.e2e import test_real_kills, test_schedule_kills
from tests.e2e.kill_forecast import Sort, plan_kills
from tests.e2e.kill_runs import SETTINGS, job_of
from tests.e2e.over_nccl import MODES, OverNccl, over_nccl

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]

SMALL = over_nccl(Job(model="mlp", stages=3, microbatches=4, microbatch_size=2, steps=6, validate_every=0))


def test_nothing_comes_of_two_kills(nccl: OverNccl) -> None:
    kills = plan_kills(SMALL, [Sort(Op.SEND_F, "after", "middle"), Sort(Op.B, "before", "first")], 1, most=2)
    for told, eager in (MODES["told-early"], MODES["silent-waits"]):
        nccl.double.has_modes(tells_deaths=told, eager=eager)
        assert nccl.runs.strike(SMALL, kills) == []
    nccl.check()
    counts = nccl.double.counts()
    assert counts["eager"] and counts["rendezvous"] and counts["revokes"] and counts["remote_errors"]


def test_two_sends_that_are_swapped_are_caught_by_their_keys(nccl: OverNccl) -> None:
    with nccl.double.planted("swap"):
        ending, _ = nccl.runs.run(SMALL, audit=1)
    assert ending.outcome != "finished" and "was asked for" in str(ending.error)
    nccl.double.forget()


def test_two_sends_that_are_swapped_are_caught_without_an_audit(nccl: OverNccl) -> None:
    """The double knows the key of each message, also where the workers send none."""
    with nccl.double.planted("swap"):
        nccl.runs.run(SMALL)
    assert any(re.fullmatch(r"a receive of message \d+ met a send of message \d+", x) for x in nccl.double.offences())
    nccl.double.forget()


MISTAKES = {
    "second thread": "ncclCommGetAsyncError from a second thread",
    "two communicators": "two communicators in one group of calls",
    "abort at once": "freed memory under a kernel of rank",
}


@pytest.mark.soak
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_a_worker_is_caught(nccl: OverNccl, mistake: str) -> None:
    nccl.double.has_modes()
    kills = plan_kills(SMALL, [Sort(Op.F, "before", "last")], 1, most=1)
    with nccl.double.planted(mistake):
        nccl.runs.strike(SMALL, kills)
    assert MISTAKES[mistake] in " ".join(nccl.double.offences())
    nccl.double.forget()
    nccl.double.has_modes()


@pytest.mark.soak
@pytest.mark.parametrize("setting", [name for name in SETTINGS if not job_of(name).fsdp])
def test_nothing_comes_of_any_kill(nccl: OverNccl, setting: str) -> None:
    job = over_nccl(job_of(setting))
    for each, kills in test_real_kills.suite(job.redundancy):
        if each == setting:
            nccl.has_next_modes()
            assert nccl.runs.strike(job, kills) == [], [kill.text for kill in kills]
    nccl.check()


@pytest.mark.soak
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nothing_comes_of_a_kill_under_any_schedule(nccl: OverNccl, schedule: str) -> None:
    for number in range(test_schedule_kills.num_kills(schedule)):
        nccl.has_next_modes()
        kill = test_schedule_kills.kill_of(schedule, number)
        job = over_nccl(test_schedule_kills.job_of(schedule, number))
        assert nccl.runs.strike(job, [kill]) == [], (number, kill.text)
    nccl.check()
