"""Which host gets which worker: neighbours stand together, because neighbours send the most to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def deal(workers: Sequence[int], hosts: Sequence[str]) -> dict[int, str]:
    """Returns the host of each worker: runs of neighbours, as equal as possible."""
    return {worker: hosts[place * len(hosts) // len(workers)] for place, worker in enumerate(workers)}


def most_on_one(num_workers: int, num_hosts: int) -> int:
    """Returns the workers that the host with the most of them gets."""
    return -(-num_workers // num_hosts)


def host_for_one_more(dealt: Mapping[int, str], hosts: Sequence[str]) -> str:
    """Returns the host for a worker that comes later: the first of those with the fewest workers."""
    placed = [*dealt.values()]
    return min(hosts, key=placed.count)
