"""The verdict on the weights, of hashes, losses and records as values: each contradiction alone, under no seal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from engine.core.checks.proof import BUILT_IN_DATA, Computation, Proof, StepHashes, compare, fingerprint, proved
from engine.core.checks.trajectory import NO_MARKS, TrajectoryRow
from engine.core.history.process_records import ComparisonRecord
from engine.core.history.run_history import history_of
from engine.core.job.bit_fields import twin_of
from engine.core.job.job import Job
from engine.core.job.job_rules import check_job
from engine.core.manifest import joined_buffers
from engine.models.model_registry import DATA
from tests.core.made_records import made_history
from tests.looped import looped

HISTORY = made_history(
    [
        {"event": "job", "steps": 2, "stages": 1},
        *({"event": "commit", "step": step, "loss": 1.5} for step in range(2)),
        {"event": "comparison", "compared": 2, "steps": 2, "last_step": 1, "difference": None, "disturbed": None},
    ]
)
PLACES = [(layer, pipeline) for layer in range(2) for pipeline in range(2)]
ROWS = [TrajectoryRow(step, layer, f"state-{step}-{layer}", "buffers", 1.5) for step in range(2) for layer in range(2)]


def told_by_workers(step: int) -> StepHashes:
    rows = [row for row in ROWS if row.step == step]
    return StepHashes({row.layer: row.state for row in rows}, {(row.layer, 0): row.buffers for row in rows})


def proof(changed: Mapping[int, TrajectoryRow] | None = None, **others: object) -> Proof:
    rows = [(changed or {}).get(number, row) for number, row in enumerate(ROWS)]
    run = Computation("", rows, {"events.jsonl": lambda step: 1.5}, 2, hashes=told_by_workers)
    return proved(HISTORY, replace(run, **others), Computation("twin/", ROWS, {}, 2), (), "")  # type: ignore[arg-type]


def test_what_fits_together_is_identical() -> None:
    found = proof()
    assert found.is_whole
    assert found.comparison is not None
    assert (found.comparison.compared, found.comparison.difference) == (2, None)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (replace(ROWS[1], state="other"), "step 0, layer 1: the workers reported another hash of the weights"),
        (replace(ROWS[1], buffers="other"), "step 0, layer 1: the workers reported another hash of the buffers"),
        (replace(ROWS[1], loss=99.0), "events.jsonl has 1.5"),
        (replace(ROWS[1], layer=2), "step 0 has not one row for each layer"),
    ],
)
def test_a_row_that_contradicts_what_was_told_is_a_flaw(row: TrajectoryRow, words: str) -> None:
    (flaw, *_) = proof({1: row}).flaws
    assert flaw.place == "trajectory.csv"
    assert words in flaw.text


def test_a_loss_that_is_recorded_nowhere_is_told_in_words() -> None:
    flaw = proof(losses={"events.jsonl": lambda step: None}).flaws[0]
    assert flaw.text == "step 0 has the loss 1.5, and events.jsonl has none"


def test_a_hash_that_no_worker_has_told_is_a_flaw_unless_another_host_has_it() -> None:
    assert "no worker reported this hash" in proof(hashes=lambda step: StepHashes()).flaws[0].text
    assert proof(hashes=lambda step: StepHashes(), is_alone=False).is_whole


def test_buffers_are_those_that_the_workers_of_all_pipelines_have_told() -> None:
    def flaws(of_second: str) -> list[str]:
        def told(step: int) -> StepHashes:
            return replace(told_by_workers(step), buffers={(layer, each): f"{each}" for layer, each in PLACES})

        joined = joined_buffers(["0", of_second])
        rows = {number: replace(row, buffers=joined) for number, row in enumerate(ROWS)}
        found = proof(rows, hashes=told, num_pipelines=2).flaws
        return [flaw.text for flaw in found if flaw.place == "trajectory.csv"]

    assert flaws("1") == []
    assert flaws("2")[0] == "step 0, layer 0: the workers reported another hash of the buffers"


def test_a_second_comparison_is_a_flaw() -> None:
    (comparison,) = HISTORY.of(ComparisonRecord)
    twice = history_of([*HISTORY.records, comparison])
    run, twin = (Computation(folder, ROWS, {}, 2) for folder in ("", "twin/"))
    assert [flaw.text for flaw in proved(twice, run, twin, (), "").flaws] == ["the run was compared 2 times"]


# The twin of a job, the name of its trajectory, and the comparison with it.


TWIN_ROWS = [
    TrajectoryRow(step, layer, f"{step}{layer}" * 32, "0" * 64, 1.5) for step in range(3) for layer in range(2)
]
FACTS: dict[str, object] = {
    "python": "3.11",
    "torch": "2",
    "machine": "x86_64",
    "cpu": "a",
    "isa": ["avx2"],
    "host": "h",
}


def test_the_twin_has_no_redundancy_and_the_same_bits() -> None:
    job = Job(redundancy="eager", redundancy_level=2, log_every=2, validate_every=7, seed=3, threads=2)
    cheapest: dict[str, Any] = {"redundancy": "none", "check_pure": False, "validate_every": 0, "results": ""}
    assert twin_of(job) == Job(**cheapest, residuals="recompute", checkpoint_every="0", seed=3, threads=2)
    assert check_job(twin_of(job)) == []


def test_runs_that_differ_in_no_bit_have_one_twin() -> None:
    name = fingerprint(Job(), FACTS, "s")
    assert name is not None
    for same in (Job(redundancy="eager"), Job(name="x", results="y", validate_every=0), Job(check_pure=False)):
        assert fingerprint(same, FACTS, "s") == name
    assert fingerprint(Job(), FACTS | {"host": "other"}, "s") == name


@looped(
    "changed", [{"seed": 1}, {"threads": 2}, {"steps": 81}, {"audit": 2}, {"stages": 2}, {"model_args": {"width": 8}}]
)
def test_whatever_may_change_a_row_changes_the_name(changed: dict[str, Any]) -> None:
    assert fingerprint(replace(Job(), **changed), FACTS, "s") != fingerprint(Job(), FACTS, "s")


@pytest.mark.parametrize("name", ["python", "torch", "machine", "cpu", "isa"])
def test_another_host_or_program_has_another_name(name: str) -> None:
    assert fingerprint(Job(), FACTS | {name: "other"}, "s") != fingerprint(Job(), FACTS, "s")
    assert fingerprint(Job(), FACTS, "t") != fingerprint(Job(), FACTS, "s")


@pytest.mark.parametrize("job", [Job(model="mine:make"), Job(data="a.txt"), Job(data="mine:data"), Job(data="mnist")])
def test_what_a_user_may_edit_has_no_name(job: Job) -> None:
    assert fingerprint(job, FACTS, "s") is None


def test_files_of_data_count_by_their_hashes_and_factories_may_read_anything() -> None:
    job, file = Job(data="a.txt"), ("a.txt", 3, "0" * 64)
    name = fingerprint(job, FACTS, "s", [file])
    assert name is not None
    assert fingerprint(job, FACTS, "s", [("a.txt", 3, "1" * 64)]) not in (name, None)
    assert fingerprint(Job(data="mine:data"), FACTS, "s", [file]) is None
    for own in (Job(model="mine:make", data="a.txt"), Job(optimizer="mine:Lion"), Job(lr_schedule="mine:rate")):
        assert fingerprint(own, FACTS, "s", [file]) is None
    assert fingerprint(Job(metrics="mine:f1"), FACTS, "s") == fingerprint(Job(), FACTS, "s")


def test_built_in_data_are_those_of_the_catalogue() -> None:
    assert {*DATA, "auto"} == BUILT_IN_DATA


EVENTS: list[dict[str, Any]] = [
    {"event": "job", "steps": 4},
    {"event": "commit", "step": 0},
    {"event": "commit", "step": 1},
]
TWIN_HISTORY = made_history(EVENTS)


def test_equal_rows_are_compared_step_by_step() -> None:
    found = compare(TWIN_ROWS, reversed(TWIN_ROWS), TWIN_HISTORY)
    assert (found.compared, found.steps, found.last_step, found.difference) == (3, 4, 2, None)
    assert str(found) == "weights identical to the run without the fault, 3 of 4 steps"


def test_steps_that_only_one_has_are_not_compared() -> None:
    found = compare([row for row in TWIN_ROWS if row.step != 1], TWIN_ROWS[:-2], TWIN_HISTORY)
    assert (found.compared, found.last_step, found.difference) == (1, 0, None)
    assert compare([], TWIN_ROWS, TWIN_HISTORY).compared == 0
    assert compare([], TWIN_ROWS, TWIN_HISTORY).last_step == -1


def test_a_difference_is_named_with_its_step_layer_and_tensor() -> None:
    names = ("weight", "bias", "weight.exp_avg")
    ours, its = ((names, marks) for marks in ("11111111" * 3, "1111111122222222" + "33333333"))
    mine = replace(TWIN_ROWS[3], state="ff", marks=(ours, NO_MARKS))
    twin = [*TWIN_ROWS[:3], replace(TWIN_ROWS[3], marks=(its, NO_MARKS)), *TWIN_ROWS[4:]]
    found = compare([*TWIN_ROWS[:3], mine, *TWIN_ROWS[4:]], twin, TWIN_HISTORY).difference
    assert found is not None
    assert (found.step, found.layer, found.tensor) == (1, 1, "bias")
    assert str(found) == (
        "step 1, layer 1, tensor bias: different weights or optimizer state, "
        "ff in this run and 111111111111 in its twin"
    )


@looped(
    ("failure", "disturbed", "said"),
    [
        ([], None, "there was no fault: the model is not deterministic"),
        (
            [{"event": "fault", "step": 2, "action": "0B0"}],
            2,
            "it differs before the fault of step 2: the model is not",
        ),
        ([{"event": "fault", "step": 1, "action": "0B0"}], 1, ""),
        ([{"event": "fault", "step": 2, "action": None, "after": "a"}], 1, ""),  # in a recovery: the step is not known
        ([{"event": "exit", "expected": True}], None, "there was no fault: the model is not deterministic"),
        ([{"event": "exit", "expected": False}], 1, ""),  # a worker may die after the commit, inside its optimizer step
        ([{"event": "epoch", "verdict": [[1, "was silent"]]}], 1, ""),
    ],
)
def test_a_difference_before_the_first_failure_is_no_fault_of_the_recovery(
    failure: list[dict[str, Any]], disturbed: int | None, said: str
) -> None:
    changed = [replace(row, state="x") if row.step == 1 else row for row in TWIN_ROWS]
    found = compare(changed, TWIN_ROWS, made_history([*EVENTS, *failure]))
    assert (found.disturbed, found.is_random) == (disturbed, bool(said))
    assert said in str(found)
    assert ("deterministic" in str(found)) == bool(said)
