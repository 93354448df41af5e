"""Reads the layers from which a job is resolved: files, ``BAMBOO_*``, ``--set`` and flags.

Rules: every layer is checked separately, so that a mistake is reported even if a higher layer overrides its value.
Texts of the command line and the environment are YAML scalars; a text field takes an unquoted one literally.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.core.config.job import ARGS_FIELDS
from engine.core.config.param_groups import PARAM_GROUPS_FORM, as_text
from engine.core.config.torch_parts import as_list
from engine.core.errors import MASK, MOST_PROBLEMS, Problem, UserError, has_credentials, is_secret, nearest
from engine.files.jobs.file_kind import kind_of, other_kind
from engine.files.jobs.job_value import FIELD_TYPES, Given, check, holds_text, is_known, shown
from engine.files.jobs.trust import TRUST_VARIABLE
from engine.files.strict_yaml import Document, read_scalar, read_yaml
from engine.files.yaml_scalar import plain_value

VERSION = 1
_MOST_ARGUMENTS = 1000  # of a model or another part
LISTED_ARGS = ("optimizer_args", "lr_args")  # their lists of numbers become text with commas
PROJECT_FILE = "bamboo.yaml"  # the job of the current folder
RESERVED_PREFIXES = ("BAMBOO_ETCD", TRUST_VARIABLE)  # of the variables that set no field of a job


@dataclass(slots=True)
class Layer:
    """The valid values of one layer, and the problems with the others.

    `record` is the record of a run from which the layer was read: it has every field.
    """

    given: list[Given] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    record: Document | None = None

    def add(self, given: Given) -> None:
        """Adds a value, or the problem with it."""
        checked = check(given)
        if isinstance(checked, Problem):
            self.problems.append(checked)
        else:
            self.given.append(checked)

    def add_text(self, given: Given) -> None:
        """Adds a value from the command line or the environment, where it is text."""
        if not is_known(given.path) or (holds_text(given.path) and not given.value.startswith(("'", '"'))):
            self.add(given)
            return
        document = read_scalar(given.value, given.source, given.name)
        self.problems += document.problems
        if not document.problems:
            self.add(Given(given.path, document.value, given.origin, given.source))


def file_layer(path: Path, foreign: str = "") -> Layer:
    """Returns the layer of a job file, or of the record of a run; an unreadable file is a problem of the layer.

    `foreign` is the advice about a foreign file, see `Given`.
    """
    try:
        document = read_yaml(path)
    except UserError as error:
        return Layer(problems=list(error.problems))
    if (problem := other_kind(document, "job", "run")) is not None:
        return Layer(problems=[problem])
    if kind_of(document) == "run":
        return replace(document_layer(document.part("job"), foreign), record=document)
    return document_layer(document, foreign)


def document_layer(document: Document, foreign: str = "") -> Layer:
    """Returns the layer of a document that holds the fields of a job; `foreign` as for `file_layer`."""
    layer = Layer(problems=list(document.problems))
    if isinstance(document.value, dict):
        for name, value in document.value.items():
            _add_from_file(layer, document, name, value, foreign)
            if len(layer.problems) > MOST_PROBLEMS:
                break
    elif document.value is not None:
        found = shown(document.value)
        layer.problems.append(Problem("", "a mapping of fields", found, "", document.source, *document.places[()]))
    return layer


def _add_from_file(layer: Layer, document: Document, name: str, value: Any, foreign: str) -> None:
    def given(*path: str, value: Any) -> Given:
        # The place of an unknown field is its key: the mistake is there and not in the value.
        place = document.places[path] if is_known(path) or name == "version" else document.key_places[path]
        return Given(path, value, f"{document.source}:{place[0]}:{place[1]}", document.source, *place, foreign)

    if name == "version":
        if type(value) is not int or value != VERSION:
            layer.problems.append(given(name, value=value).problem(str(VERSION), shown(value)))
    elif name in ARGS_FIELDS and isinstance(value, dict) and len(value) <= _MOST_ARGUMENTS:
        for key, each in value.items():
            layer.add(given(name, key, value=_as_listed(name, each)))
    elif name in ARGS_FIELDS and isinstance(value, dict):
        layer.problems.append(given(name, value=value).problem(f"at most {_MOST_ARGUMENTS} arguments", str(len(value))))
    else:
        _add_field(layer, given(name, value=value))


def _add_field(layer: Layer, given: Given) -> None:
    """Adds the value of a field; lists that have a form as text become that text."""
    name, value = given.name, given.value
    if name == "param_groups" and isinstance(value, list) and all(isinstance(each, dict) for each in value):
        try:
            value = as_text(value)
        except ValueError as error:
            layer.problems.append(given.problem(PARAM_GROUPS_FORM, shown(value), str(error)))
            return
    elif name == "partition" and isinstance(value, list) and value and all(type(each) is int for each in value):
        value = ",".join(str(each) for each in value)
    layer.add(replace(given, value=value))


def _as_listed(field_name: str, value: Any) -> Any:
    """Returns a list of numbers, such as the betas of an optimizer, as its text; any other value as it is."""
    is_list = field_name in LISTED_ARGS and isinstance(value, list) and all(type(one) in (int, float) for one in value)
    return as_list(value) if is_list and value else value


def environment_layer(environment: Mapping[str, str]) -> Layer:
    """Returns the layer of the variables ``BAMBOO_STAGES``, ``BAMBOO_MODEL_ARGS__WIDTH`` and so on."""
    layer = Layer()
    for variable in sorted(environment):
        if not variable.startswith("BAMBOO_") or variable.startswith(RESERVED_PREFIXES):
            continue
        path = tuple(variable.removeprefix("BAMBOO_").lower().split("__", 1))
        if is_known(path):
            layer.add_text(Given(path, environment[variable], variable, variable))
        else:
            known = [f"BAMBOO_{name.upper()}" for name in FIELD_TYPES]
            layer.problems.append(Problem(variable, "a variable that bamboo knows", "", nearest(variable, known)))
    return layer


def masked_setting(setting: str) -> str:
    """Returns a ``FIELD=VALUE`` without the value of a secret argument, or a URL with credentials."""
    name, _, text = setting.partition("=")
    field_name, _, argument = name.partition(".")
    is_masked = field_name in ARGS_FIELDS and is_secret(argument, plain_value(text))
    is_masked |= field_name == "checkpoints" and has_credentials(text)
    return f"{name}={MASK}" if is_masked else setting


def masked_words(words: Iterable[str]) -> list[str]:
    """Returns the words of a command line without the values of secret arguments, which follow ``--set``."""
    return [
        f"--set={masked_setting(each.removeprefix('--set='))}" if each.startswith("--set=") else masked_setting(each)
        for each in words
    ]


def set_layer(settings: Iterable[str]) -> Layer:
    """Returns the layer of ``--set``; each of `settings` is one ``FIELD=VALUE``."""
    layer = Layer()
    for setting in settings:
        name, equals, text = setting.partition("=")
        if equals:
            layer.add_text(Given(tuple(name.split(".", 1)), text, "--set", f"--set {masked_setting(setting)}"))
        else:
            layer.problems.append(Problem("--set", "FIELD=VALUE", repr(setting)))
    return layer


def flag_layer(flags: Mapping[str, str]) -> Layer:
    """Returns the layer of flags such as ``--microbatch-size 4``; `flags` maps each field to its text."""
    layer = Layer()
    for name, text in flags.items():
        denial = "no-" if FIELD_TYPES.get(name) is bool and text == "false" else ""
        flag = f"--{denial}{name.replace('_', '-')}"
        layer.add_text(Given((name,), text, flag, flag))
    return layer


def keyword_layer(values: Mapping[str, Any], source: str) -> Layer:
    """Returns the layer of the keywords of a call in Python; `source` names the call in messages."""
    layer = Layer()
    for name, value in values.items():
        if name in ARGS_FIELDS and isinstance(value, dict):
            for key, each in value.items():
                layer.add(Given((name, key), _as_listed(name, each), source, source))
        else:
            _add_field(layer, Given((name,), value, source, source))
    return layer


def last_with(name: str, layers: Sequence[Layer]) -> int:
    """Returns the number of the last layer that gives a field; -1 if none does."""
    return max(
        (index for index, layer in enumerate(layers) if any(each.name == name for each in layer.given)), default=-1
    )
