"""The faulty links of the simulated network hold up, lose, delay and repeat messages as they say."""

from __future__ import annotations

import pytest

from tests.doubles.faulty_links import KINDS, Fate, FaultyLinks, Kind, LinkFault

WAY, BACK = (0, 1), (1, 0)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (LinkFault("silent", 50), [[(50, "whole")], [(50, "whole")], [(60, "whole")]]),
        (LinkFault("silent"), [[], [], []]),
        (LinkFault("late", 50, 5), [[(15, "whole")], [(25, "whole")], [(60, "whole")]]),
        (LinkFault("late", 50, 45), [[(55, "whole")], [(65, "whole")], [(65, "whole")]]),
        (LinkFault("reset", 50), [[(10, "broken")], [(20, "broken")], [(60, "whole")]]),
        (LinkFault("duplicated", 50), [[(10, "whole")] * 2, [(20, "whole")] * 2, [(60, "whole")]]),
        (LinkFault("middle", 50), [[(10, "part"), (50, "whole")], [(50, "whole")], [(60, "whole")]]),
        (LinkFault("middle"), [[(10, "part")], [], []]),
    ],
)
def test_the_fates_of_three_messages(fault: LinkFault, expected: list[list[tuple[int, str]]]) -> None:
    links = FaultyLinks()
    links.strike(WAY, fault)
    assert [[tuple(fate) for fate in links.fates(now, WAY)] for now in (10, 20, 60)] == expected
    assert links.fates(10, BACK) == (Fate(10, "whole"),), "the other way is as before"


@pytest.mark.parametrize("kind", KINDS)
def test_no_message_overtakes_another_and_none_is_lost_after_a_silence(kind: Kind) -> None:
    links = FaultyLinks()
    links.strike(WAY, LinkFault(kind, 30, 17))
    come = [fate for now in range(60) for fate in links.fates(now, WAY) if fate.what == "whole"]
    assert [each.at for each in come] == sorted(each.at for each in come)
    assert len(come) == {"reset": 30, "duplicated": 90}.get(kind, 60)


def test_a_healed_link_and_a_new_fault_begin_anew() -> None:
    links = FaultyLinks()
    links.strike(WAY, LinkFault("middle"))
    assert [fate.what for fate in links.fates(1, WAY)] == ["part"]
    assert links.are_cut(2, (0, 1, 2))
    assert not links.are_cut(2, (1, 2))
    links.heal(WAY)
    assert links.fates(3, WAY) == (Fate(3, "whole"),)
    assert not links.are_cut(3, (0, 1))
    links.strike(WAY, LinkFault("middle", 9))
    assert [fate.what for fate in links.fates(4, WAY)] == ["part", "whole"]
    assert not links.are_cut(9, (0, 1))
