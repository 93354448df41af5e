"""The deal of workers to hosts: neighbours together, every host has some, and later ones go where the fewest are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.core.hosts.ends import deal, host_for_one_more, most_on_one

SHAPES = st.integers(1, 8).flatmap(lambda hosts: st.tuples(st.just(hosts), st.integers(hosts, 32)))


@given(SHAPES)
def test_neighbours_stand_together_and_hosts_have_equal_parts(shape: tuple[int, int]) -> None:
    hosts, workers = [f"h{each}" for each in range(shape[0])], range(shape[1])
    dealt = deal(workers, hosts)
    assert [dealt[each] for each in workers] == sorted(dealt.values(), key=hosts.index)
    sizes = [list(dealt.values()).count(each) for each in hosts]
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) == most_on_one(shape[1], shape[0])


def test_a_later_worker_goes_where_the_fewest_are() -> None:
    dealt = deal(range(5), ["a", "b"])
    assert dealt == {0: "a", 1: "a", 2: "a", 3: "b", 4: "b"}
    assert host_for_one_more(dealt, ["a", "b"]) == "b"
    assert host_for_one_more({**dealt, 5: "b"}, ["a", "b"]) == "a"
    assert host_for_one_more(dealt, ["a"]) == "a"
