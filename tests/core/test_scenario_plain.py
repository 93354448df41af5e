"""What is written of a scenario is read as the same scenario: every scenario of the library, and one of each part."""

from __future__ import annotations

import json
from pathlib import Path

from engine.core.faults.expansion import expand
from engine.core.faults.fault import ANY_HOSTS, After, Host, InStep, Worker
from engine.core.faults.scenario import Every, Expect, FaultSpec, Limits, Scenario, Target, scenario_plain
from engine.core.job.job import Job
from engine.files.jobs.library import scenario_names
from engine.files.jobs.scenario_file import load_document, load_scenario
from engine.files.strict_yaml import read_text
from engine.runtime.faults.registry import kinds
from tests.core.scenario_cases import at, scenario, wanted
from tests.looped import looped


def again(written: Scenario) -> Scenario:
    document = read_text(json.dumps(scenario_plain(written)), "x.yaml")
    return load_document(Path("x.yaml"), document, kinds(), on=ANY_HOSTS).scenario


@looped("name", scenario_names())
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
        FaultSpec("one", InStep(3, 20_000_000), Target(host="coordinator"), "power-off"),
        FaultSpec("two", InStep(2), Target(worker=1), "kill-worker"),
        FaultSpec("three", InStep(2), Target(host="h3"), "kill-agent"),
        FaultSpec("four", InStep(4), Target(), "kill-coordinator"),
    )
    found = Scenario("x", "y", Job(stages=3, device="cpu"), struck)
    assert again(found) == found
    assert [each.victims for each in expand(found, 0)] == [
        *((Host("coordinator"),), (Worker(1),), (Host("h3"),), (Host("coordinator"),))
    ]


def test_a_file_of_before_has_faults_of_hosts_under_a_key_of_their_own() -> None:
    head = "version: 1\nname: x\nabout: z\njob: {model: mlp, stages: 3}\n"
    before = """host_faults:
- {at: {step: 3, delay: 20ms}, do: power-off, host: coordinator}
- {at: {step: 2}, do: kill-worker, worker: 1, host: other}
- {at: {step: 4}, do: noop}
"""
    today = """faults:
- {id: host-fault-1, at: {step: 3, delay: 20ms}, do: power-off, target: {host: coordinator}}
- {id: host-fault-2, at: {step: 2}, do: kill-worker, target: {worker: 1}}
- {id: host-fault-3, at: {step: 4}, do: noop-host}
"""
    old, new = (
        load_document(Path("x.yaml"), read_text(head + text, "x.yaml"), kinds(), on=ANY_HOSTS)
        for text in (before, today)
    )
    assert (old.scenario, old.faults) == (new.scenario, new.faults)
    assert [each.in_words("stage") for each in old.faults] == [
        "power-off coordinator in step 3, 20ms after its begin",
        "kill-worker worker 1 in step 2",
        "noop-host in step 4",
    ]
