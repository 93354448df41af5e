"""Every kind of fault against a real job: its effect is seen, and the outcome is that of its kind."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.core.action import Op, parse_action
from engine.core.checks.samples import miscounted
from engine.core.errors import ExitCode
from engine.core.faults.fault import After, At, Fault, Owner, Role, Victim, When, Worker, slot_owner
from engine.core.job.job import Job
from engine.core.protocol.events import RecoveryPhase
from engine.files.events_file import read_history
from engine.runtime.agent.run_state import Ending
from engine.runtime.agent.session import run_session
from engine.runtime.faults.registry import kinds
from engine.runtime.process.fork_client import ForkServer
from tests.e2e.kill_forecast import in_one_stage
from tests.e2e.recorded import events_of
from tests.soaked import soaked

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180), pytest.mark.usefixtures("shared_etcd")]

SMALL: dict[str, Any] = {
    **{"model": "mlp", "stages": 3, "microbatches": 4, "steps": 6, "validate_every": 0},
    "check_pure": False,  # which takes longer than such a run
}
HANG_S, BUSY_S = 1.5, 1.0  # from a hang to its verdict, and more on a busy machine
SILENCE_S = 2.0  # longer than a busy machine keeps a healthy worker from running
LEAVER = 1  # the owner of stage 1
TWO_SHADOWS: dict[str, Any] = {"stages": 4, "redundancy_level": 2}


class Struck:
    """A run with faults, with its leftovers."""

    def __init__(self, ending: Ending, folder: Path):
        self.ending = ending
        self.rows = ending.view.run_state.rows
        self.known = events_of(folder / "events.jsonl")
        self.history = read_history(folder / "events.jsonl")

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.known if event["event"] == kind]

    @property
    def confirmed(self) -> list[str]:
        return sorted(event["fault"] for event in self.events("confirmed"))

    @property
    def out(self) -> list[int]:
        """The workers that verdicts name, in order."""
        return [worker for event in self.events("epoch") for worker, *_ in event["verdict"]]

    @property
    def codes(self) -> dict[int, int]:
        return {event["of"]: event["code"] for event in self.events("exit")}


Strike = Callable[..., Struck]


@pytest.fixture(name="strike")
def _strike(tmp_path: Path, server: ForkServer) -> Strike:
    """Returns a function that runs a small job with faults."""

    def strike(*faults: Fault, options: dict[str, Any] | None = None, **fields: Any) -> Struck:
        job = Job(**{**SMALL, **fields})
        events = tmp_path / "events.jsonl"
        ending = run_session(job, events, tmp_path, faults=faults, server=server, **(options or {}))
        return Struck(ending, tmp_path)

    return strike


@pytest.fixture(name="faultless", scope="module")
def _faultless(tmp_path_factory: pytest.TempPathFactory, server: ForkServer) -> Callable[..., Any]:
    """Returns a function that gives the trajectory of a job with no fault."""
    known: dict[str, Any] = {}

    def faultless(**fields: Any) -> Any:
        job = in_one_stage(Job(**{**SMALL, **fields}))
        name = repr(job)
        if name not in known:
            folder = tmp_path_factory.mktemp("faultless")
            known[name] = run_session(job, folder / "events.jsonl", folder, server=server).view.run_state.rows
        return known[name]

    return faultless


def at(text: str, do: str = "kill", when: Any = "before", step: int = 2, **parameters: Any) -> Fault:
    action = parse_action(text)
    return Fault("first", At(step, action, when), (slot_owner(action),), do, parameters)


def check(struck: Struck, rows: Any, *out: int) -> None:
    """Checks the faults, that exactly the workers `out` were put out, all bits, and that each sample counted once."""
    assert struck.ending.error is None
    assert struck.ending.exit_code == ExitCode.OK
    assert struck.events("unconfirmed") == []
    assert struck.out == list(out)
    assert struck.rows == rows
    assert miscounted(struck.history, struck.history.job) == []


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        soaked(at("1B2"), -signal.SIGKILL),  # as in test_real_kills.py
        soaked(at("1B2", when="during"), -signal.SIGKILL),
        (at("1B2", "exit", code=0), 0),
        soaked(at("1F2", "exit", "during", code=7), 7),
        soaked(at("1F2", "raise"), ExitCode.NOT_RECOVERED),
        (at("1LOG", "raise", "after"), ExitCode.NOT_RECOVERED),
        (at("1B1", "abort", "during"), -signal.SIGABRT),
        (at("1RECV_F3", "segfault"), -signal.SIGSEGV),
        (at("1B2", "oom"), ExitCode.NOT_RECOVERED),
    ],
    ids=lambda each: str(each) if isinstance(each, Fault) else "",
)
def test_what_ends_a_worker_is_survived(strike: Strike, faultless: Callable[..., Any], fault: Fault, code: int) -> None:
    struck = strike(fault)
    check(struck, faultless(), 1)
    assert struck.codes[1] == code
    assert kinds()[fault.do].ends


def test_what_ends_nobody_changes_nothing(strike: Strike, faultless: Callable[..., Any]) -> None:
    longer = {"steps": 9}
    faults = (
        at("1B2", "noop", step=1),
        at("1F1", "slow", step=2, factor=5.0, for_ns=1),
        at("1F1", "slow", step=3, factor=3.0, for_ns=20_000_000),
        at("1B2", "stop", step=4, for_ns=300_000_000),
        at("1B2", "hang", step=5, for_ns=300_000_000),
        at("1B2", "hang", step=6, for_ns=300_000_000, gil="held"),
    )
    struck = strike(*(replace(each, id=str(number)) for number, each in enumerate(faults)), **longer)
    check(struck, faultless(**longer))
    assert struck.confirmed == [*"012345"]
    assert not any(kinds()[each.do].ends for each in faults)


@pytest.mark.parametrize(
    ("fault", "how"),
    [
        (at("1B2", "stop"), "has been silent for"),
        (at("1B2", "hang", gil="held"), "without running (limit 1.0 s)"),
        (at("1B2", "hang", gil="released"), "without running (limit 1.0 s)"),
    ],
    ids=str,
)
def test_whoever_falls_silent_or_hangs_is_given_up(
    strike: Strike, faultless: Callable[..., Any], fault: Fault, how: str
) -> None:
    struck = strike(fault, silent_after=f"{SILENCE_S}s")
    check(struck, faultless(), 1)
    verdict = struck.events("epoch")[-1]
    assert how in verdict["reason"]
    if fault.do == "hang":
        assert (verdict["at_ns"] - struck.events("fault")[0]["at_ns"]) / 1e9 <= HANG_S + BUSY_S
    assert struck.codes[1] == -signal.SIGKILL


def test_whoever_wakes_after_the_verdict_does_nothing_more(strike: Strike, faultless: Callable[..., Any]) -> None:
    struck = strike(at("1B2", "stop", for_ns=int(2 * SILENCE_S * 1e9)), silent_after=f"{SILENCE_S}s")
    check(struck, faultless(), 1)
    assert struck.codes[1] in (-signal.SIGKILL, ExitCode.FENCED)


def test_whoever_is_warned_hands_over_and_leaves(strike: Strike, faultless: Callable[..., Any]) -> None:
    longer = {"steps": 12}  # to hand over and to leave, each perhaps a step later
    struck = strike(at("1B2", "terminate", grace_ns=20_000_000_000), **longer)
    check(struck, faultless(**longer), 1)
    assert struck.codes[1] == ExitCode.LEFT_WITH_NOTICE
    (notice,) = struck.events("notice")
    assert notice["grace_s"] == 20


def test_whoever_is_warned_half_a_step_before_its_end_hands_over_inside_the_step(
    strike: Strike, faultless: Callable[..., Any]
) -> None:
    slow = {"model": "timed", "model_args": {"forward_ms": 200}, "steps": 2}
    struck = strike(at("1F2", "terminate", step=1, grace_ns=1_200_000_000), **slow)
    check(struck, faultless(**slow), 1)
    assert struck.codes[1] == ExitCode.LEFT_WITH_NOTICE
    (way,) = struck.events("way_out")
    assert way["way"] == "inside"
    done = [(each["step"], each["action"]) for each in struck.events("action")]
    backwards = [each for each in done if parse_action(each[1]).op in (Op.B, Op.I)]
    assert len(backwards) == len(set(backwards)) == 2 * 3 * 4
    assert any(action.startswith("1HAND") for _, action in done)


@pytest.mark.parametrize("rate", [1e9, soaked(1e3)], ids=["a fast link", "a slow link"])
def test_auto_sends_residuals_if_that_is_quicker_than_their_forwards(
    strike: Strike, faultless: Callable[..., Any], rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher, which chooses, is in this process; the workers are processes of their own."""
    monkeypatch.setattr("engine.core.protocol.worker_times.BYTES_PER_S", rate)
    of = {"model": "tests.e2e.residual_models:sleeping_kernels", "microbatches": 8, "steps": 2, "schedule": "gpipe"}
    sleeping = {"model_args": {"seconds": 0.3}, "residuals": "auto"}
    struck = strike(at("1F2", "terminate", "after", step=1, grace_ns=1_600_000_000), **of, **sleeping)
    check(struck, faultless(**of), 1)
    (told,) = struck.events("residuals")
    ran = Counter(each["action"] for each in struck.events("action") if each["step"] == 1)
    again = {text for text, times in ran.items() if parse_action(text).op is Op.F and times > 1}
    if rate > 1e6:
        assert told["sent"] == [f"1SHIP{number}" for number in range(len(told["sent"]))] and len(told["sent"]) >= 2
        assert again == set() and not struck.events("redone")
    else:
        assert told["sent"] == [] and len(again) >= 2


@pytest.mark.parametrize(
    ("victim", "when"),
    [
        *((0, "after"), (1, "before")),
        *(soaked(*each) for each in ((0, "before"), (0, "during"), (1, "during"), (1, "after"))),
    ],
)
def test_a_kill_in_a_hand_over_inside_a_step_changes_no_bit(
    strike: Strike, faultless: Callable[..., Any], victim: int, when: When
) -> None:
    """The leaver has added a microbatch of stage 1, so it sends its accumulators in an action of their own.

    On a busy machine it takes tenths of a second to come to that action, and the grace must not be over by then.
    """
    slow = {"model": "timed", "model_args": {"forward_ms": 200}, "steps": 2, "redundancy_level": 2}
    warned = at("1F2", "terminate", step=1, grace_ns=1_300_000_000)
    killed = Fault("second", At(1, parse_action("1HAND0"), when), (Worker(victim),))
    struck = strike(warned, killed, **slow)
    check(struck, faultless(**slow), *([victim] if victim == LEAVER else [victim, LEAVER]))
    assert struck.confirmed == ["first", "second"]
    assert struck.codes[victim] == -signal.SIGKILL


def test_whoever_is_warned_too_late_is_killed(strike: Strike, faultless: Callable[..., Any]) -> None:
    slow = {"model": "timed", "model_args": {"forward_ms": 40}, "steps": 4}
    struck = strike(at("1B2", "terminate", grace_ns=30_000_000), **slow)
    check(struck, faultless(**slow), 1)
    assert struck.codes[1] == -signal.SIGKILL


@pytest.mark.parametrize(
    ("fault", "code", "text"),
    [
        (at("1B2", "nan"), ExitCode.NOT_FINITE, "the gradient norm is nan at step 2"),
        (at("1F2", "nan", into="activation"), ExitCode.NOT_FINITE, "the loss is nan at step 2"),
        (
            Fault("first", At(2, parse_action("1F2")), (Role("shadow"),), "flip-bit"),
            ExitCode.INTERNAL,
            "step 2: layer 1, tensor ",
        ),
    ],
    ids=str,
)
def test_wrong_values_are_noticed(strike: Strike, fault: Fault, code: int, text: str) -> None:
    struck = strike(fault)
    assert struck.confirmed == ["first"]
    assert struck.ending.exit_code == code
    assert text in str(struck.ending.error)
    (failed,) = struck.events("failed")
    assert failed["notice"] == ("replicas-differ" if code == ExitCode.INTERNAL else "not-finite")


def test_a_bit_that_flips_where_nobody_can_compare_shows_in_the_weights(
    strike: Strike, faultless: Callable[..., Any]
) -> None:
    struck = strike(at("1F2", "flip-bit", bit=20), redundancy="none")
    assert (struck.confirmed, struck.ending.exit_code) == (["first"], 0)
    assert struck.rows != faultless()


SCENARIOS = ("detect", "agree", "regroup", "inventory", "plan", "replay", "merged", "heal")  # of test_library.py too


@pytest.mark.parametrize("phase", ["fence", *map(soaked, SCENARIOS)])
def test_the_recoverer_may_die_in_any_phase(
    strike: Strike, faultless: Callable[..., Any], phase: RecoveryPhase
) -> None:
    second = Fault("second", After("first", phase), (Role("recoverer"),))
    struck = strike(at("1B2"), second, **TWO_SHADOWS)
    check(struck, faultless(**TWO_SHADOWS), 1, 0)
    assert struck.confirmed == ["first", "second"]


@pytest.mark.parametrize(
    "victim",
    [Role("neighbour"), *map(soaked, (Worker(2), Owner(0, 2)))],
    ids=str,
)
def test_a_second_fault_follows_with_a_delay(strike: Strike, faultless: Callable[..., Any], victim: Victim) -> None:
    second = Fault("second", After("first", None, 20_000_000), (victim,))
    struck = strike(at("1B2", "noop"), second, steps=40)
    check(struck, faultless(steps=40), 2)


def test_two_at_once_are_survived_with_two_shadows(strike: Strike, faultless: Callable[..., Any]) -> None:
    both = Fault("first", At(2, parse_action("1B2")), (Owner(0, 1), Owner(0, 2)))
    struck = strike(both, **TWO_SHADOWS)
    check(struck, faultless(**TWO_SHADOWS), *struck.out)
    assert sorted(struck.out) == [1, 2]


def test_a_phase_that_never_comes_is_told(strike: Strike) -> None:
    struck = strike(at("1B2", "noop"), Fault("second", After("first", "plan"), (Worker(0),)))
    assert struck.ending.exit_code == 0
    assert [(event["fault"], event["how"]) for event in struck.events("unconfirmed")] == [
        ("second", "it did not strike")
    ]
