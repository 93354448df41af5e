"""The compute lists of each schedule, against drawings."""

from __future__ import annotations

import pytest

from engine.core.action import Op
from engine.core.program.dry_run import peak_stash
from engine.core.program.schedules import SCHEDULES
from tests.core.drawing import drawn, plain

SHAPES = [(num_stages, num_microbatches) for num_stages in range(1, 17) for num_microbatches in (*range(1, 34), 63, 64)]


@pytest.mark.parametrize(
    ("shape", "drawing"),
    [
        (
            (4, 8),
            """
            0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0F6 0B3 0F7 0B4 0B5 0B6 0B7
            1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1F6 1B4 1F7 1B5 1B6 1B7
            2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2F6 2B5 2F7 2B6 2B7
            3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5 3F6 3B6 3F7 3B7
            """,
        ),
        (
            (4, 2),
            """
            0F0 0F1 0B0 0B1
            1F0 1F1 1B0 1B1
            2F0 2F1 2B0 2B1
            3F0 3B0 3F1 3B1
            """,
        ),
        ((3, 1), "0F0 0B0\n1F0 1B0\n2F0 2B0"),
        ((1, 3), "0F0 0B0 0F1 0B1 0F2 0B2"),
    ],
)
def test_1f1b(shape: tuple[int, int], drawing: str) -> None:
    assert drawn(SCHEDULES["1f1b"](*shape)) == plain(drawing)


@pytest.mark.parametrize(
    ("shape", "drawing"),
    [
        (
            (3, 4),
            """
            0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3
            1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3
            2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3
            """,
        ),
        ((1, 2), "0F0 0F1 0B0 0B1"),
        ((2, 1), "0F0 0B0\n1F0 1B0"),
    ],
)
def test_gpipe(shape: tuple[int, int], drawing: str) -> None:
    assert drawn(SCHEDULES["gpipe"](*shape)) == plain(drawing)


@pytest.mark.parametrize(
    ("shape", "drawing"),
    [
        (
            (4, 8),
            """
            0F0 0F1 0F2 0F3 0F4 0F5 0F6 0B0 0F7 0B1 0B2 0B3 0B4 0B5 0B6 0B7
            1F0 1F1 1F2 1F3 1F4 1B0 1F5 1B1 1F6 1B2 1F7 1B3 1B4 1B5 1B6 1B7
            2F0 2F1 2F2 2B0 2F3 2B1 2F4 2B2 2F5 2B3 2F6 2B4 2F7 2B5 2B6 2B7
            3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5 3F6 3B6 3F7 3B7
            """,
        ),
        ((2, 2), "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"),
        ((3, 1), "0F0 0B0\n1F0 1B0\n2F0 2B0"),
        ((1, 3), "0F0 0B0 0F1 0B1 0F2 0B2"),
    ],
)
def test_eager_1f1b(shape: tuple[int, int], drawing: str) -> None:
    assert drawn(SCHEDULES["eager-1f1b"](*shape)) == plain(drawing)


@pytest.mark.parametrize("name", ["1f1b", "eager-1f1b", "gpipe"])
def test_each_microbatch_goes_forward_then_back_once_and_in_order(name: str) -> None:
    for num_stages, num_microbatches in SHAPES:
        for stage, actions in enumerate(SCHEDULES[name](num_stages, num_microbatches)):
            for op in (Op.F, Op.B):
                microbatches = [action.microbatch for action in actions if action.op is op]
                assert microbatches == list(range(num_microbatches))
            assert {action.stage for action in actions} == {stage}
            assert len(actions) == 2 * num_microbatches


def test_peak_stash_of_every_stage() -> None:
    for num_stages, num_microbatches in SHAPES:
        early = [peak_stash(actions) for actions in SCHEDULES["1f1b"](num_stages, num_microbatches)]
        assert early == [min(num_stages - stage, num_microbatches) for stage in range(num_stages)]
        eager = [peak_stash(actions) for actions in SCHEDULES["eager-1f1b"](num_stages, num_microbatches)]
        assert eager == [min(2 * (num_stages - stage) - 1, num_microbatches) for stage in range(num_stages)]
        late = [peak_stash(actions) for actions in SCHEDULES["gpipe"](num_stages, num_microbatches)]
        assert late == [num_microbatches] * num_stages
