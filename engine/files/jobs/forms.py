"""Forms of scenario, matrix and job files: pydantic classes, from which the check of a file and its JSON schema follow.

Rules: a form reports every problem in its part, each at its place. A value with a problem is left out of the result, so
that the caller sees valid values only. The forms of a fault follow from the table of kinds, and those of a target, a
trigger and the expectations from the dataclasses of the core, where each field has its help text.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import MISSING, dataclass, field, fields, replace
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import MinLen, Predicate
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    WithJsonSchema,
    create_model,
)
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from engine.core.action import Op
from engine.core.checks.recoveries import PHASES as TIMED_PHASES
from engine.core.errors import MOST_PROBLEMS, Problem, UserError, nearest
from engine.core.faults.external import (
    EXTERNAL_PHASES,
    ExternalExpect,
    ExternalMoment,
    ExternalProgress,
    ExternalTarget,
)
from engine.core.faults.fault import (
    HOST_PATTERN,
    MOST_CHARACTERS,
    MOST_COUNT,
    MOST_NUMBER,
    After,
    FaultKind,
    InStep,
    Parameter,
    RoleName,
    When,
)
from engine.core.faults.launchers import ANY, LAUNCHERS
from engine.core.faults.scenario import Every, Expect, Limits, Target
from engine.core.units import DURATION_FORM, DURATION_PATTERN, parse_duration
from engine.files.jobs.job_layers import VERSION as JOB_VERSION
from engine.files.jobs.job_value import job_form, shown
from engine.files.strict_yaml import MAX_DEPTH, Document, KeyPath

VERSION = 1
ACTIONS = tuple(op.value for op in Op if op is not Op.REDO_F)
_ID = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}"
_STEPS = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?) steps?")
_MOST_DRAWN = 1000  # faults of one entry: each is drawn before the run
_DIALECT = "https://json-schema.org/draft/2020-12/schema"


class Form(BaseModel):
    """A mapping with known keys; exactly one key of `one_of` and at least one of `any_of` must be present.

    The form of a fault has its `kind`, whose required parameters must be present too; `foreign` are those of others.
    """

    model_config = ConfigDict(strict=True, extra="forbid")
    one_of: ClassVar[tuple[str, ...]] = ()
    any_of: ClassVar[tuple[str, ...]] = ()
    kind: ClassVar[FaultKind | None] = None
    foreign: ClassVar[Set[str]] = frozenset()

    @classmethod
    def needed(cls) -> list[Parameter]:
        """Returns the parameters that a fault of this kind must have."""
        return [each for each in cls.kind.parameters if each.required] if cls.kind else []

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Adds the rules on keys to the schema of the fields."""
        json_schema = handler.resolve_ref_schema(handler(schema))
        json_schema.pop("description", None)
        if needed := [each.name for each in cls.needed()]:
            json_schema["required"] = [*json_schema.get("required", ()), *needed]
        for rule, names in (("oneOf", cls.one_of), ("anyOf", cls.any_of)):
            if names:
                json_schema[rule] = [{"required": [name]} for name in names]
        return json_schema


@dataclass(frozen=True, slots=True)
class _Wording:
    """Beside a type: what to say of a value that is `expected`, and of an absent one."""

    expected: str
    if_absent: str = "a value"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.custom_error_schema(handler(source), "form", custom_error_message=self.expected)


@dataclass(frozen=True, slots=True)
class _Words:
    """Beside `str`: the words that are allowed, where they are known at run time only."""

    words: tuple[str, ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.literal_schema([*self.words])


def _read_steps(value: object) -> float | None:
    match = _STEPS.fullmatch(value) if isinstance(value, str) else None
    return float(match[1]) if match and float(match[1]) > 0 else None


def _whole(least: int, most: int | None = None) -> Any:
    text = f"a whole number >= {least}{'' if most is None else f' and <= {most}'}"
    return Annotated[int, Field(ge=least, le=most), _Wording(text)]


def _text(read: Callable[[Any], Any], kind: type, pattern: str, text: str) -> Any:
    """Returns the type of a text that `read` returns as a value of another kind, or as None."""
    json = {"type": "string", "pattern": pattern}
    return Annotated[kind, BeforeValidator(read), WithJsonSchema(json), _Wording(text)]


_COUNT = _whole(0)
_FLAG = Annotated[bool, _Wording("true or false")]
_DURATION = _text(
    lambda value: parse_duration(value) if isinstance(value, str) else None, int, DURATION_PATTERN, DURATION_FORM
)
_NUM_STEPS = _text(_read_steps, float, f"^{_STEPS.pattern}$", "a number of steps such as 20 steps")
_NAME = Annotated[str, MinLen(1), Field(pattern=f"^{_ID}$"), _Wording("a name of letters, digits and . _ -")]
_AN_ID = Annotated[str, MinLen(1), Field(pattern=f"^{_ID}$"), _Wording("an id of letters, digits and . _ -")]
_SENTENCE = Annotated[str, MinLen(1), Predicate(str.strip), _Wording("one sentence")]
_VERSION = Annotated[
    int,
    Field(ge=VERSION, le=VERSION),
    WithJsonSchema({"const": VERSION}),
    _Wording("1", if_absent=f"'version: {VERSION}' in the first line"),
]
_MAPPING = Annotated[dict[str, Any], MinLen(1), _Wording("a mapping")]
_RANKS = Annotated[list[Annotated[int, Field(ge=0)]], MinLen(1), _Wording("a list of ranks")]
_AT_LEAST_ONE = _Wording("a list of at least one")
_DO = Annotated[str, MinLen(1), _Wording("a kind of fault")]


_A_JOB = _Wording("a mapping of fields, or the path of a job file")
_JOB = Annotated[dict[str, Any] | Annotated[str, Predicate(str.strip)], _A_JOB]
_JOB_OF_CASES = Annotated[dict[str, Any] | str, MinLen(1), _A_JOB]


def _key(kind: Any, about: str, default: Any = None) -> Any:
    """Returns one key of a form: its type and its description; `...` as default says that it must be present."""
    return kind, Field(default, description=about)


def _form(name: str, /, base: type[Form] = Form, **keys: Any) -> type[Form]:
    return create_model(name, __base__=base, **keys)


# The type of a key by the type of its field in the core, and the end of the field's name by that of its type.
_TYPES: dict[Any, Any] = {int: _COUNT, bool: _FLAG}
_UNITS = {"_ns": _DURATION, "_steps": _NUM_STEPS}


def _form_of(name: str, of: type, /, **other: Any) -> type[Form]:
    """Returns the form of a dataclass: a key, without its unit, for each field with a help text; `other` has types."""
    hints = get_type_hints(of)
    keys = {}
    for attribute in (each for each in fields(of) if each.metadata):
        unit = next((end for end in _UNITS if attribute.name.endswith(end)), "")
        hint = hints[attribute.name]
        if get_origin(hint) is UnionType or get_origin(hint) is Union:  # None stands for an absent key
            hint = Union[tuple(part for part in get_args(hint) if part is not type(None))]  # noqa: UP007 - at run time
        is_needed = attribute.default is MISSING and attribute.default_factory is MISSING
        kind = other.get(attribute.name) or _UNITS.get(unit) or _TYPES.get(hint, hint)
        keys[attribute.name.removesuffix(unit)] = _key(kind, attribute.metadata["help"], ... if is_needed else None)
    return _form(name, **keys)


# The forms of a scenario, and of a matrix of scenarios. What $axis may replace is hardly restricted in a matrix.

_AT = _form(
    "At",
    step=_key(_COUNT, "the step, from 0", ...),
    pipeline=_key(_COUNT, "the pipeline of the slot (default 0)"),
    stage=_key(_COUNT, "the stage of the slot, or its block in a job with blocks", ...),
    action=_key(Annotated[str, _Words(ACTIONS)], "the action of the slot's owner (default B)"),
    microbatch=_key(_COUNT, "the microbatch of the action (default: the middle one)"),
    when=_key(When, "before, during or after the action (default before)"),
)
_ANOTHER = Annotated[str, Field(pattern=f"^{_ID}$"), _Wording("the id of another fault")]
_AFTER = _form_of("After", After, fault=_ANOTHER)
_AFTER.any_of = ("phase", "delay")
_EVERY = _form_of("Every", Every, count=_whole(1, _MOST_DRAWN))
_ROLE = Annotated[str, _Words(("random", *get_args(RoleName)))]
_TARGET = _form_of("Target", Target, role=_ROLE, count=_whole(1))
_FAULT = _form(
    "Fault",
    id=_key(_AN_ID, "a name for it (default fault-N)"),
    at=_key(_AT, "the action of a step at which it strikes"),
    after=_key(_AFTER, "the other fault, or phase of its recovery, after which it strikes"),
    every=_key(_EVERY, "random moments, drawn before the run"),
    target=_key(_TARGET, "the victim (default: the owner of the action's slot, or the recovering worker)"),
)
_FAULT.one_of = ("at", "after", "every")
_HOST = Annotated[
    str, Field(pattern=f"^({HOST_PATTERN})$"), _Wording("h0, h1 and so on, coordinator, etcd-leader or other")
]
_HOST_KEY = _key(_HOST, "the host (default other: one that does not coordinate)")
# The target of a fault of hosts, by that of its kind: a kind that always strikes one and the same host has none.
_ON_BED: dict[str, dict[str, Any]] = {
    "host": {"target": _key(_form("OnHost", host=_HOST_KEY), "the host that it strikes")},
    "worker": {
        "target": _key(_form("OnWorker", worker=_key(_COUNT, "a worker by its number", ...)), "the victim", ...)
    },
}
_BED_FAULT = _form(
    "BedFault",
    id=_key(_AN_ID, "a name for it (default fault-N)"),
    at=_key(_form_of("InStep", InStep), "the step in which it strikes", ...),
)
# A fault of no known kind: one of a worker, or one of hosts.
_ANY_FAULT = _form(
    "Fault",
    _FAULT,
    at=_key(_form("At", _AT, stage=_key(_COUNT, ""), delay=_key(_DURATION, "")), "the moment"),
    target=_key(_form("Target", _TARGET, host=_HOST_KEY), "the victim"),
)
_PHASES = _form("Phases", **{name: _key(_DURATION, f"{name}, at most") for name in TIMED_PHASES})
_EXPECT = _form_of(
    "Expect", Expect, trajectory=Literal["identical"], recovery=_form_of("Recovery", Limits, phases_ns=_PHASES)
)
SCENARIO = _form(
    "Scenario",
    version=_key(_VERSION, "the version of the form of this file", ...),
    name=_key(_NAME, "the scenario's name", ...),
    about=_key(_SENTENCE, "the purpose of the scenario, in one sentence", ...),
    job=_key(_JOB, "the job: a job file, or its fields (default: ./bamboo.yaml)"),
    faults=_key(Annotated[list[Any], MinLen(1), _AT_LEAST_ONE], "the faults, with their targets and moments"),
    host_faults=_key(Annotated[list[Any], MinLen(1), _AT_LEAST_ONE], "faults of hosts, as files had them before"),
    expect=_key(_EXPECT, "the expectations of the run"),
)
SCENARIO.any_of = ("faults", "host_faults")
CASE = _form(
    "Case",
    name=_key(_NAME, "the name of the case", ...),
    about=_key(_SENTENCE, "the purpose of the case (default: that of the matrix)"),
    only=_key(_MAPPING, "per axis, the labels that the case is made for (default: all)"),
    job=_key(_JOB_OF_CASES, "the job, as of a scenario; its fields override those of the matrix"),
    faults=_key(Annotated[list[Any], MinLen(1), _Wording("a list")], "the faults, with their targets and moments", ...),
    expect=_key(_MAPPING, "expectations; they override those of the matrix"),
)
MATRIX = _form(
    "Matrix",
    version=_key(_VERSION, "the version of the form of this file", ...),
    name=_key(_NAME, "the name of the matrix", ...),
    about=_key(_SENTENCE, "the purpose of the matrix, in one sentence", ...),
    job=_key(_JOB_OF_CASES, "the job of every case, as of a scenario (default: ./bamboo.yaml)"),
    expect=_key(_MAPPING, "expectations of every case"),
    axes=_key(_MAPPING, "name: a list of values, or a mapping of label: fields"),
    cases=_key(Annotated[list[Any], MinLen(1), _AT_LEAST_ONE], "scenarios, in which $axis stands for a value", ...),
)

# The forms of a scenario for a job of another launcher, and of its faults by kind.

_SECONDS = _form("ExternalPhases", **{name: _key(_DURATION, f"{name}, at most") for name in EXTERNAL_PHASES})
_EXTERNAL_AT = _form_of("ExternalAt", ExternalMoment)
_EXTERNAL_AT.one_of = ("step", "progress", "after", "during")
_EXTERNAL_FAULT = _form(
    "ExternalFault",
    id=_key(_AN_ID, "a name for it (default fault-N)"),
    at=_key(_EXTERNAL_AT, "the moment at which it strikes", ...),
    target=_key(_form_of("ExternalTarget", ExternalTarget, ranks=_RANKS), "the victim (default: the rank of `at`)"),
)
_PROGRESS = _form_of("ExternalProgress", ExternalProgress)
_PROGRESS.one_of = ("output", "jsonl", "tensorboard")
EXTERNAL = _form(
    "ExternalScenario",
    version=_key(_VERSION, "the version of the form of this file", ...),
    name=_key(_NAME, "the scenario's name", ...),
    about=_key(_SENTENCE, "the purpose of the scenario, in one sentence", ...),
    command=_key(
        Annotated[list[Annotated[str, _Wording("a word of a command")]], MinLen(1), _Wording("the words of a command")],
        "the command that starts the job (default: the command after --)",
    ),
    launcher=_key(
        _NAME,
        f"the launcher: {', '.join(LAUNCHERS)}, one of a package, or {ANY} (default: the one that the command names)",
    ),
    progress=_key(_PROGRESS, "where steps are read if no process calls bamboo.progress"),
    steps=_key(_whole(1), "the steps of the whole job"),
    checkpoint=_key(_SENTENCE, "a pattern of the paths of checkpoints"),
    timeout=_key(_DURATION, "the time after which the job is ended (default 10m)"),
    faults=_key(Annotated[list[Any], MinLen(1), _AT_LEAST_ONE], "the faults, with their targets and moments", ...),
    expect=_key(
        _form_of("ExternalExpect", ExternalExpect, recovery=_form_of("ExternalRecovery", Limits, phases_ns=_SECONDS)),
        "the expectations of the run",
    ),
)


@functools.cache
def external_fault_form(name: str, kinds: tuple[FaultKind, ...]) -> type[Form]:
    """Returns the form of a fault of this kind in a job of another launcher; of no kind, without parameters."""
    kind = next((each for each in kinds if each.name == name), None)
    if kind is None:
        return _form("ExternalFault", _EXTERNAL_FAULT, do=_key(_DO, "the kind of the fault", ...))
    keys = {each.name: _key(_parameter(each), each.about) for each in kind.parameters}
    form = _form(name, _EXTERNAL_FAULT, do=_key(Literal[name], kind.about, ...), **keys)
    return type(name, (form,), {"kind": kind, "__module__": __name__})


@functools.cache
def fault_form(name: str, kinds: tuple[FaultKind, ...]) -> type[Form]:
    """Returns the form of a fault of one of these kinds, with its parameters; of no kind, with those of any."""
    parameters = {one.name: one for each in kinds for one in each.parameters}
    kind = next((each for each in kinds if each.name == name), None)
    if kind is None:
        about = "; ".join(f"{each.name}: {each.about}" for each in kinds)
        do = _key(Annotated[str, _Words(tuple(each.name for each in kinds))], about, ...)
        return _form("Fault", _ANY_FAULT, do=do, **{one: _key(Any, each.about) for one, each in parameters.items()})
    keys = {each.name: _key(_parameter(each), each.about) for each in kind.parameters}
    base, target = (_BED_FAULT, _ON_BED.get(kind.target, {})) if kind.by == "bed" else (_FAULT, {})
    form = _form(name, base, **target, do=_key(Literal[name], kind.about, ...), **keys)
    return type(name, (form,), {"kind": kind, "foreign": parameters.keys() - keys.keys(), "__module__": __name__})


def _parameter(of: Parameter) -> Any:
    """Returns the type of a parameter, whose value is read into the program's units."""

    def read(value: object) -> object:
        if (result := of.read(value)) is None:
            raise ValueError
        return result

    if of.form == "choice":
        return Annotated[str, _Words(of.choices)]
    json: dict[str, dict[str, Any]] = {
        "duration": {"type": "string", "pattern": DURATION_PATTERN},
        "count": {"type": "integer", "minimum": 0, "maximum": MOST_COUNT},
        "worker": {"type": "integer", "minimum": 0},
        "number": {"type": "number", "exclusiveMinimum": 0, "maximum": MOST_NUMBER},
        "text": {"type": "string", "maxLength": MOST_CHARACTERS},
    }
    return Annotated[Any, BeforeValidator(read), WithJsonSchema(json[of.form]), _Wording(of.expected)]


# The JSON schemas of the forms.


class _Generator(GenerateJsonSchema):
    """Leaves out the titles of keys, and the default None of a key that may be absent."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Returns that no key has a title."""
        return False

    def default_schema(self, schema: Any) -> dict[str, Any]:
        """Returns the schema of a value that may be absent."""
        return self.generate_inner(schema["schema"])


def _json_schema(form: type[BaseModel], title: str) -> dict[str, Any]:
    return {"$schema": _DIALECT, **form.model_json_schema(schema_generator=_Generator), "title": title}


def scenario_schema(kinds: Mapping[str, FaultKind]) -> dict[str, Any]:
    """Returns the JSON schema of scenario files in which a fault is one of `kinds`."""
    fault: Any = Union[tuple(fault_form(name, tuple(kinds.values())) for name in kinds)]  # noqa: UP007 - at run time
    over_file: Any = create_model(
        "Job", __base__=job_form(), **{"from": _key(str, "a job file, whose other values hold")}
    )
    other = {
        "job": Annotated[str | over_file, Field(description="a job file, or the fields of a job")],
        "faults": Annotated[list[fault], MinLen(1)],
    }
    keys = {name: _key(kind, SCENARIO.model_fields[name].description or "") for name, kind in other.items()}
    return _json_schema(_form("Scenario", SCENARIO, **keys), "a bamboo scenario")


def external_schema(kinds: Mapping[str, FaultKind]) -> dict[str, Any]:
    """Returns the JSON schema of scenarios for jobs of other launchers, in which a fault is one of `kinds`."""
    fault: Any = Union[tuple(external_fault_form(name, tuple(kinds.values())) for name in kinds)]  # noqa: UP007 - as above
    about = EXTERNAL.model_fields["faults"].description or ""
    whole = _form("ExternalScenario", EXTERNAL, faults=_key(Annotated[list[fault], MinLen(1)], about, ...))
    return _json_schema(whole, "a bamboo scenario for a job of another launcher")


def matrix_schema() -> dict[str, Any]:
    """Returns the JSON schema of matrix files; cases are hardly restricted, because $axis may replace any value."""
    case: Any = CASE
    about = MATRIX.model_fields["cases"].description or ""
    whole = _form("Matrix", MATRIX, cases=_key(Annotated[list[case], MinLen(1)], about, ...))
    return _json_schema(whole, "a bamboo matrix")


def job_schema() -> dict[str, Any]:
    """Returns the JSON schema of job files."""
    keys = {"version": _key(Literal[JOB_VERSION], "the version of the form of this file")}
    return _json_schema(create_model("Job", __base__=job_form(), **keys), "a bamboo job")


# One document while it is checked.

_MEANS_DO = ("kind", "type", "fault")  # what users write for the kind of a fault


@dataclass(slots=True)
class Reading:
    """One document while it is checked, and the problems found so far."""

    document: Document
    problems: list[Problem] = field(default_factory=list)

    def refuse(self, path: KeyPath, expected: str, value: str = "", hint: str = "", *, key: bool = False) -> None:
        """Adds a problem with the value at a path, or with its key; raises UserError if there are too many to tell."""
        name = ".".join(str(part) for part in path)
        self.problems.append(Problem(name, expected, value, hint, self.document.source, *self.place(path, key=key)))
        if len(self.problems) > MOST_PROBLEMS:
            raise in_order(self.problems)

    def place(self, path: KeyPath, *, key: bool = False) -> tuple[int, int]:
        """Returns line and column of the value or key at a path; if it is absent, of the nearest value around it."""
        places = self.document.key_places if key else self.document.places
        while path and path not in places:
            path, places = path[:-1], self.document.places
        return places.get(path, (1, 1))

    def located(self, problem: Problem) -> Problem:
        """Returns a problem with the `place` of its field added."""
        path: KeyPath = tuple(
            int(part) if part.isdecimal() and len(part) < 10 else part for part in problem.field.split(".")
        )
        line, column = self.place(path)
        return replace(problem, source=self.document.source, line=line, column=column)

    def check(self, form: type[Form], path: KeyPath, value: Any) -> dict[str, Any] | None:
        """Returns the valid entries of the value at a path, as values of the program; None if it is no mapping."""
        self._check_presence(form, path, value)
        wrong: list[Any] = []
        for reader in (
            form,
            *[_partial(form)] * MAX_DEPTH,
        ):  # without the keys of a mapping it may lack one that it needs
            try:
                return _given(reader.model_validate(value))
            except ValidationError as error:
                for each in () if wrong else error.errors():
                    self._tell(form, path, each)
                wrong = error.errors()
            for each in wrong:
                value = _without(value, each["loc"][:-1] if each["type"] == "missing" else each["loc"])
        return None

    def _tell(self, form: type[Form], path: KeyPath, error: Any) -> None:
        """Reports an error of pydantic in a part of this form at a path."""
        loc: KeyPath = error["loc"]
        place, value = (*path, *loc), shown(error["input"])
        for part in loc[:-1]:
            form = _inner(form, str(part)) or form
        if error["type"] == "missing":
            info = form.model_fields[str(loc[-1])]
            expected = next((each.if_absent for each in info.metadata if isinstance(each, _Wording)), "a value")
            if place not in self.document.key_places:  # whose value may be left out, because it had a problem
                self.refuse(place, expected, "nothing", info.description or "")
        elif error["type"] == "extra_forbidden":
            self._tell_unknown(form, place)
        elif error["type"] == "model_type":
            form = _inner(form, str(loc[-1])) or form if loc else form
            self.refuse(place, f"a mapping with {', '.join(form.model_fields)}", value)
        elif error["type"] == "literal_error":
            words = re.findall("'([^']*)'", error["ctx"]["expected"])
            self.refuse(place, f"one of {', '.join(words)}", value, nearest(str(error["input"]), words))
        else:
            self.refuse(place, error["msg"], value)

    def _tell_unknown(self, form: type[Form], path: KeyPath) -> None:
        name, kind = str(path[-1]), form.kind
        if kind is not None and name in form.foreign:
            names = ", ".join(each.name for each in kind.parameters)
            self.refuse(path, f"a parameter of {kind.name}", repr(name), f"it has {names or 'none'}", key=True)
            return
        is_meant = name in _MEANS_DO and "do" in form.model_fields
        close = "did you mean 'do'?" if is_meant else nearest(name, form.model_fields)
        hint = close or f"there is {', '.join(form.model_fields)}"
        self.refuse(path, "a field that is known here", repr(name), hint, key=True)

    def _check_presence(self, form: type[Form], path: KeyPath, value: Any) -> None:
        """Reports the rules on keys that a mapping at a path breaks; a key whose value had a problem is present."""
        if not isinstance(value, dict):
            return
        there = {name for name in form.model_fields if name in value or (*path, name) in self.document.key_places}
        for key in form.needed():
            if key.name not in there:
                self.refuse((*path, key.name), key.expected, "nothing", f"{form.__name__} needs it: {key.about}")
        chosen = [name for name in form.one_of if name in there]
        if form.one_of and len(chosen) != 1:
            self.refuse(path, f"one of {', '.join(form.one_of)}", " and ".join(chosen) or "none of them")
        if form.any_of and there.isdisjoint(form.any_of):
            self.refuse(path, f"{' or '.join(form.any_of)}", "none of them")
        for name, item in value.items():
            if (inner := _inner(form, name)) is not None:
                self._check_presence(inner, (*path, name), item)


def in_order(problems: Iterable[Problem]) -> UserError:
    """Returns the error that holds all problems, sorted by file and line."""
    return UserError(sorted(problems, key=lambda problem: (problem.source, problem.line, problem.column)))


def _inner(form: type[Form], name: str) -> type[Form] | None:
    """Returns the form of a key whose value is a mapping with known keys; None for any other."""
    kind = form.model_fields[name].annotation if name in form.model_fields else None
    return kind if isinstance(kind, type) and issubclass(kind, Form) else None


@functools.cache
def _partial(form: type[Form]) -> type[Form]:
    """Returns the form with keys that may all be absent, to read the valid entries of a mapping with a problem."""
    needed = {name: each.rebuild_annotation() for name, each in form.model_fields.items() if each.is_required()}
    return _form(form.__name__, form, **{name: (kind, None) for name, kind in needed.items()})


def _given(form: Form) -> dict[str, Any]:
    """Returns the entries that a mapping has, as plain values."""
    there = {name: getattr(form, name) for name in type(form).model_fields if name in form.model_fields_set}
    return {name: _given(each) if isinstance(each, Form) else each for name, each in there.items()}


def _without(value: Any, loc: KeyPath) -> Any:
    """Returns a mapping without the entry at a place in it."""
    if not loc or not isinstance(value, dict) or loc[0] not in value:
        return value
    others = {name: each for name, each in value.items() if name != loc[0]}
    return others if len(loc) == 1 else {**value, loc[0]: _without(value[loc[0]], loc[1:])}
