"""Reads scenario files; all mistakes of a file are reported together, each at its line and column.

Rules: `scenario_job` says which job a scenario means, and `library` where a scenario is found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.core.action import STAGE_OPS, WHOLE_STAGE, Action, Op
from engine.core.config.job import Job
from engine.core.config.offered import ANYTHING, Offered
from engine.core.errors import Problem, UserError, nearest
from engine.core.faults.expansion import expand
from engine.core.faults.fault import After, At, Fault
from engine.core.faults.fault_kind import FaultKind
from engine.core.faults.host_fault import ONE_HOST, HostFault, OnHosts, host_fault_problems
from engine.core.faults.scenario import Every, Expect, FaultSpec, Limits, Scenario, Target, Trigger
from engine.core.faults.scenario_rules import PlannedFaults, check_faults
from engine.core.scalar import Scalar
from engine.files.jobs.file_kind import other_kind
from engine.files.jobs.job_file import merge
from engine.files.jobs.job_layers import Layer, masked_setting
from engine.files.jobs.job_value import shown
from engine.files.jobs.resolved_job import Resolved
from engine.files.scenarios.form import Reading, in_order
from engine.files.scenarios.library import find_scenario
from engine.files.scenarios.scenario_job import JobSource, ScenarioJobs
from engine.files.scenarios.scenario_schema import scenario_form
from engine.files.strict_yaml import Document, KeyPath, read_yaml


@dataclass(frozen=True, slots=True)
class Loaded:
    """A scenario with its file, the faults that its seed draws, and the source of its job.

    `settings` are the ``FIELD=VALUE`` that overrode its job, `origins` has the place of each value of the job, and
    `foreign` has the values that a run takes with ``--trust-code`` only.
    """

    path: Path
    scenario: Scenario
    seed: int
    faults: tuple[Fault, ...]
    source: JobSource
    origins: Mapping[str, str]
    settings: tuple[str, ...] = ()
    foreign: tuple[Problem, ...] = ()

    @property
    def settings_but_results(self) -> tuple[str, ...]:
        """The settings that decide what is computed, without the values of secret arguments."""
        return tuple(masked_setting(each) for each in self.settings if not each.startswith("results="))

    @property
    def job_from(self) -> str:
        """The source of the job, in words."""
        return self.source.text(self.scenario.job)


def load_scenario(
    name_or_path: str,
    kinds: Mapping[str, FaultKind],
    seed: int | None = None,
    settings: Iterable[str] = (),
    offered: Offered = ANYTHING,
    on: OnHosts = ONE_HOST,
) -> Loaded:
    """Returns a scenario and its faults, to run `on` hosts; `seed` defaults to the seed of the job.

    Each of `settings` is a ``FIELD=VALUE`` that overrides a field of the job; `offered` checks the models, data and
    arguments that the job names.

    Raises:
        UserError: with every problem found.
        NothingMatchedError: the library has no such scenario.
    """
    path = find_scenario(name_or_path)
    document = read_yaml(path)
    if (problem := other_kind(document, "scenario")) is not None:
        raise UserError([problem])
    return load_document(path, document, kinds, seed, settings, offered, on=on)


def load_document(
    path: Path,
    document: Document,
    kinds: Mapping[str, FaultKind],
    seed: int | None = None,
    settings: Iterable[str] = (),
    offered: Offered = ANYTHING,
    jobs: ScenarioJobs | None = None,
    on: OnHosts = ONE_HOST,
) -> Loaded:
    """Returns the scenario that a document says, as `load_scenario` does; raises what that raises for a file.

    Scenarios of one file can share `jobs`, which then have the same settings.
    """
    reading, settings = Reading(document, list(document.problems)), tuple(settings)
    source, layers = (jobs or ScenarioJobs(path, settings)).layers(document)
    resolved = _job(reading, source, layers, offered)
    scenario = _scenario(reading, kinds, None if resolved is None else resolved.job, on)
    if resolved is None or scenario is None:
        raise in_order(reading.problems)
    seed = scenario.job.seed if seed is None else seed
    try:
        faults = expand(scenario, seed)
        return Loaded(path, scenario, seed, faults, source, resolved.origins, settings, resolved.foreign)
    except UserError as error:
        raise in_order(reading.located(each) for each in error.problems) from None


def _scenario(reading: Reading, kinds: Mapping[str, FaultKind], job: Job | None, on: OnHosts) -> Scenario | None:
    """Returns the scenario of a document; None, with its problems reported, if one of its parts is not valid."""
    document = reading.document
    if document.value is None and not document.problems:
        reading.refuse((), "a scenario", "an empty file")
    values = {} if document.value is None else scenario_form(kinds).check(reading, (), document.value)
    values = values if isinstance(values, dict) else {}
    listed = [_wanted(reading, *each, kinds, job or Job()) for each in enumerate(values.get("faults", ()))]
    faults = {number: each for number, each in enumerate(listed) if each is not None}
    expect = _expect(values.get("expect", {}))
    host_faults = _host_faults(reading, values.get("host_faults", ()))
    whole = len(faults) == len(listed) and all(each.do for each in faults.values()) and not values.get("host_faults")
    found = PlannedFaults(job, faults, whole)
    ending = {kind.name for kind in kinds.values() if kind.ends}
    known = {each.field for each in reading.problems}  # one problem is enough for a value
    wrong = check_faults(found, expect, ending)
    ids = [each.id for each in faults.values()]
    wrong += host_fault_problems(host_faults, on, job, ids, of_workers="faults" in values)
    reading.problems += [reading.located(each) for each in wrong if each.field not in known]
    if reading.problems or job is None:
        return None
    return Scenario(
        values["name"], values["about"].strip(), job, tuple(faults.values()), expect, tuple(host_faults.values())
    )


def _job(reading: Reading, source: JobSource, layers: Sequence[Layer], offered: Offered) -> Resolved | None:
    """Returns the job of a scenario; None, with its problems reported, if it is not valid."""

    def at_its_place(problem: Problem) -> Problem:
        is_of_file = source.file and problem.source == str(source.file)
        name = problem.field if is_of_file else f"job.{problem.field}".rstrip(".")
        return replace(problem, field=name, source=problem.source or reading.document.source)

    try:
        resolved = merge(layers, offered)
        return replace(resolved, foreign=tuple(map(at_its_place, resolved.foreign)))
    except UserError as error:
        reading.problems += map(at_its_place, error.problems)
    return None


def _wanted(
    reading: Reading, number: int, values: object, kinds: Mapping[str, FaultKind], job: Job
) -> FaultSpec | None:
    """Returns one fault; None, with its problems reported, if its id or moment is not valid."""
    path: KeyPath = ("faults", number)
    if not isinstance(values, dict):
        return None
    kind = kinds.get(str(values.get("do")))
    parameters = {} if kind is None else _parameters(reading, path, kind, values, kinds)
    trigger: Trigger | None = None
    if "at" in values:
        trigger = _at(reading, (*path, "at"), values["at"], job)
    elif "after" in values and "fault" in values["after"]:
        trigger = After(values["after"]["fault"], values["after"].get("phase"), values["after"].get("delay", 0))
    elif "every" in values and {"mtbf", "count"} <= values["every"].keys():
        trigger = Every(values["every"]["mtbf"], values["every"]["count"])
    bad = {each.field for each in reading.problems}
    name, moment, target = (".".join(map(str, (*path, each))) for each in ("id", "at", "target"))
    if trigger is None or name in bad or any(each.startswith(moment) for each in bad):
        return None
    target_values = {} if any(each.startswith(target) for each in bad) else values.get("target", {})
    do = "" if kind is None else kind.name
    return FaultSpec(values.get("id", f"fault-{number + 1}"), trigger, Target(**target_values), do, parameters)


def _host_faults(reading: Reading, listed: Sequence[object]) -> dict[int, HostFault]:
    """Returns the faults of hosts by number, without those that have a problem."""
    bad = {".".join(each.field.split(".")[:2]) for each in reading.problems}
    found = {}
    for number, values in enumerate(listed):
        if isinstance(values, dict) and f"host_faults.{number}" not in bad:
            at, rest = values["at"], {name: values[name] for name in ("host", "worker") if name in values}
            name = values.get("id", f"host-fault-{number + 1}")
            found[number] = HostFault(name, values["do"], at["step"], at.get("delay", 0), **rest)
    return found


def _parameters(
    reading: Reading, path: KeyPath, kind: FaultKind, values: Mapping[str, Any], kinds: Mapping[str, FaultKind]
) -> dict[str, Scalar]:
    known = {each.name: each for each in kind.parameters}
    foreign = {each.name for other in kinds.values() for each in other.parameters} - known.keys()
    given: dict[str, Scalar] = {}
    for name, value in values.items():
        if name in foreign:
            hint = f"it has {', '.join(known)}" if known else "it has none"
            reading.refuse((*path, name), f"a parameter of {kind.name}", repr(name), hint, key=True)
        elif name in known:
            found = known[name].read(value)
            if found is None:
                hint = nearest(str(value), known[name].choices)
                reading.refuse((*path, name), known[name].expected, shown(value), hint)
            else:
                given[known[name].key] = found
    for name, parameter in known.items():
        if parameter.required and name not in values:
            reading.refuse((*path, name), parameter.expected, "nothing", f"{kind.name} needs it: {parameter.about}")
    return kind.with_defaults(given)


def _at(reading: Reading, path: KeyPath, values: Mapping[str, Any], job: Job) -> At | None:
    op = Op(values.get("action", Op.B.value))
    microbatch = values.get("microbatch", job.microbatches // 2)
    if op in STAGE_OPS:
        if "microbatch" in values:
            hint = f"{op} concerns the whole {job.slot_noun}"
            reading.refuse((*path, "microbatch"), f"no microbatch beside {op}", str(microbatch), hint, key=True)
        microbatch = WHOLE_STAGE
    if not {"step", "stage"} <= values.keys():
        return None
    return At(
        values["step"], Action(values["stage"], op, microbatch, values.get("pipeline", 0)), values.get("when", "before")
    )


def _expect(values: Mapping[str, Any]) -> Expect:
    limits = values.get("recovery")
    if limits is not None:
        limits = Limits(limits.get("p95"), limits.get("max"), limits.get("phases", {}))
    return Expect(**{**values, "recovery": limits})
