"""The happens-before rule, against a table: what each action needs, as worker:action."""

from __future__ import annotations

import pytest

from engine.core.action import Op, parse_action
from engine.core.ownership import Grid, Ownership, one_slot_each
from engine.core.requires import Need, rendezvous, requires

THREE = one_slot_each(Grid(3, 4))
TWO_PIPELINES = Ownership(Grid(2, 4, pipelines=2), (5, 4, 7, 6))
MERGED = Ownership(Grid(3, 4), (0, 1, 1))
TIED = one_slot_each(Grid(4, 2, pipelines=2, ties=((0, 3), (0, 2))))


def drawn(needs: tuple[Need, ...]) -> str:
    """Returns needs as text."""
    return " ".join(f"{worker}:{action}" for worker, action in needs)


@pytest.mark.parametrize(
    ("ownership", "worker", "action", "needs"),
    [
        (THREE, 0, "0F2", ""),
        (THREE, 1, "1F2", "1:1RECV_F2"),
        (THREE, 2, "2F0", "2:2RECV_F0"),
        (THREE, 0, "0B0", "0:0F0 0:0RECV_B0"),
        (THREE, 1, "1B2", "1:1F2 1:1B1 1:1RECV_B2"),
        (THREE, 2, "2B0", "2:2F0"),
        (THREE, 2, "2B3", "2:2F3 2:2B2"),
        (THREE, 0, "0SEND_F1", "0:0F1"),
        (THREE, 1, "1RECV_F1", "0:0SEND_F1"),
        (THREE, 2, "2SEND_B1", "2:2B1"),
        (THREE, 1, "1RECV_B1", "2:2SEND_B1"),
        (THREE, 1, "1REDUCE_GRAD", "1:1B3"),
        (THREE, 1, "1COMMIT", "1:1REDUCE_GRAD"),
        (THREE, 1, "1STEP", "0:0COMMIT 1:1COMMIT 2:2COMMIT"),
        (TWO_PIPELINES, 6, "1RECV_F0@1", "7:0SEND_F0@1"),
        (TWO_PIPELINES, 4, "1RECV_F0", "5:0SEND_F0"),
        (TWO_PIPELINES, 7, "0B1@1", "7:0F1@1 7:0B0@1 7:0RECV_B1@1"),
        (TWO_PIPELINES, 7, "0STEP@1", "5:0COMMIT 4:1COMMIT 7:0COMMIT@1 6:1COMMIT@1"),
        (MERGED, 1, "1F0", "1:1RECV_F0"),
        (MERGED, 1, "2F0", "1:1F0"),
        (MERGED, 1, "1B0", "1:1F0 1:2B0"),
        (TIED, 0, "0COMMIT", "0:0REDUCE_GRAD 2:2REDUCE_GRAD 3:3REDUCE_GRAD"),
        (TIED, 7, "3COMMIT@1", "7:3REDUCE_GRAD@1 4:0REDUCE_GRAD@1"),
        (TIED, 1, "1COMMIT", "1:1REDUCE_GRAD"),
    ],
)
def test_needs(ownership: Ownership, worker: int, action: str, needs: str) -> None:
    assert drawn(requires(parse_action(action), worker, ownership)) == needs


def test_the_reduction_meets_its_stage_in_the_other_pipelines() -> None:
    ownership = one_slot_each(Grid(2, 1, pipelines=3))
    assert drawn(rendezvous(parse_action("1REDUCE_GRAD@1"), ownership)) == "1:1REDUCE_GRAD 5:1REDUCE_GRAD@2"
    assert rendezvous(parse_action("1REDUCE_GRAD"), THREE) == ()


@pytest.mark.parametrize("op", [op for op in Op if op is not Op.REDUCE_GRAD])
def test_nothing_else_meets(op: Op) -> None:
    text = f"0{op}" if op in (Op.COMMIT, Op.STEP) else f"0{op}0"
    assert rendezvous(parse_action(text), TWO_PIPELINES) == ()
