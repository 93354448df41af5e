"""A run with deaths ends as one without: same weights, same losses, exit code 0.

`make test` has what no fault at an action can be: strikes from outside, at words of the agent, and in the last step.
The soak has also what test_real_kills.py and test_faults.py strike at an action.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from engine.core.errors import ExitCode
from engine.core.job.job import Job
from engine.runtime.agent.run_state import Ending, RunState
from engine.runtime.agent.session import run_session
from engine.runtime.process.fork_client import ForkServer
from tests.e2e.kill_forecast import in_one_stage
from tests.e2e.launcher import Launcher
from tests.e2e.recorded import events_of
from tests.e2e.striker import Strike, Striker, committed, computed, healing, marked, told
from tests.soaked import soaked

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180), pytest.mark.usefixtures("shared_etcd")]

Recover = Callable[..., "Recovered"]

# Stages that sleep, so that strikes fall into a step: it takes some 40 ms.
SLOW: dict[str, Any] = {
    "model": "timed",
    "model_args": {"forward_ms": 2, "backward_ms": 3},
    "microbatches": 4,
    "steps": 12,  # room for a late strike on a busy machine
    "validate_every": 3,
    "check_pure": False,
}
TWO_PIPELINES = {"stages": 2, "pipelines": 2}
# A step takes some 300 ms: a task that begins with it ends before it.
LONG: dict[str, Any] = {"model_args": {"forward_ms": 20, "backward_ms": 20}, "validate_every": 0, "steps": 8}


class Recovered:
    """A run with strikes, with its leftovers."""

    def __init__(self, ending: Ending, folder: Path):
        self.ending = ending
        self.run_state = ending.view.run_state
        self.events = events_of(folder / "events.jsonl")

    @property
    def exits(self) -> dict[int, int]:
        """The exit code of each worker."""
        return {event["of"]: event["code"] for event in self.events if event["event"] == "exit"}

    @property
    def verdicts(self) -> list[list[int]]:
        """The workers excluded with each epoch after the first."""
        return [[out.worker for out in each.verdict] for each in self.run_state.epochs[1:]]


def outcome_of(run_state: RunState) -> tuple[object, ...]:
    """Returns the values that a death must not change."""
    return run_state.rows, run_state.losses, run_state.validations


@pytest.fixture(name="recover")
def _recover(tmp_path: Path, server: ForkServer) -> Recover:
    """Returns a function that runs a job and strikes its workers; a strike that was not made fails the test."""

    def recover(*strikes: Strike, options: dict[str, Any] | None = None, **fields: Any) -> Recovered:
        events = tmp_path / "events.jsonl"
        with Striker(events, strikes) as striker:
            ending = run_session(Job(**{**SLOW, **fields}), events, tmp_path, server=server, **(options or {}))
        assert striker.left == []
        return Recovered(ending, tmp_path)

    return recover


@pytest.fixture(name="faultless", scope="module")
def _faultless(tmp_path_factory: pytest.TempPathFactory, server: ForkServer) -> Callable[..., tuple[object, ...]]:
    """Returns a function that gives the outcome of a job without deaths."""
    known: dict[str, tuple[object, ...]] = {}

    def faultless(**fields: Any) -> tuple[object, ...]:
        job = in_one_stage(Job(**{**SLOW, **fields}))
        name = repr(job)
        if name not in known:
            folder = tmp_path_factory.mktemp("faultless")
            ending = run_session(job, folder / "events.jsonl", folder, server=server)
            assert ending.error is None, ending.error
            known[name] = outcome_of(ending.view.run_state)
        return known[name]

    return faultless


def check(recovered: Recovered, expected: tuple[object, ...], *verdicts: list[int]) -> None:
    """Checks that a run had these verdicts, and the outcome of a run without them."""
    ending = recovered.ending
    assert (ending.outcome, ending.exit_code, ending.error) == ("finished", ExitCode.OK, None)
    assert outcome_of(recovered.run_state) == expected
    # On a busy machine a failed transfer may be judged before the exit is seen: then the first verdict is empty.
    is_exact = [] in verdicts
    assert [each for each in recovered.verdicts if each or is_exact] == list(verdicts)


Faultless = Callable[..., tuple[object, ...]]


@pytest.mark.parametrize(
    ("worker", "redundancy"),
    [
        (3, "eager"),
        *(soaked(*each) for each in product(range(4), ("lazy", "eager")) if each != (3, "eager")),
    ],
)
def test_any_stage_may_die(recover: Recover, faultless: Faultless, worker: int, redundancy: str) -> None:
    recovered = recover(Strike(computed(3, f"{worker}F1"), worker), redundancy=redundancy)
    check(recovered, faultless(), [worker])
    assert recovered.exits == {worker: -signal.SIGKILL, **{other: 0 for other in range(4) if other != worker}}
    assert recovered.ending.view.workers[worker].state == "dead"


@pytest.mark.parametrize("redundancy", [soaked("none"), soaked("lazy"), "reroute"])
def test_another_pipeline_takes_over(recover: Recover, faultless: Faultless, redundancy: str) -> None:
    recovered = recover(Strike(computed(3, "1B1@1"), 3), redundancy=redundancy, **TWO_PIPELINES)
    check(recovered, faultless(**TWO_PIPELINES), [3])


@pytest.mark.soak
def test_one_after_the_other_until_one_is_left(recover: Recover, faultless: Faultless) -> None:
    strikes = [Strike(committed(1), 1), Strike(committed(3), 3), Strike(committed(5), 0)]
    check(recover(*strikes), faultless(), [1], [3], [0])


@pytest.mark.soak
def test_an_heir_draws_the_same_dropout(recover: Recover, faultless: Faultless) -> None:
    fields = {"model": "gpt", "model_args": {}, "microbatch_size": 2, "steps": 6}
    check(recover(Strike(computed(2, "1B2"), 1), Strike(committed(4), 2), **fields), faultless(**fields), [1], [2])


@pytest.mark.parametrize("phase", ["fence", *(soaked(each) for each in ("inventory", "regroup", "plan"))])
def test_a_second_death_during_recovery(recover: Recover, faultless: Faultless, phase: str) -> None:
    """The scenarios of test_library.py have every phase."""
    recovered = recover(Strike(committed(2), 1), Strike(marked(phase, 2), 3))
    check(recovered, faultless(), [1], [3])


@pytest.mark.parametrize("kind", [soaked("epoch"), "plan", soaked("go")])
def test_a_second_death_when_the_agent_has_told(recover: Recover, faultless: Faultless, kind: str) -> None:
    recovered = recover(Strike(committed(2), 0), Strike(told(kind, 2), 2))
    check(recovered, faultless(), [0], [2])


@pytest.mark.soak
def test_a_death_while_others_are_healed(recover: Recover, faultless: Faultless) -> None:
    check(recover(Strike(committed(2), 1), Strike(healing, 3)), faultless(), [1], [3])


@pytest.mark.soak
def test_neighbours_may_die_at_once_where_there_are_two_shadows(recover: Recover, faultless: Faultless) -> None:
    recovered = recover(Strike(committed(2), 1), Strike(lambda event: True, 2), redundancy_level=2)
    assert sorted(worker for verdict in recovered.verdicts for worker in verdict) == [1, 2]
    check(recovered, faultless(), *recovered.verdicts)


def test_the_last_step_survives_a_death_too(recover: Recover, faultless: Faultless) -> None:
    lasting = {"steps": 4, "model_args": {"forward_ms": 20}, "validation_microbatches": 8}  # long enough to strike
    check(recover(Strike(committed(3), 3), **lasting), faultless(**lasting), [3])


@pytest.mark.soak
def test_whoever_gives_notice_hands_over_and_leaves(recover: Recover, faultless: Faultless) -> None:
    recovered = recover(Strike(committed(1), 2, signal.SIGTERM))
    check(recovered, faultless(), [], [2])
    assert recovered.exits == {0: 0, 1: 0, 2: ExitCode.LEFT_WITH_NOTICE, 3: 0}
    assert recovered.ending.view.workers[2].state == "left"


def test_a_notice_that_nobody_can_honour_is_told(recover: Recover, faultless: Faultless) -> None:
    recovered = recover(Strike(committed(1), 2, signal.SIGTERM), redundancy="none")
    check(recovered, faultless())
    (stays,) = (event for event in recovered.events if event["event"] == "stays")
    text = "is to leave within 120 s, but no other worker can take over stage 2"
    assert (stays["of"], stays["text"]) == (2, text)
    assert recovered.run_state.notes == [f"worker 2 {text}"]


def test_a_hand_over_is_prepared_before_the_commit_that_brings_it(recover: Recover, faultless: Faultless) -> None:
    recovered = recover(Strike(committed(1), 2, signal.SIGTERM), **LONG)
    check(recovered, faultless(**LONG), [], [2])
    assert [event["prepared"] for event in recovered.events if event["event"] == "plan"] == [True, True]
    assert not [event for event in recovered.events if event["event"] == "mark" and event["phase"] == "inventory"]


def test_whoever_dies_prepared_for_a_hand_over_is_survived(recover: Recover, faultless: Faultless) -> None:
    recovered = recover(Strike(committed(1), 2, signal.SIGTERM), Strike(told("prepared", 2), 0), **LONG)
    check(recovered, faultless(**LONG), [0], [], [2])
    plans = [(event["epoch"], event["prepared"]) for event in recovered.events if event["event"] == "plan"]
    assert plans == [(2, False), (3, True), (4, True)]


def test_notice_is_given_at_once_though_the_worker_is_blocked(recover: Recover, faultless: Faultless) -> None:
    strike = Strike(computed(3, "0F1"), 3, signal.SIGTERM)  # it waits for its first microbatch
    recovered = recover(strike, **LONG)
    check(recovered, faultless(**LONG), [], [3])
    (notice,) = (event for event in recovered.events if event["event"] == "notice")
    assert notice["of"] == 3
    commits = [event for event in recovered.events if event["event"] == "commit"]
    assert [event["step"] for event in commits if event["at_ns"] < notice["at_ns"]][-1] == 2


@pytest.mark.soak
def test_a_worker_that_stands_still_is_given_up(recover: Recover, faultless: Faultless) -> None:
    recovered = recover(Strike(committed(2), 1, signal.SIGSTOP), silent_after="1500ms")
    check(recovered, faultless(), [1])
    assert "has been silent for" in recovered.run_state.epochs[-1].reason
    assert recovered.exits[1] == -signal.SIGKILL


def test_a_stage_without_a_live_replica_stops_the_run(recover: Recover) -> None:
    recovered = recover(Strike(committed(2), 1), Strike(lambda event: True, 2))
    ending = recovered.ending
    assert (ending.outcome, ending.exit_code) == ("failed", ExitCode.STATE_LOST)
    assert "the state of stage" in str(ending.error)
    assert "is lost in epoch" in str(ending.error)
    assert f"last committed step {recovered.run_state.committed}" in str(ending.error)


@pytest.mark.soak
def test_a_run_leaves_nothing_behind_after_a_death(launch: Callable[..., Launcher]) -> None:
    """One that loses a state with it is in test_clean_ends.py."""
    launcher = launch(
        *("run", "--model", "timed", "--stages", "3", "--microbatches", "4", "--steps", "30", "--validate-every", "0"),
        *("--set", "model_args.forward_ms=2"),
    )
    launcher.wait_until(lambda: len(launcher.events("commit")) >= 3)
    (pid,) = (event["child"] for event in launcher.events("started") if event["of"] == 1)
    os.kill(pid, signal.SIGKILL)
    done = launcher.wait()
    assert launcher.leftovers() == []
    assert done.code == ExitCode.OK, done
