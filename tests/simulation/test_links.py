"""Simulates jobs whose links go silent, in one way or both, flap, or bring messages late, twice or in part."""

from __future__ import annotations

from collections import Counter

import pytest

from engine.core.protocol.state import Phase
from tests.simulation.case import LINK_KINDS
from tests.simulation.judge import DARK
from tests.simulation.planting import all_well
from tests.simulation.schedules import link_faults, random_link_fault, small_cases
from tests.soaked import soaked

PARTS = 4
STRIDE = 29  # of the moments of the first step; the soak has each fifth
SCHEDULES, DARK_EDGES, RANDOM = 105, 20, 50  # at least, in each part


@pytest.mark.parametrize("stride", [STRIDE, pytest.param(5, marks=pytest.mark.soak)])
@pytest.mark.parametrize("part", range(PARTS))
def test_one_end_of_a_dark_edge_is_given_up_and_no_other_worker(part: int, stride: int) -> None:
    """The job finishes if others hold what an end owns; a link that heals in time makes no epoch."""
    histories = [
        history
        for nth, case in enumerate(small_cases()[part::PARTS])
        for history in all_well(link_faults(case, stride, nth))
    ]
    assert len(histories) >= SCHEDULES
    assert {fault.kind for history in histories for fault in history.struck} == {*LINK_KINDS} - {"link"}
    for history in histories:
        (fault,), case = history.case.faults, history.case
        assert fault.hinders or history.epoch == 1, case.text()
        redundant = case.redundancy != "none" or case.pipelines > 1
        assert history.phase is Phase.FINISHED or not redundant, case.text()
    assert sum(DARK in history.turns for history in histories) >= DARK_EDGES


@pytest.mark.parametrize("part", [*range(PARTS // 2), *map(soaked, range(PARTS // 2, PARTS))])
def test_links_fail_beside_deaths_of_workers_and_coordinators(part: int) -> None:
    histories = all_well(random_link_fault(number) for number in range(part * RANDOM, (part + 1) * RANDOM))
    turns = Counter(turn for history in histories for turn in history.turns)
    assert {DARK, "group waits for a silent link", "another coordinator takes over", "shadow is healed"} <= set(turns)
