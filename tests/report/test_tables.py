"""Tables from made-up events whose times are known."""

from __future__ import annotations

import base64
import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from engine.core.job.samples import samples_per_step
from engine.report.headline import command, headline
from engine.report.load import RunTables, joined
from engine.report.pages.frame import charts
from engine.report.pages.page import page, timeline
from tests.report.made_up import END, PHASES_MS, MadeUpRun, agent, did, load


@pytest.fixture(scope="module", name="run")
def _run() -> RunTables:
    return load(MadeUpRun(dead=((5, 2),)).events(), "made-up")


def test_a_recovery_is_one_row_with_its_phases(run: RunTables) -> None:
    (row,) = run.recovery.to_dict("records")
    assert (row["outcome"], row["who"], row["slots"], row["step"], row["epoch"]) == ("recovered", "2", "0.2", 5, 2)
    assert {phase: row[f"{phase}_ms"] for phase in PHASES_MS if phase not in ("regroup", "inventory")} == {
        phase: taken for phase, taken in PHASES_MS.items() if phase not in ("regroup", "inventory")
    }
    assert row["regroup_ms"] + row["inventory_ms"] == PHASES_MS["regroup"] + PHASES_MS["inventory"]
    assert row["what"] == "5:2: worker 2 was killed (SIGKILL)"
    assert (row["heirs"], row["rung"], row["lost_steps"], row["last_action"]) == ("1", "shadow", 0, "2RECV_B3")


def test_the_phases_of_a_recovery_add_up(run: RunTables) -> None:
    (row,) = run.recovery.to_dict("records")
    pause_ms = sum(PHASES_MS.values()) + row["replay_ms"]
    assert row["pause_ms"] == pytest.approx(pause_ms)
    usual_ms = run.steps["duration_ms"][1:5].median()
    assert row["stall_ms"] == row["stall_most_ms"] == pytest.approx(run.steps["duration_ms"][5] - usual_ms)
    assert row["stall_bound"] == ""
    assert row["resume_ms"] == run.steps["commit_ms"][5]
    assert row["healed_ms"] == pytest.approx(run.steps["commit_ms"][6])


def test_what_was_done_again_is_counted(run: RunTables) -> None:
    """The victim had finished five forwards and three backwards of five microbatches with four samples each."""
    (row,) = run.recovery.to_dict("records")
    assert (row["redone_actions"], row["samples_redone"], row["replay_ms"]) == (8, 20, 5 * 1 + 3 * 2)
    replayed = run.actions[run.actions["replayed"]]
    assert set(replayed["worker"]) == {1}
    assert set(replayed["step"]) == {5}
    assert list(replayed["action"]) == [f"2f{m}" for m in range(5)] + [f"2B{m}" for m in range(3)]


def test_what_was_sent_for_a_recovery_is_counted() -> None:
    moved = [("plan", 2, 5, 100), ("plan", 2, 5, 20), ("heal", 2, 6, 3000), ("plan", 3, 8, 7), ("heal", 3, 9, 1)]
    events = [
        agent("moved", 2000, program=program, epoch=epoch, step=step, bytes=num_bytes)
        for program, epoch, step, num_bytes in moved
    ]
    recovery = load([*MadeUpRun(dead=((5, 2), (8, 0))).events(), *events]).recovery
    assert list(recovery["plan_bytes"]) == [120, 7]
    assert list(recovery["heal_bytes"]) == [3000, 1]


def test_throughput_is_told_before_during_and_after(run: RunTables) -> None:
    (row,) = run.recovery.to_dict("records")
    usual_ms = run.steps["duration_ms"][1]
    assert row["samples_per_s_before"] == pytest.approx(32 / (usual_ms / 1e3))
    assert row["samples_per_s_during"] == pytest.approx(run.steps["samples_per_s"][5])
    assert row["samples_per_s_after"] == pytest.approx(run.steps["samples_per_s"][6:].median())


def test_a_validation_has_its_loss_and_its_metric() -> None:
    """The metric stood in the events and in the last line of the run only."""
    events = MadeUpRun(steps=2).events()
    at = next(place for place, event in enumerate(events) if event["event"] == "commit")
    first = agent("validation", 1000, step=0, name="validation", samples=8, loss=0.5, metrics={"f1": 0.9})
    other = first | {"name": "test", "samples": 3, "loss": 0.25, "metrics": {"f1": 0.7, "accuracy": 0.6}}
    norms = agent("norms", 900, step=0, norms=[[0, 0.5], [1, 0.25]])
    run = load([*events[:at], norms, events[at], first, other, *events[at + 1 :]])
    assert run.norms[["step", "layer", "grad_norm"]].values.tolist() == [[0, 0, 0.5], [0, 1, 0.25]]
    assert run.evaluations.drop(columns="step").to_dict("list") == {
        "set": ["validation", "test"], "samples": [8, 3], "loss": [0.5, 0.25], "f1": [0.9, 0.7],
        "accuracy": [pytest.approx(math.nan, nan_ok=True), 0.6],
    }  # fmt: skip
    steps = run.steps
    assert steps["validation_loss"][0] == 0.5
    assert steps["validation_metric"][0] == 0.9
    assert math.isnan(steps["validation_metric"][1])


def test_a_run_without_events_has_recorded_nothing_yet() -> None:
    """The sentence was: 0 of 0 steps were committed."""
    assert headline(load([])) == ("open", "This run has recorded nothing yet.")


def test_steps_have_their_epoch_and_duration(run: RunTables) -> None:
    assert list(run.steps["step"]) == list(range(10))
    assert list(run.steps["epoch"]) == [1] * 5 + [2] * 5
    assert run.steps["duration_ms"].sum() == pytest.approx(run.steps["commit_ms"].iloc[-1])
    assert run.steps["loss"][4] == 1.0


def test_workers_say_how_they_ended(run: RunTables) -> None:
    assert list(run.workers["state"]) == ["finished", "finished", "dead", "finished"]
    assert list(run.workers["code"]) == [0, 0, -9, 0]
    assert run.workers["peak_memory_mib"][0] == 200.0
    assert math.isnan(run.workers["peak_memory_mib"][2])
    assert run.workers["last_action"][2] == "2RECV_B3"


def test_an_action_is_a_row_with_its_parts(run: RunTables) -> None:
    row = run.actions[(run.actions["step"] == 0) & (run.actions["action"] == "1SEND_B3")].iloc[0]
    assert (row["worker"], row["pid"], row["pipeline"], row["stage"]) == (1, 101, 0, 1)
    assert (row["op"], row["microbatch"], row["epoch"], row["end_ns"] - row["start_ns"]) == ("SEND_B", 3, 1, 100_000)


def test_a_restart_from_a_checkpoint_is_one_row_and_no_worker_took_over() -> None:
    """It said that others took over, and had a row for each process that ended before the restart."""
    *events, end = MadeUpRun(dead=((5, 2),)).events()
    at = next(place for place, each in enumerate(events) if each["event"] == "epoch" and each["epoch"] == 2) + 1
    died_ns = events[at - 1]["at_ns"] + 1
    died = {**agent("exit", 0, of=0, code=-9, expected=False, seen_ns=died_ns), "at_ns": died_ns}
    resumed = agent("resumed", 0, step=4, place="", file="", run="", lost=0) | {"at_ns": died_ns + 1}
    run = load([*events[:at], died, resumed, *events[at:], end])
    (row,) = run.recovery.to_dict("records")
    assert (row["outcome"], row["rung"], row["step"]) == ("recovered", "checkpoint", 5)
    told = headline(run)[1]
    assert told.startswith("The state was lost; training resumed from the checkpoint of step 4; training stalled for ")


def test_a_worker_that_is_lost_before_the_first_commit_is_told_with_the_restart() -> None:
    job, host, *events = MadeUpRun().events()
    lost = agent("exit", 100, of=2, code=-9, expected=False, seen_ns=100_000_000)
    run = load([job, host, lost, agent("restart", 101), *events])
    assert list(run.recovery["outcome"]) == ["restarted"]
    text = "Worker 2 was lost before the first commit, and all workers were restarted. All 10 steps"
    assert headline(run)[1].startswith(text)


def test_the_steps_before_a_resumed_run_are_not_its_own() -> None:
    events = [each for each in MadeUpRun().events() if each["event"] != "commit" or each["step"] > 3]
    assert "All steps from 4 on were committed in " in headline(load(events))[1]


def test_what_a_worker_does_for_a_slot_of_another_is_redundant() -> None:
    events = MadeUpRun(steps=2).events()
    at = next(place for place, event in enumerate(events) if event["event"] == "commit")
    shadowing = [did(1, 0, text, 1001, 1002) for text in ("2F0", "2LOG", "2STEP", "2HEAL", "1F7")]
    run = load([*events[:at], *shadowing, *events[at:]])
    assert list(run.actions[run.actions["redundant"]]["action"]) == ["2F0", "2LOG", "2STEP"]


def test_a_redundant_forward_makes_no_replay_of_the_owners() -> None:
    events = MadeUpRun(steps=1).events()
    assert not load([*events, did(0, 0, "1F0", 999, 1000)]).actions["replayed"].any()


def test_a_death_that_nobody_recovered_from_is_a_row_too() -> None:
    events = [event for event in MadeUpRun(steps=3).events() if event["event"] not in END]
    died = agent("exit", 1100, of=1, code=-9, expected=False, seen_ns=1_099_000_000)
    run = load([*events, died, agent("failed", 1101, error="worker 1 was killed (SIGKILL)\nmore"), *ENDED])
    (row,) = run.recovery.to_dict("records")
    assert (row["outcome"], row["who"], row["rung"], row["last_action"]) == ("not recovered", "1", "none", "1STEP")
    assert row["begin_ms"] == pytest.approx(99.0)
    assert headline(run) == (
        "bad",
        "The run failed: worker 1 was killed (SIGKILL). 3 of 3 steps were committed. "
        "Weights not compared: the run did not end as expected.",
    )


ENDED = [
    agent("training_ended", 1102, outcome="failed", exit_code=3),
    agent("not_compared", 1103, why="the run did not end as expected"),
    agent("ended", 1103, outcome="failed", exit_code=3),
]


@pytest.mark.parametrize(
    ("events", "outcome"),
    [
        ([], "no worker lost"),
        ([agent("notice", 1002.0, of=1, grace_s=60)], "left"),
        ([agent("failed", 1050.0, error="the fork server has ended")], "no worker lost"),
        ([agent("failed", 1050.0, error="the loss of step 2 is nan", notice="not-finite")], "noticed"),
    ],
)
def test_a_fault_that_put_nobody_out_is_a_row_too(events: list[dict[str, Any]], outcome: str) -> None:
    fault = agent("fault", 1001.0, fault="pause", do="stop", step=0, action="1F0", when="before", of=1, slot=[0, 1])
    *told, ended = MadeUpRun(dead=((5, 2),)).events()
    run = load([*told, fault, *events, ended])
    row, lost = run.recovery.to_dict("records")
    assert [row[name] for name in ("what", "outcome", "who", "slots")] == [
        "pause: stop of worker 1",
        outcome,
        "1",
        "0.1",
    ]
    assert row["samples_per_s_during"] == run.steps["samples_per_s"][0]
    assert math.isnan(row["pause_ms"])
    assert lost["who"] == "2"
    assert headline(run)[1].startswith("Worker 2 was lost in step 5")
    assert len(run.exposure) == 1
    assert [each["begin_ms"] == each["resume_ms"] for each in timeline(run)["recoveries"]] == [True, False]


def test_a_freeze_that_ended_before_its_verdict_is_told() -> None:
    """No worker is lost, and yet training stood: the row of an injected stop has the time, and the headline says so."""
    told = MadeUpRun(frozen=((5, 3000.0),)).events()
    usual_ms = load(told).steps["duration_ms"][4]
    assert headline(load(told))[1].startswith(
        f"No worker was lost. Step 5 took {(3000 + usual_ms) / 1e3:.2f} s without the loss of a worker; "
        f"a usual step took {usual_ms / 1e3:.2f} s. All 10 steps were committed"
    )
    begin_ms = 1000 + load(told).steps["commit_ms"][4] + 1
    stop = agent("fault", begin_ms, fault="pause", do="stop", step=5, action="1F0", when="before", of=1, slot=[0, 1])
    (row,) = load([*told, stop]).recovery.to_dict("records")
    assert row["outcome"] == "no worker lost"
    assert row["stall_ms"] == pytest.approx(3000.0)
    assert row["stall_most_ms"] == row["stall_ms"]
    assert "Step" not in headline(load(MadeUpRun(dead=((5, 2),), frozen=((5, 3000.0),)).events()))[1]


def judged(*events: dict[str, Any], **ended: Any) -> tuple[str, str]:
    """Returns the headline of a made-up run that lost worker 2, with these events before the end of its command."""
    *told, _, end = MadeUpRun(dead=((5, 2),)).events()
    return headline(load([*told, *(agent(at_ms=1200, **each) for each in events), *([end | ended] if ended else [])]))


SAME: dict[str, Any] = {
    "event": "comparison",
    "compared": 10,
    "steps": 10,
    "last_step": 9,
    "difference": None,
    "disturbed": 5,
}
UNKEPT = {"event": "unkept", "step": 9, "why": "disk full"}
OTHER = {"step": 2, "layer": 1, "part": "buffers", "tensor": "", "run": "0a", "twin": "0b"}


def test_the_headline_tells_whether_the_weights_were_compared() -> None:
    """A run was green without a word about its weights, and green too if they differed."""
    weights = "Weights identical to the run without the fault, 10 of 10 steps."
    mood, text = judged(SAME, exit_code=0)
    assert (mood, text.endswith(f"All 10 steps were committed in 0.5 s. {weights}")) == ("good", True)
    lost = text.removesuffix(weights)
    missing = {"event": "not_compared", "why": "no twin was asked for"}
    assert judged(missing, exit_code=0) == ("good", f"{lost}Weights not compared: no twin was asked for.")
    assert judged(missing, outcome="interrupted", exit_code=130)[0] == "open"
    told = f"{lost}No checkpoint was kept: disk full. Weights not compared: no twin was asked for."
    assert judged(missing, UNKEPT, exit_code=0) == ("good", told)
    assert judged() == ("open", f"{lost}Weights not compared: the run has no verdict yet.")


def test_the_headline_of_a_run_that_failed_a_check_begins_with_it() -> None:
    difference = {**SAME, "difference": OTHER}
    failed = {
        "event": "check",
        "name": "trajectory",
        "result": "failed",
        "text": "step 2: other weights",
        "request": "",
    }
    unproved = {"event": "check", "name": "faults", "result": "invalid", "text": "it did not strike", "request": ""}
    verdict = {"event": "verdict", "result": "failed", "exit_code": 1, "request": ""}
    mood, text = judged(difference, failed, verdict, outcome="failed", exit_code=1)
    assert (mood, text.split(". ")[0]) == ("bad", "Failed: step 2: other weights")
    assert text.endswith("All 10 steps were committed in 0.5 s.")
    mood, text = judged(SAME, unproved, failed, outcome="failed", exit_code=1)
    assert (mood, text.startswith("Failed: step 2: other weights (one more check did not pass). Worker 2")) == (
        "bad",
        True,
    )
    mood, text = judged(SAME, unproved, outcome="invalid", exit_code=6)
    assert (mood, text.startswith("Invalid: nothing was proved: it did not strike. Worker 2")) == ("bad", True)


def test_a_request_that_failed_makes_a_finished_run_red() -> None:
    """The command of the run ends with 0: only `bamboo inject --run` knew that its expectations were not met."""
    failed = {"event": "check", "name": "culprit", "result": "failed", "text": "worker 1 was evicted"}
    request = {"request": "request-1.json"}
    verdict = {"event": "verdict", "result": "failed", "exit_code": 1}
    mood, text = judged(SAME, failed | request, verdict | request, exit_code=0)
    assert (mood, text.split(". ")[0]) == ("bad", "Failed: the request request-1.json: worker 1 was evicted")


def test_a_failure_that_the_scenario_expects_is_good() -> None:
    events = [event for event in MadeUpRun(steps=3).events() if event["event"] not in END]
    failed = agent("failed", 1101, error="the state of stage 2 is lost")
    run = load([*events, failed, *ENDED[:2], ENDED[2] | {"outcome": "passed", "exit_code": 0}])
    mood, text = headline(run)
    assert (mood, text.split(". ")[0]) == ("good", "As expected: The run failed: the state of stage 2 is lost")


def test_the_time_of_the_twin_is_not_part_of_the_run(run: RunTables) -> None:
    *told, missing, ended = MadeUpRun(dead=((5, 2),)).events()
    later = [each | {"at_ns": each["at_ns"] + 10**12} for each in (missing, ended)]
    assert load([*told, *later]).end_ms == run.end_ms


def test_checks_and_outcome_are_tables() -> None:
    *told, _, ended = MadeUpRun(dead=((5, 2),)).events()
    difference = agent(at_ms=1200, **(SAME | {"difference": OTHER}))
    check = agent("check", 1201, name="trajectory", result="failed", text="x", request="")
    run = load([*told, difference, check, ended | {"outcome": "failed", "exit_code": 1}])
    assert run.checks.to_dict("records") == [{"name": "trajectory", "result": "failed", "text": "x", "request": ""}]
    (row,) = run.outcome.to_dict("records")
    assert (row["outcome"], row["exit_code"], row["training"], row["steps_compared"]) == ("failed", 1, "finished", 10)
    assert (row["difference_step"], row["difference_layer"], row["difference_tensor"]) == (2, 1, "")
    assert row["first_difference"] == "step 2, layer 1: different buffers, 0a in this run and 0b in its twin"


def test_the_headline_of_a_failure_names_who_was_lost() -> None:
    events = [event for event in MadeUpRun(steps=3).events() if event["event"] not in END]
    events += [agent("exit", 1100, of=who, code=-9, expected=False, seen_ns=1_099_000_000) for who in (2, 1)]
    run = load([*events, agent("failed", 1101, error="the state of stage 2 is lost; worker 2 wrote a log"), *ENDED])
    assert headline(run)[1].startswith("The run failed: the state of stage 2 is lost (workers 1, 2 lost). 3 of 3")


def test_a_record_that_was_written_late_counts_where_it_belongs(run: RunTables) -> None:
    events = MadeUpRun(dead=((5, 2),)).events()
    (late,) = [event for event in events if event["event"] == "epoch" and event["epoch"] == 2]
    events.remove(late)
    go = next(place for place, event in enumerate(events) if event["event"] == "go" and event.get("epoch") == 2)
    events.insert(go, late)
    pd.testing.assert_frame_equal(load(events).recovery, run.recovery)


def test_a_recovery_that_is_going_on_is_under_way() -> None:
    events = MadeUpRun(dead=((5, 2),)).events()
    plan = next(place for place, event in enumerate(events) if event["event"] == "plan")
    run = load(events[:plan])
    assert list(run.recovery["outcome"]) == ["under way"]
    assert run.recovery["pause_ms"].isna().all()
    assert headline(run) == ("open", "The end of this run is not recorded: 5 of 10 steps were committed.")
    assert headline(replace(run, goes_on=True)) == (
        "open",
        "This run is still going: 5 of 10 steps were committed so far.",
    )
    by_epochs = replace(run, job=replace(run.job, epochs=2), num_samples=samples_per_step(run.job) * 5)
    assert headline(by_epochs)[1].endswith("5 of 10 steps were committed, in epoch 2 of 2.")


def test_the_exposure_ends_when_the_new_shadow_is_whole(run: RunTables) -> None:
    assert run.exposure.to_dict("records") == [
        {"from_ms": run.recovery["begin_ms"][0], "to_ms": run.recovery["healed_ms"][0]}
    ]


@pytest.mark.parametrize(("redundancy", "pipelines", "exposed"), [("none", 1, 1), ("none", 2, 0), ("lazy", 1, 0)])
def test_who_has_no_replica_is_exposed_all_the_time(redundancy: str, pipelines: int, exposed: int) -> None:
    job, *rest = (each for each in MadeUpRun(steps=2).events() if each["event"] != "finished")
    assert len(load([job | {"redundancy": redundancy, "pipelines": pipelines}, *rest]).exposure) == exposed


def test_the_headline_says_who_was_lost_and_the_command_does_it_again(run: RunTables) -> None:
    mood, sentence = headline(run)
    assert mood == "good"
    assert sentence.startswith(
        "Worker 2 was lost in step 5; worker 1 took over; training stalled for 60 ms. All 10 steps"
    )
    again = "bamboo run --model mlp --set model_args.width=64 --steps 10 --seed 7"
    assert command(run) == f"{again} --kill 5:2"
    unchecked = replace(run, job=replace(run.job, check_pure=False))
    assert command(unchecked) == f"{again} --no-check-pure --kill 5:2", "no command takes --check-pure False"


def test_who_is_lost_after_the_last_commit_is_no_recovery() -> None:
    events = MadeUpRun().events()
    at_ms = max(event.get("at_ns", 0) for event in events) / 1e6
    out = {"epoch": 2, "owners": [0, 1, 1], "verdict": [[2, "was killed (SIGKILL)"]], "reason": ""}
    run = load([*events[:-1], agent("epoch", at_ms, **out), events[-1]])
    assert list(run.recovery["outcome"]) == ["after the end"]
    text = "Worker 2 was lost after the last commit, when no step was left to recover. All 10 steps"
    assert headline(run)[1].startswith(text)
    assert run.exposure.empty


def test_a_scenario_is_run_again_as_it_was_run() -> None:
    said = {"scenario": "scenario.yaml", "text": "version: 1\n", "seed": 3, "settings": ["steps=9"]}
    run = load([*MadeUpRun().events(), {"event": "scenario"} | said])
    first, _, *text = command(run).splitlines()
    assert first == "bamboo inject --scenario scenario.yaml --seed 3 --set steps=9"
    assert text == ["# scenario.yaml", "version: 1"]
    run = load([*MadeUpRun().events(), {"event": "scenario"} | said | {"needs_trust": True}])
    assert command(run).startswith(f"{first} --trust-code\n")


def test_faults_that_came_from_elsewhere_are_named_and_not_taken_for_kills() -> None:
    events = MadeUpRun(dead=((5, 2),)).events()
    run = load([*events, agent("fault", 2000, fault="pause.ab12", do="stop", step=9, of=1)])
    assert command(run).endswith("--kill 5:2\n# without the faults of `bamboo inject --run`: pause.ab12")


def test_the_loss_without_the_fault_stands_beside_the_loss() -> None:
    events = MadeUpRun().events()
    run = load([*events, {"event": "twin", "losses": [[0, 2.0], [1, 1.5]]}])
    assert run.end_ms == load(events).end_ms
    (twin,) = [each for each in charts(run)["loss"]["data"] if each["name"] == "without the fault"]
    assert (list(twin["x"]), list(twin["y"])) == ([0, 1], [2.0, 1.5])


def test_two_deaths_are_two_rows_and_runs_are_joined(run: RunTables) -> None:
    twice = load(MadeUpRun(stages=6, dead=((2, 1), (4, 4))).events(), "twice")
    assert list(twice.recovery["who"]) == ["1", "4"]
    assert list(joined([run, twice], "recovery")["run"]) == ["made-up", "twice", "twice"]
    assert headline(twice)[1].startswith("2 workers were lost; others took over")


def test_each_recovery_on_the_page_has_its_own_heirs() -> None:
    text = page(load(MadeUpRun(dead=((3, 2), (6, 1))).events()))
    assert re.findall(r"<td[^>]*>(worker \d: stages? [^<]*)</td>", text) == [
        "worker 1: stage 2",
        "worker 0: stages 1, 2",
    ]


def test_a_page_that_is_full_has_the_actions_near_a_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.report.pages.page.MAX_ACTIONS", 1_000)
    drawn = timeline(load(MadeUpRun(steps=40, dead=((30, 2),)).events()))
    steps = {*np.frombuffer(base64.b64decode(drawn["actions"]["step"][1]), "<i4").tolist()}
    assert 30 in steps and steps <= {*range(25, 36)}
    assert drawn["left_out"] > 0


def test_a_run_of_which_next_to_nothing_is_known() -> None:
    for events in ([], [agent("job", 1, stages=2, steps=3)]):
        run = load(events)
        assert len(run.recovery) == len(run.steps) == len(run.actions) == 0
        assert headline(run)[0] == "open"


def test_the_history_names_who_could_not_leave() -> None:
    text = "is to leave within 120 s, but no other worker can take over stage 2"
    events = [*MadeUpRun().events(), agent("stays", 1001, of=2, text=text)]
    (row,) = load(events).history.query("what == 'stays'").to_dict("records")
    assert (row["worker"], row["text"]) == (2, text)


def test_times_in_the_history_are_those_of_the_events(run: RunTables) -> None:
    told = run.history[run.history["what"].isin(["fault", "exit", "epoch"])].iloc[1:4]
    begin_ms = run.recovery["begin_ms"][0]
    assert list(told["what"]) == ["fault", "exit", "epoch"]
    assert list(told["at_ms"] - begin_ms) == pytest.approx([0, 1, 3])
    assert list(told["text"])[2] == "worker 2 was killed (SIGKILL) (an exit was seen)"


def test_what_became_of_whoever_did_not_come_to_the_end_is_told() -> None:
    ends = [
        agent("fork_server_ended", 900, child=7),
        agent("cut_short", 910, reason="the state of stage 1 is lost"),
        agent("killed", 920, of=1, why="it did not end when it was to"),
        agent("left_behind", 930, of=1, child=8),
    ]
    history = load([*MadeUpRun().events(), *ends]).history
    told = history[history["what"].isin([event["event"] for event in ends])]
    assert list(told["text"]) == [
        "the fork server (pid 7) has ended; training no longer needs it",
        "after the last commit: the state of stage 1 is lost",
        "it did not end when it was to",
        "pid 8 survived SIGKILL",
    ]


def test_moves_and_shared_gpus_are_remarks_on_the_page() -> None:
    events = MadeUpRun().events()
    assert load(events).remarks == ()
    shared = replace(load(events).job, device="cuda", share_gpu=True)
    moved = agent("pace", 2000, of=1, step=3, slowness=2.0, why="worker <1> is slow")
    found = load([*events[:-3], moved, *events[-3:]])
    run = replace(found, job=shared)
    assert run.remarks == (
        "Workers may have shared a GPU (--share-gpu): they take turns there, so its times say little.",
        "After step 3 worker <1> is slow.",
    )
    assert found.remarks == run.remarks[1:]
    assert "<h2>Remarks</h2>" in page(run)
    assert "<li>After step 3 worker &lt;1&gt; is slow.</li>" in page(run)
    assert "<h2>Remarks</h2>" not in page(load(events))
