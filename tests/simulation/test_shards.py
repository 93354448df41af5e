"""Stages in shards in the simulation: deaths, hand-overs and broken links; and a bug that must be caught."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice

import pytest

from engine.core.action import SEND_OPS
from engine.core.program import passes
from engine.core.protocol.state import Phase
from tests.simulation import plans
from tests.simulation.case import Case
from tests.simulation.churn import churn_case
from tests.simulation.planting import all_well, caught
from tests.simulation.schedules import (
    hand_overs,
    link_faults,
    pair_cases,
    random_case,
    single_kills,
    startup_deaths,
    take_overs,
)
from tests.simulation.world import ASKED
from tests.soaked import soaked

pytestmark = pytest.mark.timeout(300)

SHARDS = (
    Case(2, 2, 2, fsdp=1),
    Case(3, 2, 2, fsdp=1, level=2, ties=((0, 2),)),
    Case(1, 2, 3, fsdp=1),
    Case(4, 2, 2, fsdp=1, stages_per_worker=2, schedule="interleaved"),
    Case(2, 2, 4, fsdp=1),
    Case(2, 3, 2, fsdp=1, log_every=1, validate_every=1),
)
RANDOM = 100


@pytest.mark.parametrize("stride", [3, soaked(1)])
@pytest.mark.parametrize("case", SHARDS, ids=lambda each: f"{each.stages}x{each.pipelines}-{each.schedule}")
def test_a_shard_survives_every_death(case: Case, stride: int) -> None:
    first = SHARDS.index(case)  # other moments in each shape
    histories = all_well(single_kills(case, 11 * stride, first))
    assert all(len(history.struck) == 1 and history.epoch >= 2 for history in histories)
    assert {history.phase for history in histories} == {Phase.FINISHED}
    for cases in (pair_cases(case, 797), link_faults(case, 41)):
        all_well(cases)
    for cases in (take_overs(case, 19 * stride, first), hand_overs(case, 97 * stride, first)):
        all_well(cases)
    all_well(islice(startup_deaths(case), first % stride, None, stride))


@pytest.mark.parametrize("count", [RANDOM * 2 // 5, soaked(RANDOM)])
def test_random_histories(count: int) -> None:
    cases = (random_case(number) for number in range(count * 8))
    wanted = [each for each in cases if each.pipelines > 1 and each.blocks == 1 and each.redundancy in ("lazy", "none")]
    assert len(all_well(replace(each, fsdp=1) for each in wanted[:count])) == count


def test_shards_move_while_workers_come_and_go() -> None:
    cases = (churn_case(number) for number in range(4 * RANDOM))
    wanted = [each for each in cases if each.pipelines > 1 and each.redundancy in ("lazy", "none") and each.elastic]
    histories = all_well(replace(each, fsdp=1, waiting=2, joining=1) for each in wanted[: RANDOM // 4])
    turns = Counter(turn for history in histories for turn in history.turns)
    assert min(turns[ASKED], turns["prepared hand-over is taken"]) > RANDOM // 12, turns


def test_a_heal_that_does_not_mind_gathers_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "_AWAITED", SEND_OPS)
    monkeypatch.setattr(passes, "_MAY_WAIT", passes._MAY_WAIT - passes._MEETS)
    plans.forget()
    try:
        caught(single_kills(replace(SHARDS[0], microbatches=1, schedule="gpipe", steps=2)), "the clock had to rule")
    finally:
        plans.forget()
