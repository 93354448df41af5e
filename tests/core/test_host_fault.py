"""Faults of hosts: which are refused before the run, and which host each of them strikes."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from engine.core.faults.fault import (
    ANY_HOSTS,
    HOST_FAULTS,
    LOSES_A_HOST,
    ONE_HOST,
    HostFault,
    OnHosts,
    chosen_host,
    host_fault_problems,
)
from engine.core.job.job import Job

JOB = Job(stages=4, steps=10)
GOOD = HostFault("one", "power-off", 3)


def fields(*faults: HostFault, on: OnHosts = OnHosts(3), of_workers: bool = False) -> list[str]:  # noqa: B008 - frozen
    """Returns the fields of the problems of some faults."""
    found = host_fault_problems(dict(enumerate(faults)), on, JOB, ["kill"], of_workers=of_workers)
    return [each.field.removeprefix("host_faults.") for each in found]


def test_a_good_fault_strikes_on_hosts_and_not_on_one() -> None:
    assert fields(GOOD) == fields(GOOD, on=ANY_HOSTS) == []
    assert fields(GOOD, on=ONE_HOST) == ["host_faults"]
    assert fields(on=ONE_HOST, of_workers=True) == fields(on=ANY_HOSTS, of_workers=True) == []
    assert fields(on=OnHosts(3), of_workers=True) == fields(GOOD, on=ANY_HOSTS, of_workers=True) == ["faults"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"step": 0}, "0.at.step"),
        ({"step": 10}, "0.at.step"),
        ({"host": "h3"}, "0.host"),
        ({"do": "kill-coordinator", "host": "h1"}, "0.host"),
        ({"do": "kill-etcd-leader", "host": "coordinator"}, "0.host"),
        ({"do": "kill-worker"}, "0.worker"),
        ({"do": "kill-worker", "worker": 4}, "0.worker"),
        ({"worker": 1}, "0.worker"),
        ({"id": "kill"}, "0.id"),
    ],
)
def test_a_fault_that_cannot_strike_is_refused_at_its_field(changes: dict[str, object], field: str) -> None:
    assert fields(replace(GOOD, **changes)) == [field]  # type: ignore[arg-type]


def test_all_mistakes_come_at_once() -> None:
    wrong = replace(GOOD, step=0, host="h9", worker=3)
    assert fields(wrong, wrong, of_workers=True) == [
        *("faults", "0.at.step", "0.host", "0.worker"),
        *("1.id", "1.at.step", "1.host", "1.worker", "1.host"),
    ]


def test_etcd_keeps_its_majority_and_one_host_is_left() -> None:
    two = replace(GOOD, id="two")
    assert fields(GOOD, two, on=OnHosts(4)) == ["1.do"]
    assert fields(GOOD, replace(two, host="h3"), on=OnHosts(4)) == []
    assert fields(GOOD, replace(two, do="kill-agent"), on=OnHosts(4)) == []
    assert fields(GOOD, replace(two, do="kill-etcd-leader"), on=OnHosts(4)) == ["1.do"]
    agents = [replace(GOOD, id=f"{number}", do="kill-agent") for number in range(3)]
    assert fields(*agents[:2]) == []
    assert fields(*agents) == ["2.do"]


def test_no_host_is_struck_that_is_not_left_or_not_meant() -> None:
    names = ("h0", "h1", "h2", "h3")
    words = ("coordinator", "etcd-leader", "other", *names)
    num = 0
    for chief, leads in permutations(names, 2):
        for left in (names, names[1:], names[::2], names[:1], ()):
            for do in HOST_FAULTS:
                for host in words if do in LOSES_A_HOST - {"kill-coordinator"} else ("other",):
                    found = chosen_host(HostFault("x", do, 1, host=host), left, chief, leads)
                    assert found is None or found in left
                    if do == "kill-coordinator" or host == "coordinator":
                        assert found in (chief, None)
                    elif do == "kill-etcd-leader" or host == "etcd-leader":
                        assert found in (leads, None)
                    elif host == "other":
                        assert found != chief and (found is not None) == bool({*left} - {chief})
                    else:
                        assert found == (host if host in left else None)
                    num += 1
    assert num > 1000
