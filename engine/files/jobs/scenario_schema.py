"""The form of a scenario file, from which both the check of files and the JSON schema are made."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from engine.core.action import Op
from engine.core.checkpoint_rules import KEEPING_PATTERN
from engine.core.checks.recoveries import PHASES as TIMED_PHASES
from engine.core.faults.fault import (
    ABOUT,
    HOST_FAULTS,
    HOST_PATTERN,
    MOST_CHARACTERS,
    MOST_COUNT,
    MOST_NUMBER,
    PHASES,
    ROLES,
    WHENS,
    FaultKind,
    Parameter,
)
from engine.core.faults.scenario import NOTICES, OUTCOMES
from engine.core.job.job import ARGS_FIELDS, SIZE_PATTERN
from engine.core.job.update_rules import MATCH
from engine.core.units import DURATION_FORM, DURATION_PATTERN, EPOCHS_PATTERN, parse_duration
from engine.files.jobs.form import Atom, Form, FormEntry, ListOf, MappingOf, choice, flag, text, whole
from engine.files.jobs.job_layers import VERSION as JOB_VERSION
from engine.files.jobs.job_value import FIELD_HELP, FIELD_TYPES

VERSION = 1
ACTIONS = tuple(op.value for op in Op if op is not Op.REDO_F)
ID_PATTERN = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}"

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_MOST_DRAWN = 1000  # faults of one entry: each is drawn before the run
_STEPS = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?) steps?")


def _read_steps(value: object) -> float | None:
    match = _STEPS.fullmatch(value) if isinstance(value, str) else None
    return float(match[1]) if match and float(match[1]) > 0 else None


def _read_duration(value: object) -> int | None:
    return parse_duration(value) if isinstance(value, str) else None


DURATION = Atom(DURATION_FORM, _read_duration, {"type": "string", "pattern": DURATION_PATTERN})
STEPS = Atom("a number of steps such as 20 steps", _read_steps, {"type": "string", "pattern": f"^{_STEPS.pattern}$"})
JOB = Atom(
    "a mapping of fields, or the path of a job file",
    lambda value: value if isinstance(value, dict) or (isinstance(value, str) and value.strip()) else None,
    {"type": ["string", "object"]},
)

AT = MappingOf(
    {
        "step": FormEntry(whole(), "the step, from 0", required=True),
        "pipeline": FormEntry(whole(), "the pipeline of the slot (default 0)"),
        "stage": FormEntry(whole(), "the stage of the slot, or its block in a job with blocks", required=True),
        "action": FormEntry(choice(*ACTIONS), "the action of the slot's owner (default B)"),
        "microbatch": FormEntry(whole(), "the microbatch of the action (default: the middle one)"),
        "when": FormEntry(choice(*WHENS), "before, during or after the action (default before)"),
    }
)
AFTER = MappingOf(
    {
        "fault": FormEntry(
            text("the id of another fault", ID_PATTERN), "the fault that must have struck", required=True
        ),
        "phase": FormEntry(choice(*PHASES), "the phase of the recovery from it that must have begun"),
        "delay": FormEntry(DURATION, "the time that must have passed since"),
    },
    any_of=("phase", "delay"),
)
EVERY = MappingOf(
    {
        "mtbf": FormEntry(STEPS, "the mean number of steps between two faults", required=True),
        "count": FormEntry(whole(1, _MOST_DRAWN), "how many faults at most", required=True),
    }
)
TARGET = MappingOf(
    {
        "pipeline": FormEntry(whole(), "the pipeline of a slot"),
        "stage": FormEntry(whole(), "the stage, or the block, of a slot: the worker that owns it at that moment"),
        "worker": FormEntry(whole(), "a worker by its number"),
        "role": FormEntry(choice("random", *ROLES), "the worker with this role at that moment; random is drawn before"),
        "count": FormEntry(whole(1), "victims that are struck at the same moment (default 1)"),
        "adjacent": FormEntry(flag(), "whether their slots are neighbours in one pipeline"),
    }
)
HOST_FAULT = MappingOf(
    {
        "id": FormEntry(text("an id of letters, digits and . _ -", ID_PATTERN), "a name for it (default host-fault-N)"),
        "at": FormEntry(
            MappingOf(
                {
                    "step": FormEntry(whole(), "the step, from 1: the one before it is committed", required=True),
                    "delay": FormEntry(DURATION, "the time that must have passed since"),
                }
            ),
            "the step in which it strikes",
            required=True,
        ),
        "do": FormEntry(choice(*HOST_FAULTS), "; ".join(f"{name}: {about}" for name, about in ABOUT.items()), True),
        "host": FormEntry(
            text("h0, h1 and so on, coordinator, etcd-leader or other", HOST_PATTERN),
            "the host (default other: one that does not coordinate)",
        ),
        "worker": FormEntry(whole(), "kill-worker: the worker, by its number"),
    }
)
EXPECT = MappingOf(
    {
        "outcome": FormEntry(choice(*OUTCOMES), "the outcome of the run (default recovered)"),
        "notice": FormEntry(choice(*NOTICES), "the wrong numbers that the run must notice, with outcome noticed"),
        "trajectory": FormEntry(choice("identical"), "every committed step has the bits of the fault-free twin"),
        "steps_lost": FormEntry(whole(), "committed steps that are done again, at most"),
        "samples": FormEntry(choice("exactly-once"), "every committed step counts every sample once"),
        "culprit": FormEntry(choice("exact", "nobody"), "exact: the struck workers are excluded, and no others"),
        "leftovers": FormEntry(choice("none"), "no process, socket, shared memory, file or key stays behind"),
        "recovery": FormEntry(
            MappingOf(
                {
                    "p95": FormEntry(DURATION, "the 95th percentile of the times that training stalled, at most"),
                    "max": FormEntry(DURATION, "the longest time that training stalled, at most"),
                    "phases": FormEntry(
                        MappingOf({name: FormEntry(DURATION, f"{name}, at most") for name in TIMED_PHASES}),
                        "the longest duration of a phase, at most",
                    ),
                }
            ),
            "limits on the duration of a recovery",
        ),
    }
)


def scenario_form(kinds: Mapping[str, FaultKind]) -> MappingOf:
    """Returns the form of a whole file in which a fault is one of `kinds`."""
    fault = MappingOf(
        {
            "id": FormEntry(text("an id of letters, digits and . _ -", ID_PATTERN), "a name for it (default fault-N)"),
            "at": FormEntry(AT, "the action of a step at which it strikes"),
            "after": FormEntry(AFTER, "the other fault, or phase of its recovery, after which it strikes"),
            "every": FormEntry(EVERY, "random moments, drawn before the run"),
            "target": FormEntry(
                TARGET, "the victim (default: the owner of the action's slot, or the recovering worker)"
            ),
            "do": FormEntry(choice(*kinds), "; ".join(f"{each.name}: {each.about}" for each in kinds.values()), True),
            **{name: FormEntry(*parameter) for name, parameter in _parameters(kinds).items()},
        },
        one_of=("at", "after", "every"),
    )
    return MappingOf(
        {
            "version": version_entry(),
            "name": FormEntry(
                text("a name of letters, digits and . _ -", ID_PATTERN), "the scenario's name", required=True
            ),
            "about": FormEntry(text("one sentence"), "the purpose of the scenario, in one sentence", required=True),
            "job": FormEntry(JOB, "the job: a job file, or its fields (default: ./bamboo.yaml)"),
            "faults": FormEntry(ListOf(fault), "the faults, with their targets and moments"),
            "host_faults": FormEntry(ListOf(HOST_FAULT), "the faults of hosts, of a run with --hosts"),
            "expect": FormEntry(EXPECT, "the expectations of the run"),
        },
        any_of=("faults", "host_faults"),
    )


def json_schema(kinds: Mapping[str, FaultKind]) -> dict[str, Any]:
    """Returns the JSON schema of scenario files."""
    schema = scenario_form(kinds).schema()
    job = job_schema()
    job["properties"]["from"] = {"description": "a job file, whose other values hold", "type": "string"}
    job |= {"description": "a job file, or the fields of a job", "type": ["string", "object"]}
    schema["properties"]["job"] = job
    return {"$schema": DIALECT, "title": "a bamboo scenario", **schema}


def job_file_schema() -> dict[str, Any]:
    """Returns the JSON schema of job files."""
    schema = job_schema()
    schema["properties"]["version"] = {"const": JOB_VERSION}
    return {"$schema": DIALECT, "title": "a bamboo job", **schema}


def job_schema() -> dict[str, Any]:
    """Returns the JSON schema of the fields of a job."""
    properties = {name: {"description": FIELD_HELP[name], **_job_field(name)} for name in FIELD_TYPES}
    return {"type": "object", "properties": properties, "additionalProperties": False}


_TEXTS: Mapping[str, dict[str, Any]] = {
    "validate_every": {"type": ["integer", "string"], "pattern": EPOCHS_PATTERN, "minimum": 0},
    "checkpoint_every": {"type": ["string", "integer"], "pattern": KEEPING_PATTERN, "minimum": 0},
    "events_max": {"type": "string", "pattern": SIZE_PATTERN},
    "hang_after": {"type": "string", "pattern": DURATION_PATTERN},
    "silent_after": {"type": "string", "pattern": DURATION_PATTERN},
}


def _job_field(name: str) -> dict[str, Any]:
    kind = FIELD_TYPES[name]
    if name in ARGS_FIELDS:
        return {"type": "object"}
    if get_origin(kind) is Literal:
        return {"enum": list(get_args(kind))}
    if name in _TEXTS:
        return _TEXTS[name]
    if name == "partition":
        return {"type": ["string", "array"], "items": {"type": "integer"}}
    if name == "param_groups":
        return {"type": ["string", "array"], "items": {"type": "object", "required": [MATCH]}}
    return {"type": {bool: "boolean", int: "integer", float: "number", str: "string"}[kind]}


def constant(value: int) -> Atom:
    """Returns the form of a number that must be `value`."""
    return Atom(str(value), lambda found: found if type(found) is int and found == value else None, {"const": value})


def version_entry() -> FormEntry:
    """Returns the key that names the version of a file's form."""
    expected = f"'version: {VERSION}' in the first line"
    return FormEntry(constant(VERSION), "the version of the form of this file", required=True, expected=expected)


def _parameters(kinds: Mapping[str, FaultKind]) -> dict[str, tuple[Form, str]]:
    """Returns the form and description of every parameter by its name; kinds may share a parameter."""
    found: dict[str, tuple[Form, str]] = {}
    for kind in kinds.values():
        for each in kind.parameters:
            about = f"{kind.name}: {each.about}"
            if each.name in found:
                about = f"{found[each.name][1]}; {about}"
            found[each.name] = (Atom("a value", lambda value: value, _parameter_json(each)), about)
    return found


def _parameter_json(parameter: Parameter) -> dict[str, Any]:
    if parameter.form == "choice":
        return {"enum": list(parameter.choices)}
    return {
        "duration": DURATION.schema(),
        "count": {"type": "integer", "minimum": 0, "maximum": MOST_COUNT},
        "number": {"type": "number", "exclusiveMinimum": 0, "maximum": MOST_NUMBER},
        "text": {"type": "string", "maxLength": MOST_CHARACTERS},
    }[parameter.form]
