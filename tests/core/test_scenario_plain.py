"""What is written of a scenario is read as the same scenario: every scenario of the library, and one of each part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.core.faults.fault import ANY_HOSTS, After, HostFault
from engine.core.faults.scenario import Every, Expect, Limits, Scenario, scenario_plain
from engine.core.job.job import Job
from engine.files.jobs.library import scenario_names
from engine.files.jobs.scenario_file import load_document, load_scenario
from engine.files.strict_yaml import read_text
from engine.runtime.faults.registry import kinds
from tests.core.scenario_cases import at, scenario, wanted


def again(written: Scenario) -> Scenario:
    document = read_text(json.dumps(scenario_plain(written)), "x.yaml")
    return load_document(Path("x.yaml"), document, kinds(), on=ANY_HOSTS).scenario


@pytest.mark.parametrize("name", scenario_names())
def test_the_library(name: str) -> None:
    found = load_scenario(name, kinds(), on=ANY_HOSTS).scenario
    assert again(found) == found


def test_every_part() -> None:
    limits = Limits(p95_ns=5_000_000_000, max_ns=7_500_000_000, phases_ns={"detect": 250_000_000})
    expect = Expect(trajectory="identical", steps_lost=1, samples="exactly-once", culprit="exact", recovery=limits)
    found = scenario(
        wanted("one", at(2, "1B2@1", "during")),
        wanted("two", After("one", "replay", 3_000_000), "kill", role="recoverer"),
        wanted("three", Every(2.5, 2), "kill", role="random"),
        wanted("four", at(3, "2LOG"), "kill", pipeline=0, stage=2, count=2, adjacent=True),
        expect=expect,
    )
    assert again(found) == found


def test_every_part_of_a_fault_of_a_host() -> None:
    struck = (
        HostFault("one", "power-off", 3, 20_000_000, "coordinator"),
        HostFault("two", "kill-worker", 2, worker=1),
        HostFault("three", "kill-agent", 2, host="h3"),
    )
    found = Scenario("x", "y", Job(stages=3, device="cpu"), (), host_faults=struck)
    assert again(found) == found
