"""Scenarios as plain values: the content of a scenario file, for writing one.

Rule: defaults are left out, unless the file would then mean another scenario.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from engine.core.action import STAGE_OPS
from engine.core.config.job import Job
from engine.core.duration import duration_text
from engine.core.faults.fault import After, At
from engine.core.faults.host_fault import OTHER, HostFault
from engine.core.faults.scenario import Every, Expect, FaultSpec, Limits, Scenario, Target

_VERSION = 1


def scenario_plain(scenario: Scenario) -> dict[str, Any]:
    """Returns the content of a file that is read as this scenario."""
    plain: dict[str, Any] = {"version": _VERSION, "name": scenario.name, "about": scenario.about}
    job = {each.name: _part(getattr(scenario.job, each.name)) for each in fields(Job)}
    usual = Job()
    # The model is always written: a scenario without a job would mean the job of the folder in which it is run.
    plain["job"] = {name: value for name, value in job.items() if name == "model" or value != getattr(usual, name)}
    plain["faults"] = [_fault(each) for each in scenario.faults]
    plain["host_faults"] = [_host_fault(each) for each in scenario.host_faults]
    plain["expect"] = _expect(scenario.expect)
    return {name: value for name, value in plain.items() if value not in ({}, [])}


def _part(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def _fault(wanted: FaultSpec) -> dict[str, Any]:
    plain: dict[str, Any] = {"id": wanted.id}
    trigger = wanted.trigger
    if isinstance(trigger, At):
        plain["at"] = {"step": trigger.step, "stage": trigger.action.stage, "action": trigger.action.op.value}
        if trigger.action.op not in STAGE_OPS:
            plain["at"]["microbatch"] = trigger.action.microbatch
        if trigger.action.pipeline:
            plain["at"]["pipeline"] = trigger.action.pipeline
        if trigger.when != "before":
            plain["at"]["when"] = trigger.when
    elif isinstance(trigger, After):
        plain["after"] = {"fault": trigger.fault}
        if trigger.phase is not None:
            plain["after"]["phase"] = trigger.phase
        if trigger.delay_ns or trigger.phase is None:
            plain["after"]["delay"] = duration_text(trigger.delay_ns)
    elif isinstance(trigger, Every):
        plain["every"] = {"mtbf": f"{trigger.mtbf_steps:g} steps", "count": trigger.count}
    usual = Target()
    target = {each.name: getattr(wanted.target, each.name) for each in fields(Target)}
    target = {name: value for name, value in target.items() if value != getattr(usual, name)}
    if target:
        plain["target"] = target
    plain["do"] = wanted.do
    for key, value in wanted.parameters.items():
        is_time = key.endswith("_ns")
        plain[key.removesuffix("_ns")] = duration_text(int(value)) if is_time else value
    return plain


def _host_fault(wanted: HostFault) -> dict[str, Any]:
    plain: dict[str, Any] = {"id": wanted.id, "at": {"step": wanted.step}, "do": wanted.do}
    if wanted.delay_ns:
        plain["at"]["delay"] = duration_text(wanted.delay_ns)
    if wanted.host != OTHER:
        plain["host"] = wanted.host
    if wanted.worker is not None:
        plain["worker"] = wanted.worker
    return plain


def _expect(expect: Expect) -> dict[str, Any]:
    found = {each.name: getattr(expect, each.name) for each in fields(Expect)}
    plain = {name: value for name, value in found.items() if value is not None}
    if isinstance(expect.recovery, Limits):
        limits = {"p95": expect.recovery.p95_ns, "max": expect.recovery.max_ns}
        plain["recovery"] = {name: duration_text(limit) for name, limit in limits.items() if limit is not None}
        if expect.recovery.phases_ns:
            plain["recovery"]["phases"] = {
                name: duration_text(limit) for name, limit in expect.recovery.phases_ns.items()
            }
    return plain
