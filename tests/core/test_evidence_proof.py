"""The verdict on the weights, of hashes, losses and records as values: each contradiction alone, under no seal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from engine.core.checks.proof import Computation, Proof, StepHashes, proved
from engine.core.checks.trajectory import TrajectoryRow
from tests.core.made_records import made_history

HISTORY = made_history(
    [
        {"event": "job", "steps": 2, "stages": 1},
        *({"event": "commit", "step": step, "loss": 1.5} for step in range(2)),
        {"event": "comparison", "compared": 2, "steps": 2, "last_step": 1, "difference": None, "disturbed": None},
    ]
)
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
        (replace(ROWS[1], state="other"), "step 0, layer 1: the workers have told another hash of the weights"),
        (replace(ROWS[1], buffers="other"), "step 0, layer 1: the workers have told another hash of the buffers"),
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
    assert "no worker has told this hash" in proof(hashes=lambda step: StepHashes()).flaws[0].text
    assert proof(hashes=lambda step: StepHashes(), is_alone=False).is_whole
