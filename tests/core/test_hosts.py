"""Hosts: no loss of one host loses a slot while there is another one; the next one is lost after the heal."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from engine.core.hosts.ends import deal
from engine.core.ownership import Grid, Ownership, healed, with_shadows
from engine.core.protocol.membership import plan_document
from engine.core.protocol.state import Options, begin
from tests.looped import looped

MOST_WORKERS, MOST_HOSTS = 16, 8


def dealt(workers: int, hosts: int) -> dict[int, int]:
    """Returns the host of each worker: ranks are dealt in blocks, as launchers do."""
    return {worker: worker * hosts // workers for worker in range(workers)}


def heal(ownership: Ownership, members: set[int], host_of: dict[int, int], *, knows_hosts: bool = True) -> Ownership:
    """Returns the ownership when two steps have healed it: the second one drops what is surplus."""
    known = tuple(sorted(members))
    hosts = tuple(host_of[each] for each in known) if knows_hosts and len({host_of[each] for each in known}) > 1 else ()
    for _ in range(2):
        ownership = healed(ownership, "lazy", 1, known, (), (), hosts)
    assert all(len(line) == 1 for line in ownership.shadows) or len(members) == 1
    return ownership


def lost_by(ownership: Ownership, gone: set[int]) -> bool:
    """Returns whether a loss of workers at once loses a slot."""
    return any({*ownership.replicas(*slot)} <= gone for slot in ownership.grid.slots())


def without(ownership: Ownership, gone: set[int]) -> Ownership:
    """Returns the ownership after a loss: the first replica that is left owns."""
    lines = [[each for each in ownership.replicas(*slot) if each not in gone] for slot in ownership.grid.slots()]
    return Ownership(ownership.grid, tuple(line[0] for line in lines), tuple(tuple(line[1:]) for line in lines))


def in_runs(workers: int, blocks: int) -> Ownership:
    """Returns fresh runs of blocks, whose shadows were placed by those who knew no hosts."""
    owners = tuple(place // blocks for place in range(workers * blocks))
    return with_shadows(Ownership(Grid(workers * blocks, 1, blocks=blocks), owners), "lazy", 1, range(workers))


def shapes(blocks: int) -> list[tuple[int, int, int]]:
    return [
        (workers, hosts, blocks)
        for hosts in range(2, MOST_HOSTS + 1)
        for workers in range(hosts, MOST_WORKERS // (1 + (blocks > 1)) + 1)
    ]


def deadly(ownership: Ownership, on: dict[int, set[int]]) -> list[int]:
    """Returns the hosts whose loss loses a slot."""
    return [host for host, there in on.items() if lost_by(ownership, there)]


def walk(workers: int, hosts: int, blocks: int, *, every_order: bool) -> int:
    """Loses one host after the other, heals after each, and looks at all that are left while there are two.

    Returns the number of states. Without `every_order` each host is lost first, each other one second, then the others
    by turns.
    """
    host_of = dealt(workers, hosts)
    everywhere = {host: {each for each, there in host_of.items() if there == host} for host in range(hosts)}
    in_order = tuple(range(hosts))
    todo, seen = [(heal(in_runs(workers, blocks), {*host_of}, host_of), in_order)], set[tuple[object, ...]]()
    while todo:
        ownership, left = todo.pop()
        state = (ownership.owners, ownership.shadows, frozenset(left) if every_order else left)
        if len(left) < 2 or state in seen:
            continue
        seen.add(state)
        on = {host: everywhere[host] for host in left}
        assert deadly(ownership, on) == [], (left, ownership)
        for host in left if every_order or len(left) > hosts - 2 else left[:1]:
            members = {each for other in left if other != host for each in on[other]}
            place = left.index(host)
            following = (*left[place + 1 :], *left[:place])
            todo.append((heal(without(ownership, on[host]), members, host_of), following))
    return len(seen)


@pytest.mark.parametrize(("workers", "hosts", "blocks"), [*shapes(1), *shapes(2)])
def test_no_host_is_deadly_while_there_are_two(workers: int, hosts: int, blocks: int) -> None:
    """Also after the heal that follows a loss, until two are left."""
    assert walk(workers, hosts, blocks, every_order=hosts <= 4) >= hosts - 1


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("hosts", range(5, MOST_HOSTS + 1))
def test_no_host_is_deadly_in_any_order_of_losses(hosts: int) -> None:
    for workers, _, blocks in [each for each in (*shapes(1), *shapes(2)) if each[1] == hosts]:
        walk(workers, hosts, blocks, every_order=True)


@looped(("workers", "hosts", "blocks"), [*shapes(1), *shapes(2)])
def test_a_run_begins_without_a_deadly_host(workers: int, hosts: int, blocks: int) -> None:
    """The hosts are those that agents deal; with the shadows of those who know no hosts there are deadly ones."""
    names = [f"host-{number}" for number in range(hosts)]
    host_of = deal(range(workers), names)
    assert host_of == {worker: names[number] for worker, number in dealt(workers, hosts).items()}
    bare = replace(in_runs(workers, blocks), shadows=())
    begun = with_shadows(bare, "lazy", 1, range(workers), host_of=host_of)
    on = {number: {each for each in host_of if host_of[each] == name} for number, name in enumerate(names)}
    assert deadly(begun, on) == []
    assert deadly(in_runs(workers, blocks), on) or workers == hosts


@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_the_rule_without_hosts_loses_slots(blocks: int) -> None:
    host_of = dealt(MOST_WORKERS, MOST_HOSTS)
    blind = heal(in_runs(MOST_WORKERS, blocks), {*host_of}, host_of, knows_hosts=False)
    assert all(lost_by(blind, {2 * host, 2 * host + 1}) for host in range(MOST_HOSTS))


@pytest.mark.parametrize("per_host", [1, 2])
def test_two_other_hosts_share_a_run_where_the_neighbours_are_on_others(per_host: int) -> None:
    """With one worker on each host, halves stay as they are; else the next run on another host takes a half."""
    host_of = dealt(8, 8 // per_host)
    begun = in_runs(8, 4)
    found = heal(begun, {*host_of}, host_of)
    if per_host == 1:
        assert found == begun
    for worker in range(8):
        run = found.slots_of(worker)
        first, *_, last = (found.shadows_of(*slot)[0] for slot in run)
        assert (first, last) == ((worker - 1) % 8, (worker + 1) % 8) or per_host > 1
        assert all(host_of[found.shadows_of(*slot)[0]] != host_of[worker] for slot in run)


def test_a_slot_whose_replicas_are_all_on_one_host_gets_one_elsewhere_before_one_is_dropped() -> None:
    step = partial(healed, redundancy="lazy", level=1, members=(0, 1, 2), leaving=(), next_owners=(), hosts=(0, 0, 1))
    once = step(Ownership(Grid(1, 1), (0,), ((1,),)))
    assert once.shadows == ((1, 2),)
    assert step(once).shadows == ((2,),)
    assert step(step(once)) == step(once)


def test_after_a_move_the_shadow_on_another_host_stays() -> None:
    """Worker 0 owned the slot, and worker 2 owns it now."""
    moved = Ownership(Grid(1, 1), (2,), ((1, 0),))
    assert healed(moved, "lazy", 1, (0, 1, 2), (), (), (0, 1, 1)).shadows == ((0,),)
    assert healed(moved, "lazy", 1, (0, 1, 2), (), (), ()).shadows == ((1,),)


def test_the_document_of_a_plan_numbers_hosts_only_where_there_are_several() -> None:
    state = begin(Options(stages=3, redundant=True), (0, 1, 2), ((1,), (2,), (0,)), 5, 0)
    one = state._replace(nodes=dict.fromkeys(range(3), "here"))
    two = state._replace(nodes={0: "here", 1: "here", 2: "there", 7: "waits"})
    assert [plan_document(each).hosts for each in (state, one, two)] == [(), (), (0, 0, 1)]
    assert plan_document(two._replace(members=(1, 2))).hosts == (0, 1)
