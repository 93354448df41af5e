"""Actions as text, and back."""

from __future__ import annotations

import itertools

import pytest

from engine.core.action import (
    COMPUTE_OPS,
    OP_TABLE,
    RECEIVE_OPS,
    SEND_OPS,
    STAGE_OPS,
    STASH_OPS,
    WHOLE_STAGE,
    Action,
    Op,
    parse_action,
)
from engine.core.errors import ScheduleError
from tests.looped import looped


@looped(
    ("action", "text"),
    [
        (Action(2, Op.F, 0), "2F0"),
        (Action(0, Op.B, 17), "0B17"),
        (Action(10, Op.SEND_F, 3), "10SEND_F3"),
        (Action(1, Op.RECV_B, 0, pipeline=2), "1RECV_B0@2"),
        (Action(2, Op.REDO_F, 4), "2f4"),
        (Action(0, Op.REDO_F, 13, pipeline=1), "0f13@1"),
        (Action(1, Op.I, 3), "1I3"),
        (Action(1, Op.W, 0), "1W0"),
        (Action(3, Op.REDUCE_GRAD), "3REDUCE_GRAD"),
        (Action(3, Op.LOG), "3LOG"),
        (Action(3, Op.STREAM, 1), "3STREAM1"),
        (Action(3, Op.HEAL, pipeline=1), "3HEAL@1"),
        (Action(0, Op.STEP, pipeline=11), "0STEP@11"),
    ],
)
def test_text_form(action: Action, text: str) -> None:
    assert str(action) == text
    assert parse_action(text) == action
    assert parse_action(f"  {text}\t") == action


def test_every_action_survives_its_text() -> None:
    for op, stage, microbatch, pipeline in itertools.product(Op, (0, 1, 12), (0, 9, 130), (0, 1, 25)):
        action = Action(stage, op, WHOLE_STAGE if op in STAGE_OPS else microbatch, pipeline)
        assert parse_action(str(action)) == action


def test_every_op_is_of_one_kind() -> None:
    kinds = (COMPUTE_OPS, RECEIVE_OPS, SEND_OPS, STAGE_OPS, {Op.STREAM, Op.HAND, Op.SHIP}, STASH_OPS)
    assert sorted(op for kind in kinds for op in kind) == sorted(Op)


@looped(
    "text",
    [
        *(
            "",
            "F0",
            "2",
            "2G0",
            "2b0",
            "2ff0",
            "2fF0",
            "2f_F0",
            "2send_f0",
            "-1F0",
            "2F-1",
            "2 F0",
            "2F0@",
            "2F0@-1",
            "2F0@1@2",
            "2SEND_0",
            "2F0;",
            "2F0\n1F0",
        ),
        *("9" * 5000 + "F0", "2F" + "9" * 5000, "\u0662F0"),
    ],
)
def test_what_spells_no_action_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError) as refused:
        parse_action(text)
    assert str(refused.value) == f"expected an action such as 2F0 or 1SEND_B3, found {text!r}"


def test_microbatch_stands_where_it_belongs_and_only_there() -> None:
    with pytest.raises(ScheduleError, match=r"^expected a microbatch after SEND_F, found '2SEND_F'$"):
        parse_action("2SEND_F")
    with pytest.raises(ScheduleError, match=r"^expected a microbatch after f, found '2f@1'$"):
        parse_action("2f@1")
    with pytest.raises(ScheduleError, match=r"^expected no microbatch after LOG, found '2LOG1'$"):
        parse_action("2LOG1")
    with pytest.raises(ScheduleError, match=r"^expected no microbatch after STEP, found '2STEP0@1'$"):
        parse_action("2STEP0@1")


def test_every_op_has_a_row() -> None:
    assert list(OP_TABLE) == list(Op)
