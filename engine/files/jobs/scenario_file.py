"""Reads scenario files; all mistakes of a file are reported together, each at its line and column.

Rule: `library` says where a scenario is found.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.core.action import STAGE_OPS, WHOLE_STAGE, Action, Op
from engine.core.errors import Problem, UserError
from engine.core.faults.expansion import expand
from engine.core.faults.fault import A_WORKER, ONE_HOST, OTHER, After, At, Fault, FaultKind, InStep, OnHosts
from engine.core.faults.matrix import slots_of_fields
from engine.core.faults.scenario import Every, Expect, FaultSpec, Limits, Scenario, Target, Trigger
from engine.core.faults.scenario_rules import PlannedFaults, a_worker, check_faults, check_scenario
from engine.core.job.job import Job
from engine.core.job.job_rules import ANYTHING, JobParts
from engine.files.jobs.forms import SCENARIO, Reading, fault_form, in_order
from engine.files.jobs.job_file import merge
from engine.files.jobs.job_layers import (
    FOREIGN,
    PROJECT_FILE,
    Layer,
    document_layer,
    file_layer,
    masked_setting,
    other_kind,
    set_layer,
)
from engine.files.jobs.job_value import shown
from engine.files.jobs.library import find_scenario
from engine.files.jobs.resolved_job import ResolvedJob
from engine.files.strict_yaml import Document, KeyPath, read_yaml

# The job of a scenario or of a matrix: its own fields, a job file, or the job file of the current folder.
#
# Rules: ``job: FILE`` names a job file beside the scenario. ``job: {from: FILE, steps: 8}`` has other values for some
# of its fields. A mapping without ``from`` is a whole job, over the defaults. Without ``job`` it is the project's job,
# ``./bamboo.yaml``; without that file it is the default one. ``BAMBOO_*`` and the user's file change no scenario.

FROM = "from"
KEY = "job"


@dataclass(frozen=True, slots=True)
class JobSource:
    """The source of the job of a scenario: a job file or None, and the fields that the scenario gives itself."""

    file: Path | None = None
    fields: tuple[str, ...] | None = None  # None: the scenario has no mapping

    @property
    def is_whole(self) -> bool:
        """Whether the scenario itself holds its job, so that its text is enough to run it again."""
        return self.file is None and self.fields is not None

    def text(self, job: Job) -> str:
        """Returns the source of this job in words, with the fields that the scenario changes."""
        return with_changes(self.base(job, "the scenario"), self.changed)

    @property
    def changed(self) -> tuple[str, ...]:
        """The fields of the job file that the scenario changes."""
        return self.fields or () if self.file else ()

    def base(self, job: Job, holder: str) -> str:
        """Returns the source of this job in words; `holder` is the noun for the file with the scenario."""
        if self.file is not None:
            return shown_path(self.file)
        name = "the default one" if self.fields is None else f"the one in {holder}"
        return f"{name} ({job.model} on {job.data})"


def with_changes(base: str, changed: Iterable[str]) -> str:
    """Returns the source of a job in words, with the fields that are changed."""
    names = ", ".join(changed)
    return f"{base} (overridden: {names})" if names else base


def shown_path(path: Path) -> str:
    """Returns a path for messages: from the current folder if the file lies below it."""
    short = os.path.relpath(path)
    return str(path) if short.startswith("..") else f"./{short}"


@dataclass(slots=True)
class ScenarioJobs:
    """Finds the job layers of one scenario or matrix file, with these `settings`; reads each job file once."""

    path: Path
    settings: Iterable[str] = ()
    _read: dict[Path, Layer] = field(default_factory=dict)

    def layers(self, document: Document) -> tuple[JobSource, list[Layer]]:
        """Returns the source of the job of a scenario, and its layers; a later layer overrides an earlier one."""
        source = self._source(document.value.get(KEY) if isinstance(document.value, dict) else None)
        return source, [*self._base(source), _own_fields(document.part(KEY)), self._changes()]

    def num_slots(self, job: object) -> int | None:
        """Returns the slots of a pipeline of a job, as a scenario gives it; None if that has a mistake."""
        own = job if isinstance(job, dict) else {}
        base = {each.path[0]: each.value for layer in self._base(self._source(job)) for each in layer.entries}
        return slots_of_fields(base | own | {each.path[0]: each.value for each in self._changes().entries})

    def _source(self, job: object) -> JobSource:
        if job is None:
            project = Path(PROJECT_FILE)
            return JobSource(project if project.exists() else None)
        if isinstance(job, str):
            return JobSource(self._beside(job))
        own = job if isinstance(job, dict) else {}
        named = own.get(FROM)
        file = self._beside(named) if isinstance(named, str) else None
        return JobSource(file, tuple(name for name in own if name != FROM))

    def _base(self, source: JobSource) -> list[Layer]:
        if source.file is None:
            return []
        if source.file not in self._read:
            self._read[source.file] = file_layer(source.file, FOREIGN)
        return [self._read[source.file]]

    def _changes(self) -> Layer:
        return set_layer(self.settings)

    def _beside(self, name: str) -> Path:
        """Returns a path that is relative to the folder of the scenario, in its shortest spelling."""
        path = self.path.parent / name
        short = Path(os.path.normpath(path))
        return short if short.exists() and short.samefile(path) else path  # `link/..` need not be the same folder


def _own_fields(part: Document) -> Layer:
    """Returns the layer of the fields that a scenario gives itself; a wrong ``from`` is a problem of the layer."""
    if not isinstance(part.value, dict):
        return Layer()
    own = {name: value for name, value in part.value.items() if name != FROM}
    layer = document_layer(replace(part, value=own), FOREIGN)
    if FROM in part.value and not isinstance(part.value[FROM], str):
        text = shown(part.value[FROM])
        layer.problems.append(Problem(FROM, "the path of a job file", text, "", part.source, *part.places[FROM,]))
    return layer


@dataclass(frozen=True, slots=True)
class LoadedScenario:
    """A scenario with its file, the faults of its seed, and the source of its job; no `document` if a program made it.

    `settings` overrode its job, `origins` has the place of each value, `foreign` those that need ``--trust-code``.
    """

    path: Path
    scenario: Scenario
    seed: int
    faults: tuple[Fault, ...]
    source: JobSource
    origins: Mapping[str, str]
    settings: tuple[str, ...] = ()
    foreign: tuple[Problem, ...] = ()
    document: Document | None = None

    @property
    def settings_but_results(self) -> tuple[str, ...]:
        """The settings that decide what is computed, without the values of secret arguments."""
        return tuple(masked_setting(each) for each in self.settings if not each.startswith("results="))

    @property
    def job_from(self) -> str:
        """The source of the job, in words."""
        return self.source.text(self.scenario.job)


def load_scenario(
    named: str | Document,
    kinds: Mapping[str, FaultKind],
    seed: int | None = None,
    settings: Iterable[str] = (),
    offered: JobParts = ANYTHING,
    on: OnHosts = ONE_HOST,
    *,
    to_attach: bool = False,
) -> LoadedScenario:
    """Returns a scenario and its faults, to run `on` hosts; `seed` defaults to the seed of the job.

    It is `named` by its path or its name in the library, or it is a document. Each of `settings` is a ``FIELD=VALUE``
    that overrides a field of the job; `offered` checks the models, data and arguments that the job names. `to_attach`
    says that another job runs: its faults are neither checked nor drawn here.

    Raises:
        UserError: with every problem found.
        NothingMatchedError: the library has no such scenario.
    """
    document = read_yaml(find_scenario(named)) if isinstance(named, str) else named
    if (problem := other_kind(document, "scenario")) is not None:
        raise UserError([problem])
    return load_document(Path(document.source), document, kinds, seed, settings, offered, on=on, to_attach=to_attach)


def load_document(
    path: Path,
    document: Document,
    kinds: Mapping[str, FaultKind],
    seed: int | None = None,
    settings: Iterable[str] = (),
    offered: JobParts = ANYTHING,
    jobs: ScenarioJobs | None = None,
    on: OnHosts = ONE_HOST,
    *,
    to_attach: bool = False,
) -> LoadedScenario:
    """Returns the scenario of a document; raises as `load_scenario`. Scenarios of one file share `jobs`."""
    (document, first), settings = _in_one_list(document), tuple(settings)
    reading = Reading(document, list(document.problems))
    source, layers = (jobs or ScenarioJobs(path, settings)).layers(document)
    resolved = _job(reading, source, layers, offered)
    scenario = _scenario(reading, kinds, None if resolved is None else resolved.job, on, to_attach=to_attach)
    if resolved is None or scenario is None:
        raise in_order(_as_written(each, first) for each in reading.problems)
    seed = scenario.job.seed if seed is None else seed
    try:
        faults = () if to_attach else expand(scenario, seed)
        return LoadedScenario(
            path, scenario, seed, faults, source, resolved.origins, settings, resolved.foreign, document
        )
    except UserError as error:
        raise in_order(_as_written(reading.located(each), first) for each in error.problems) from None


# A file of before has the faults of hosts under a key of their own, each with its target beside its kind.
_BEFORE, _TARGETS = "host_faults", ("host", "worker")


def _in_one_list(document: Document) -> tuple[Document, int | None]:
    """Returns a scenario with all faults in one list, and the number of the first that stood elsewhere before."""
    value: Any = document.value
    old = value.get(_BEFORE) if isinstance(value, dict) else None
    if not isinstance(old, list) or not old or not isinstance(faults := value.get("faults", []), list):
        return document, None
    first = len(faults)

    def moved(path: KeyPath) -> KeyPath:
        if len(path) < 2 or path[0] != _BEFORE:
            return path
        below = ("target", *path[2:]) if path[2:] and path[2] in _TARGETS else path[2:]
        return ("faults", first + int(path[1]), *below)

    one_list = [*faults, *(_of_today(number, each) for number, each in enumerate(old, start=1))]
    places, key_places = (
        {moved(path): place for path, place in table.items()} for table in (document.places, document.key_places)
    )
    others = {name: each for name, each in value.items() if name != _BEFORE}
    return replace(document, value={**others, "faults": one_list}, places=places, key_places=key_places), first


def _of_today(number: int, fault: Any) -> Any:
    if not isinstance(fault, dict):
        return fault
    rest = {name: each for name, each in fault.items() if name not in _TARGETS}
    target = {name: fault[name] for name in _TARGETS if fault.get(name, OTHER) != OTHER}
    more = {"target": target} if target or fault.get("do") == "kill-worker" else {}
    return {"id": f"host-fault-{number}", **rest, **more} | ({"do": "noop-host"} if fault.get("do") == "noop" else {})


def _as_written(problem: Problem, first: int | None) -> Problem:
    """Returns a problem with the name of its field in the file, where the first fault of before has this number."""
    key, _, rest = problem.field.partition(".")
    number, _, place = rest.partition(".")
    if first is None or key != "faults" or (number and int(number) < first) or not (number or first == 0):
        return problem
    name = [_BEFORE, str(int(number) - first), place.removeprefix("target.")] if number else [_BEFORE]
    return replace(problem, field=".".join(filter(None, name)))


def fitted(loaded: LoadedScenario, kinds: Mapping[str, FaultKind], job: Job, expect: Expect) -> Scenario:
    """Returns a scenario that was loaded `to_attach`, for the job of that run; raises UserError if it does not fit."""
    if loaded.document is None:
        whole = replace(loaded.scenario, job=job, expect=expect)
        if problems := check_scenario(whole, kinds):
            raise UserError(problems)
        return whole
    reading = Reading(loaded.document)
    if (scenario := _scenario(reading, kinds, job, ONE_HOST, expect)) is None:
        raise in_order(reading.problems)
    return scenario


def _scenario(
    reading: Reading,
    kinds: Mapping[str, FaultKind],
    job: Job | None,
    on: OnHosts,
    expect: Expect | None = None,
    *,
    to_attach: bool = False,
) -> Scenario | None:
    """Returns the scenario of a document, with `expect` if given; None, with its problems reported, if invalid."""
    document = reading.document
    if document.value is None and not document.problems:
        reading.refuse((), "a scenario", "an empty file")
    values = None if document.value is None else reading.check(SCENARIO, (), document.value)
    values = values or {}
    listed = [_wanted(reading, *each, kinds, job or Job()) for each in enumerate(values.get("faults", ()))]
    faults = {number: each for number, each in enumerate(listed) if each is not None}
    expect = expect or _expect(values.get("expect", {}))
    whole = len(faults) == len(listed) and all(each.do for each in faults.values())
    plan = PlannedFaults(None if to_attach else job, faults, whole)
    known_fields = {each.field for each in reading.problems}  # one problem is enough for a value
    wrong = check_faults(plan, expect, kinds, on)
    reading.problems += [reading.located(each) for each in wrong if each.field not in known_fields]
    if plan.job is not None:
        expected = a_worker(plan.job)
        reading.problems[:] = [
            replace(problem, expected=expected) if problem.expected == A_WORKER else problem
            for problem in reading.problems
        ]
    if reading.problems or job is None:
        return None
    return Scenario(values["name"], values["about"].strip(), job, tuple(faults.values()), expect)


def _job(reading: Reading, source: JobSource, layers: Sequence[Layer], offered: JobParts) -> ResolvedJob | None:
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


def _wanted(reading: Reading, number: int, raw: object, kinds: Mapping[str, FaultKind], job: Job) -> FaultSpec | None:
    """Returns one fault; None, with its problems reported, if its id or moment is not valid."""
    path: KeyPath = ("faults", number)
    kind = kinds.get(str(raw.get("do"))) if isinstance(raw, dict) else None
    do = "" if kind is None else kind.name
    if (values := reading.check(fault_form(do, tuple(kinds.values())), path, raw)) is None:
        return None
    trigger: Trigger | None = None
    if "at" in values and kind is not None and kind.by == "bed":
        trigger = InStep(values["at"]["step"], values["at"].get("delay", 0))
    elif "stage" in values.get("at", ()):
        trigger = _at(reading, (*path, "at"), values["at"], job)
    elif "after" in values:
        after = values["after"]
        trigger = After(after["fault"], after.get("phase"), after.get("delay", 0))
    elif "every" in values:
        trigger = Every(values["every"]["mtbf"], values["every"]["count"])
    bad = {each.field for each in reading.problems}
    name, moment, target = (".".join(map(str, (*path, each))) for each in ("id", "at", "target"))
    if trigger is None or name in bad or any(each.startswith(moment) for each in bad):
        return None
    target_values = {} if any(each.startswith(target) for each in bad) else values.get("target", {})
    of_kind = {} if kind is None else {each.key: values[each.name] for each in kind.parameters if each.name in values}
    parameters = {} if kind is None else kind.with_defaults(of_kind)
    return FaultSpec(values.get("id", f"fault-{number + 1}"), trigger, Target(**target_values), do, parameters)


def _at(reading: Reading, path: KeyPath, values: Mapping[str, Any], job: Job) -> At | None:
    op = Op(values.get("action", Op.B.value))
    microbatch = values.get("microbatch", job.program_microbatches // 2)
    if op in STAGE_OPS:
        if "microbatch" in values:
            hint = f"{op} concerns the whole {job.slot_noun}"
            reading.refuse((*path, "microbatch"), f"no microbatch with {op}", str(microbatch), hint, key=True)
        microbatch = WHOLE_STAGE
    return At(
        values["step"], Action(values["stage"], op, microbatch, values.get("pipeline", 0)), values.get("when", "before")
    )


def _expect(values: Mapping[str, Any]) -> Expect:
    limits = values.get("recovery")
    if limits is not None:
        limits = Limits(limits.get("p95"), limits.get("max"), limits.get("phases", {}))
    return Expect(**{**values, "recovery": limits})
