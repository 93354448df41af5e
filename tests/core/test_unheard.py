"""The decisions of a run after a take-over: the hosts that are left have all that one of them has heard."""

from __future__ import annotations

import random

import pytest

from engine.core.errors import InvariantError
from engine.core.hosts.ends import missing_decisions
from tests.looped import looped


@looped("seed", range(100))
def test_any_host_that_is_left_gets_all_that_one_of_them_has_heard(seed: int) -> None:
    """Three hosts in turn are lost; each one has a beginning of the list, and tells what the next one may lack."""
    chance = random.Random(seed)  # noqa: S311
    made: list[str] = []  # by the coordinators so far
    known: dict[str, list[str]] = {name: [] for name in "bcde"}
    for turn in range(3):
        made += [f"{turn}/{each}" for each in range(chance.randrange(8))]
        for name in known:
            known[name] = made[: chance.randint(len(known[name]), len(made))]
        heir = chance.choice([*known])
        said = chance.randint(0, len(known[heir]))  # a decision may come to the heir after it stood for election
        told = [dict(enumerate(lines[said:], said)) for name, lines in known.items() if name != heir]
        longest = max(known.values(), key=len)
        known[heir] += missing_decisions(len(known[heir]), told)
        assert known[heir] == longest
        made = known.pop(heir)  # it tells the others what they lack, and is lost later


def test_hosts_that_contradict_each_other_are_a_bug() -> None:
    assert missing_decisions(1, [{0: "a", 1: "b"}, {1: "b", 2: "c", 4: "e"}]) == ("b", "c")
    with pytest.raises(InvariantError, match="number 1"):
        missing_decisions(0, [{1: "b"}, {1: "x"}])
