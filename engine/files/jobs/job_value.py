"""One value given for a field of the job: its place, and the check of its type.

A field has its type in `engine.core.job.job.Job`. A whole number is converted to a number, and for
`checkpoint_every` to text; no other value is. A field in `IN_EPOCHS` may have a text such as ``1epoch``, and one in
`AUTOMATIC` the text ``auto``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from engine.core.checkpoint_rules import KEEPING_PATTERN
from engine.core.errors import Problem, nearest
from engine.core.job.job import ARGS_FIELDS, SIZE_PATTERN, Job
from engine.core.job.update_rules import MATCH
from engine.core.program.schedules import SCHEDULES
from engine.core.units import DURATION_PATTERN, EPOCHS_PATTERN, Args, Scalar, parse_epochs
from engine.files.yaml_scalar import plain_value

OptionPath = tuple[str, ...]
FIELD_TYPES: dict[str, Any] = get_type_hints(Job)
_SCHEDULES = ", ".join(sorted(SCHEDULES))
FIELD_HELP = {field.name: str(field.metadata["help"]).replace("{schedules}", _SCHEDULES) for field in fields(Job)}
A_FIELD = "a field of the job"
IN_EPOCHS = ("validate_every", "checkpoint_every")
AUTOMATIC, AUTO = ("blocks",), "auto"  # fields whose value a job may leave to bamboo, and the text that says so
STEPS_FORM = "a number of steps such as 20, of epochs as 1epoch, or 0 for none"
_MOST_TEXT = 1 << 15  # the longest has the first layers of 4096 stages
OWN_LINKS = "bamboo has links of its own in the place of Gloo: --backend direct"
_EXPECTED: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Args: "a mapping",
    Scalar: "text, a number, true or false",
}


@dataclass(frozen=True, slots=True)
class FieldValue:
    """A value for `path`: a field, or a field of arguments and the name of an argument.

    `origin` is its place as the list of all values shows it; messages show `source`, with line and column in a file.
    `foreign` is the advice how to trust its file if that is a foreign one, else empty.
    """

    path: OptionPath
    value: Any
    origin: str
    source: str
    line: int = 0
    column: int = 0
    foreign: str = ""

    @property
    def name(self) -> str:
        """The path with dots, such as ``model_args.width``."""
        return ".".join(self.path)

    def problem(self, expected: str, value: str, hint: str = "") -> Problem:
        """Returns a problem at the place of this value."""
        return Problem(self.name, expected, value, hint, self.source, self.line, self.column)


def is_known(path: OptionPath) -> bool:
    """Returns whether a job has this field or can have this argument."""
    if len(path) == 1:
        return path[0] in FIELD_TYPES
    return path[0] in ARGS_FIELDS and path[1].isidentifier()


def is_automatic(entry: FieldValue) -> bool:
    """Returns whether a value is left to bamboo."""
    return entry.name in AUTOMATIC and entry.value == AUTO


def holds_text(path: OptionPath) -> bool:
    """Returns whether a known `path` is a field that only holds text."""
    return len(path) == 1 and (FIELD_TYPES[path[0]] is str or get_origin(FIELD_TYPES[path[0]]) is Literal)


def check(entry: FieldValue) -> FieldValue | Problem:
    """Returns `entry` with its value converted to the type of its field, or the problem with it."""
    # pydantic takes 40 ms to import, and help texts and unreadable files do not need it.
    from pydantic import ValidationError

    if (problem := _name_or_length_problem(entry)) is not None:
        return problem
    kind: Any = Scalar if len(entry.path) == 2 else FIELD_TYPES[entry.name]
    if entry.name == "checkpoint_every" and type(entry.value) is int:  # a number of steps is one of its forms
        entry = replace(entry, value=str(entry.value))
    is_text = entry.name in IN_EPOCHS and isinstance(entry.value, str)
    if is_text and parse_epochs(entry.value):
        return entry
    if is_automatic(entry):
        return entry
    name, *argument = entry.path
    form = job_form()()
    try:
        setattr(form, name, {argument[0]: entry.value} if argument else entry.value)
        read = getattr(form, name)
        return replace(entry, value=read[argument[0]] if argument else read)
    except ValidationError:
        expected = _EXPECTED.get(kind) or f"one of {', '.join(get_args(kind))}"
        expected += f" >= 1, or {AUTO}" if entry.name in AUTOMATIC else ""
        if is_text and not isinstance(plain_value(entry.value), int):
            return entry.problem(STEPS_FORM, shown(entry.value))
        return entry.problem(expected, shown(entry.value), _advice(entry, kind))


def _name_or_length_problem(entry: FieldValue) -> Problem | None:
    if isinstance(entry.value, str) and len(entry.value) > _MOST_TEXT:
        return entry.problem(f"at most {_MOST_TEXT} characters", f"{len(entry.value)} of them")
    if is_known(entry.path):
        return None
    if entry.path[0] in ARGS_FIELDS:
        return entry.problem("an argument named with letters, digits and _", repr(entry.path[1]))
    return entry.problem(A_FIELD, "", nearest(entry.name, FIELD_TYPES))


@functools.cache
def job_form() -> Any:
    """Returns the pydantic class of the fields of a job, each with its type in `Job` and with its help text."""
    from pydantic import ConfigDict, Field, create_model

    keys = {
        name: (kind, Field(None, description=FIELD_HELP[name], json_schema_extra=_TEXTS.get(name)))
        for name, kind in FIELD_TYPES.items()
    }
    config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, validate_assignment=True, protected_namespaces=()
    )
    return create_model("Job", __config__=config, **keys)  # type: ignore[call-overload]


# What the JSON schema of a field says beside the field's type.
_LISTED: dict[str, Any] = {"type": ["string", "array"]}
_TEXTS: dict[str, dict[str, Any]] = {
    "blocks": {"type": ["integer", "string"], "pattern": f"^{AUTO}$", "minimum": 1},
    "validate_every": {"type": ["integer", "string"], "pattern": EPOCHS_PATTERN, "minimum": 0},
    "checkpoint_every": {"type": ["string", "integer"], "pattern": KEEPING_PATTERN, "minimum": 0},
    "events_max": {"pattern": SIZE_PATTERN},
    "data_retry_for": {"pattern": DURATION_PATTERN},
    "hang_after": {"pattern": DURATION_PATTERN},
    "silent_after": {"pattern": DURATION_PATTERN},
    "partition": _LISTED | {"items": {"type": "integer"}},
    "param_groups": _LISTED | {"items": {"type": "object", "required": [MATCH]}},
    **{name: {"additionalProperties": True} for name in ARGS_FIELDS},
}


def shown(value: Any) -> str:
    """Returns the text of a value in messages, in the words of YAML."""
    if isinstance(value, (list, dict)):
        return f"{'a' if value else 'an empty'} {'list' if isinstance(value, list) else 'mapping'}"
    if value is None:
        return "nothing"
    return repr(value).lower() if isinstance(value, bool) else repr(value)


def _advice(entry: FieldValue, kind: Any) -> str:
    if kind == Args:
        return f"give each as {entry.name}.NAME"
    if (entry.name, entry.value) == ("backend", "gloo"):
        return OWN_LINKS
    if get_origin(kind) is Literal:
        return nearest(str(entry.value), get_args(kind))
    if kind is str and isinstance(entry.value, (int, float)):
        return "quote it"
    if isinstance(entry.value, str) and not isinstance(plain_value(entry.value), str):
        return "remove the quotes"
    return ""
