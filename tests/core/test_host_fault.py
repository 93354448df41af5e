"""Faults of hosts: which are refused before the run, and which host each of them strikes."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from engine.core.faults.fault import ANY_HOSTS, HOST_KINDS, ONE_HOST, InStep, OnHosts, chosen_host
from engine.core.faults.scenario import Expect, FaultSpec, Target
from engine.core.faults.scenario_rules import PlannedFaults, check_faults
from engine.core.job.job import Job
from tests.core.scenario_cases import KINDS, at

JOB = Job(stages=4, steps=10)
GOOD = FaultSpec("one", InStep(3), Target(), "power-off")
OF_A_WORKER = FaultSpec("kill", at(1, "1B4"), Target(), "kill")


def fields(*faults: FaultSpec, on: OnHosts = OnHosts(3)) -> list[str]:  # noqa: B008 - frozen
    """Returns the fields of the problems of some faults."""
    found = check_faults(PlannedFaults(JOB, dict(enumerate(faults)), whole=True), Expect(), {**KINDS, **HOST_KINDS}, on)
    return [each.field.removeprefix("faults.") for each in found]


def test_a_good_fault_strikes_on_hosts_and_not_on_one() -> None:
    assert fields(GOOD) == fields(GOOD, on=ANY_HOSTS) == []
    assert fields(GOOD, on=ONE_HOST) == ["faults"]
    assert fields(OF_A_WORKER, on=ONE_HOST) == fields(OF_A_WORKER, on=ANY_HOSTS) == []
    assert fields(OF_A_WORKER) == fields(GOOD, OF_A_WORKER, on=ANY_HOSTS) == ["faults"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"trigger": InStep(0)}, "0.at.step"),
        ({"trigger": InStep(10)}, "0.at.step"),
        ({"target": Target(host="h3")}, "0.target.host"),
        ({"do": "kill-worker", "target": Target(worker=4)}, "0.target.worker"),
    ],
)
def test_a_fault_that_cannot_strike_is_refused_at_its_field(changes: dict[str, Any], field: str) -> None:
    assert fields(replace(GOOD, **changes)) == [field]


def test_all_mistakes_come_at_once() -> None:
    wrong = replace(GOOD, trigger=InStep(0), target=Target(host="h9"))
    assert fields(wrong, wrong, OF_A_WORKER) == [
        *("faults", "1.id", "0.at.step", "0.target.host", "1.at.step", "1.target.host", "1.target.host"),
    ]


def test_etcd_keeps_its_majority_and_one_host_is_left() -> None:
    two = replace(GOOD, id="two")
    assert fields(GOOD, two, on=OnHosts(4)) == ["1.do"]
    assert fields(GOOD, replace(two, target=Target(host="h3")), on=OnHosts(4)) == []
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
            for host in words:
                found = chosen_host(host, left, chief, leads)
                assert found is None or found in left
                if host == "coordinator":
                    assert found in (chief, None)
                elif host == "etcd-leader":
                    assert found in (leads, None)
                elif host == "other":
                    assert found != chief and (found is not None) == bool({*left} - {chief})
                else:
                    assert found == (host if host in left else None)
                num += 1
    assert num == 12 * 5 * 7
