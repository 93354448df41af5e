"""The happens-before rule, against a table: what each action needs and makes, as place:value."""

from __future__ import annotations

import pytest

from engine.core.action import STAGE_OPS, Op, parse_action
from engine.core.ownership import Grid, Ownership, fresh
from engine.core.program.dependencies import makes, needs, rendezvous
from engine.core.value import WIRE, Held, Kind, Value

THREE = fresh(Grid(3, 4))
TWO_PIPELINES = Ownership(Grid(2, 4, pipelines=2), (5, 4, 7, 6))
MERGED = Ownership(Grid(3, 4), (0, 1, 1))
BOTH_PIPELINES = Ownership(Grid(2, 4, pipelines=3), (0, 1, 2, 1, 4, 5))
TIED = fresh(Grid(4, 2, pipelines=2, ties=((0, 3), (0, 2))))
TIED_AT_ONE = Ownership(Grid(3, 2, ties=((0, 2),)), (0, 1, 0))
SHADOWED = Ownership(Grid(2, 4), (0, 1), ((1,), (0, 2)))


def drawn(held: tuple[Held, ...]) -> str:
    """Returns values at places as text: what, pipeline.stage, index."""
    words = []
    for place, (kind, pipeline, stage, index) in held:
        where = "wire" if place == WIRE else str(place)
        words.append(f"{where}:{kind}{pipeline}.{stage}" + ("" if index < 0 else f"/{index}"))
    return " ".join(words)


@pytest.mark.parametrize(
    ("ownership", "worker", "action", "needed", "made"),
    [
        (THREE, 0, "0F0", "", "0:activation0.0/0 0:residual0.0/0 0:counted0.0/0"),
        (THREE, 0, "0F2", "0:counted0.0/1", "0:activation0.0/2 0:residual0.0/2 0:counted0.0/2"),
        (
            THREE,
            1,
            "1F2",
            "1:activation0.0/2 1:counted0.1/1",
            "1:activation0.1/2 1:residual0.1/2 1:counted0.1/2",
        ),
        (SHADOWED, 0, "1F0", "0:activation0.0/0", "0:activation0.1/0 0:residual0.1/0 0:counted0.1/0"),
        (THREE, 1, "1f2", "1:activation0.0/2", "1:activation0.1/2 1:residual0.1/2"),
        (THREE, 0, "0B0", "0:residual0.0/0 0:gradient0.1/0", "0:gradient0.0/0 0:added0.0/0"),
        (
            THREE,
            1,
            "1B2",
            "1:residual0.1/2 1:gradient0.2/2 1:added0.1/1",
            "1:gradient0.1/2 1:added0.1/2",
        ),
        (THREE, 2, "2B0", "2:residual0.2/0", "2:gradient0.2/0 2:added0.2/0"),
        (THREE, 1, "1I2", "1:residual0.1/2 1:gradient0.2/2", "1:gradient0.1/2 1:pending0.1/2"),
        (THREE, 1, "1W2", "1:pending0.1/2 1:added0.1/1", "1:added0.1/2"),
        (THREE, 1, "1W0", "1:pending0.1/0", "1:added0.1/0"),
        (THREE, 0, "0SEND_F1", "0:activation0.0/1", "wire:activation0.0/1"),
        (THREE, 1, "1RECV_F1", "wire:activation0.0/1", "1:activation0.0/1"),
        (THREE, 2, "2SEND_B1", "2:gradient0.2/1", "wire:gradient0.2/1"),
        (THREE, 1, "1RECV_B1", "wire:gradient0.2/1", "1:gradient0.2/1"),
        (TWO_PIPELINES, 6, "1RECV_F0@1", "wire:activation1.0/0", "6:activation1.0/0"),
        (MERGED, 1, "2F0", "1:activation0.1/0", "1:activation0.2/0 1:residual0.2/0 1:counted0.2/0"),
        (THREE, 1, "1REDUCE_GRAD", "1:added0.1/3 1:counted0.1/3", "1:reduced0.1 wire:reduced0.1"),
        (
            BOTH_PIPELINES,
            1,
            "1REDUCE_GRAD",
            "1:added0.1/3 1:counted0.1/3 1:added1.1/3 1:counted1.1/3",
            "1:reduced0.1 wire:reduced0.1 1:reduced1.1 wire:reduced1.1",
        ),
        (THREE, 1, "1LOG", "1:reduced0.1", "1:logged0.1 wire:logged0.1"),
        (TIED, 0, "0LOG", "0:reduced0.0 wire:reduced0.2 wire:reduced0.3", "0:logged0.0 wire:logged0.0"),
        (TIED, 7, "3LOG@1", "7:reduced1.3 wire:reduced1.0", "7:logged1.3 wire:logged1.3"),
        (TIED_AT_ONE, 0, "2LOG", "0:reduced0.2 0:reduced0.0", "0:logged0.2 wire:logged0.2"),
        (SHADOWED, 2, "1LOG", "wire:logged0.1", "2:logged0.1"),
        (SHADOWED, 1, "1HEAL", "", "wire:state0.1"),
        (SHADOWED, 2, "1HEAL", "wire:state0.1", "2:state0.1"),
        (THREE, 1, "1COMMIT", "1:logged0.1", "wire:voted0.1/1"),
        (SHADOWED, 2, "1COMMIT", "2:logged0.1", "wire:voted0.1/2"),
        (THREE, 1, "1STEP", "wire:voted0.0/0 wire:voted0.1/1 wire:voted0.2/2", ""),
        (SHADOWED, 2, "1STEP", "wire:voted0.0/0 wire:voted0.0/1 wire:voted0.1/1 wire:voted0.1/0 wire:voted0.1/2", ""),
    ],
)
def test_needs_and_makes(ownership: Ownership, worker: int, action: str, needed: str, made: str) -> None:
    assert drawn(needs(parse_action(action), worker, ownership)) == needed
    assert drawn(makes(parse_action(action), worker, ownership)) == made


def test_the_reduction_meets_its_stage_in_the_other_pipelines() -> None:
    ownership = fresh(Grid(2, 1, pipelines=3))
    meets = ((1, parse_action("1REDUCE_GRAD")), (5, parse_action("1REDUCE_GRAD@2")))
    assert rendezvous(parse_action("1REDUCE_GRAD@1"), 3, ownership) == meets
    assert rendezvous(parse_action("1REDUCE_GRAD"), 1, THREE) == ()


def test_a_worker_with_a_stage_in_two_pipelines_is_met_once() -> None:
    meets = ((1, parse_action("1REDUCE_GRAD")),)
    assert rendezvous(parse_action("1REDUCE_GRAD@2"), 5, BOTH_PIPELINES) == meets
    assert rendezvous(parse_action("1REDUCE_GRAD"), 1, BOTH_PIPELINES) == ((5, parse_action("1REDUCE_GRAD@2")),)


def test_owners_of_a_stage_put_its_shards_together_together() -> None:
    assert rendezvous(parse_action("1UNSHARD"), 1, BOTH_PIPELINES) == ((5, parse_action("1UNSHARD@2")),)


@pytest.mark.parametrize("op", [op for op in Op if op not in (Op.REDUCE_GRAD, Op.UNSHARD)])
def test_nothing_else_meets(op: Op) -> None:
    text = f"0{op.value}" if op in STAGE_OPS else f"0{op.value}0"
    assert rendezvous(parse_action(text), 5, TWO_PIPELINES) == ()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Value(Kind.ACTIVATION, 0, 2, 3), "activation of stage 2 microbatch 3"),
        (Value(Kind.GRADIENT, 1, 0, 0), "gradient of stage 0 microbatch 0 pipeline 1"),
        (Value(Kind.REDUCED, 0, 4), "reduced of stage 4"),
        (Value(Kind.VOTED, 2, 4, 7), "voted of stage 4 worker 7 pipeline 2"),
    ],
)
def test_a_value_as_text(value: Value, text: str) -> None:
    assert str(value) == text
