"""The moves of slots in sentences, with the facts that a run has measured."""

from __future__ import annotations

from typing import Any

from engine.core.checks.moves import moves_in_words
from tests.core.made_records import made_history

MS = 1_000_000
FIRST, MERGED, MOVED = [0, 0, 1, 1, 2, 2], [0, 0, 0, 2, 2, 2], [0, 0, 3, 3, 2, 2]
Event = dict[str, Any]


def at(event: str, at_ms: float, **fields: Any) -> Event:
    return {"event": event, "worker": -1, "pid": 1, "at_ns": round(at_ms * MS), **fields}


def epoch(number: int, at_ms: float, owners: list[int], *, planned: bool) -> Event:
    members = sorted({*owners})
    return at("epoch", at_ms, epoch=number, members=members, owners=owners, shadows=[], planned=planned, verdict=[])


def steps(first: int, last: int, begin_ms: float, each_ms: float) -> list[Event]:
    return [at("commit", begin_ms + each_ms * (step - first + 1), step=step) for step in range(first, last + 1)]


def told(wishes_at: int = 7, last: int = 19, **job: Any) -> list[str]:
    """Returns the sentences of a run of three workers: one is lost, and another one gets its share."""
    events = [
        at("job", 0, **({"model": "mlp", "stages": 3, "blocks": 2, "steps": 40} | job)),
        epoch(1, 1, FIRST, planned=False),
        at("go", 2, epoch=1),
        *steps(0, 3, 2, 100),
        epoch(2, 450, MERGED, planned=False),
        *steps(4, wishes_at, 500, 150),
        at("policy", 1101, step=wishes_at, why="2 blocks of 6 move", owners=MOVED),
        at("policy", 1102, step=wishes_at, why="nothing moves", owners=[]),
        *(
            at("moved", 1200, program=name, epoch=2, step=8, bytes=size)
            for name, size in (("heal", 12_300), ("plan", 9))
        ),
        *steps(wishes_at + 1, wishes_at + 2, 1100, 150),
        epoch(3, 1401, MOVED, planned=True),
        *steps(wishes_at + 3, last, 1400, 100),
    ]
    return [*moves_in_words(made_history(events))]


WISH = "After step 7 the policy wanted other owners: 2 blocks of 6 move."
WENT = "After step 9 block 2 went from worker 0 to worker 3, block 3 went from worker 2 to worker 3"
SENT = "12.3 kB of state were sent for it"


def test_a_move_is_told_with_its_reason_and_with_what_it_has_cost_and_brought() -> None:
    assert told() == [WISH, f"{WENT}; {SENT}; a step took 150 ms before and 100 ms afterwards."]


def test_a_gain_that_was_not_measured_is_not_told() -> None:
    """Three steps are too few, as the first one behind a change of owners does not count."""
    assert told(last=12) == [WISH, f"{WENT}; {SENT}."]
    assert told(last=13)[1].endswith(" afterwards.")
    assert [each.endswith(" afterwards.") for each in (told(4)[1], told(5)[1])] == [False, True]


def test_a_stage_is_told_as_a_stage() -> None:
    assert told(blocks=1, stages=6)[1].startswith("After step 9 stage 2 went from worker 0 to worker 3, stage 3 went")


def test_a_wish_that_is_withdrawn_is_told_as_that() -> None:
    asked = [("2 blocks of 6 move", MOVED), ("no better cut was found", MERGED)]
    policy = [at("policy", 600, step=4, why=why, owners=owners) for why, owners in asked]
    events = [at("job", 0, stages=3, blocks=2, steps=40), epoch(1, 1, MERGED, planned=False), *steps(0, 4, 2, 100)]
    assert [*moves_in_words(made_history([*events, *policy]))] == [
        "After step 4 the policy wanted other owners: 2 blocks of 6 move.",
        "After step 4 the policy withdrew its wish: no better cut was found.",
    ]


def test_a_worker_without_memory_is_told() -> None:
    events = [at("job", 0, stages=3, blocks=2), *(at("cramped", 5, of=3, why=why) for why in ("waits on: x", ""))]
    assert [*moves_in_words(made_history(events))] == [
        "Worker 3 waits on: x.",
        "Worker 3 has memory for a block, and may join.",
    ]


def test_slots_of_several_pipelines_have_the_number_of_theirs() -> None:
    (_, moved) = told(blocks=1, stages=3, pipelines=2)
    assert moved.startswith(
        "After step 9 stage 2 of pipeline 0 went from worker 0 to worker 3, "
        "stage 0 of pipeline 1 went from worker 2 to worker 3; "
    )
