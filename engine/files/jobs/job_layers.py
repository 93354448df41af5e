"""Reads the layers from which a job is resolved: files, ``BAMBOO_*``, ``--set`` and flags.

Rules: every layer is checked separately, so that a mistake is reported even if a higher layer overrides its value.
Texts of the command line and the environment are YAML scalars; a text field takes an unquoted one literally.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from engine.core.errors import (
    MASK,
    MOST_PROBLEMS,
    Problem,
    StorageError,
    UserError,
    has_credentials,
    is_secret,
    nearest,
)
from engine.core.job.job import ACTING, ARGS_FIELDS, CODE_FIELDS, PLACES, Job, code_in, logger_names
from engine.core.job.torch_parts import as_list
from engine.core.job.update_rules import PARAM_GROUPS_FORM, as_text
from engine.core.texts import TRUST_FLAG, flags, trust_words
from engine.files.atomic_write import open_to_read, write_atomically
from engine.files.jobs.job_value import FIELD_TYPES, FieldValue, check, holds_text, is_known, shown
from engine.files.strict_yaml import Document, read_scalar, read_yaml
from engine.files.yaml_scalar import plain_value

# The user's word on files: values that reach beyond a job, and the files from which they count.
#
# Rules: code (``module:attribute``) and the folder of results count from the command line, from ``BAMBOO_*``, from the
# user's own file, and from a job file or the record of a run that the command line names. Any other file is foreign: a
# scenario, a matrix, the job file that one of them names, a ``bamboo.yaml`` that lies in the current folder, and a
# checkpoint. From a foreign file these values count with ``--trust-code`` only.
#
# A user's own checkpoint is told from another one by what its job names, because any file can be unpacked from
# elsewhere: each run notes its code, with the current folder, and its folders in a file of the user's. What a run had
# here before, it has again, without a word. So does the folder of results in which the run of that checkpoint lies: it
# was looked for there, and a machine that takes over after a preemption has no notes.

TRUST_VARIABLE = "BAMBOO_TRUST_CODE"
# The advice about a value of a foreign file (`FieldValue.foreign`).
FOREIGN = f"if you trust this file, give {TRUST_FLAG}"
LYING_THERE = f"if you trust this file, give {TRUST_FLAG}, or name the file on the command line"

KEPT = f"if you trust this checkpoint, give {TRUST_FLAG}, or name the value yourself, as with --set"
_MOST_BYTES = 4 << 20  # of the notes


def foreign_values(entries: Iterable[FieldValue]) -> tuple[Problem, ...]:
    """Returns a problem for each value that names code or a folder of results, and comes from a foreign file."""
    return tuple(problem for each in entries if each.foreign and (problem := _refused(each)))


def _refused(entry: FieldValue) -> Problem | None:
    if entry.name in CODE_FIELDS and (code := code_in(entry.value)):
        module, _, attribute = code[0].partition(":")
        why = f"bamboo would import {module} and call {attribute}; {entry.foreign}"
        return entry.problem("no code from this file", repr(entry.value), why)
    if entry.name == "logger" and (reaching := [each for each in logger_names(entry.value) if ":" in each]):
        why = f"it would write to that file, or open that port; {entry.foreign}"
        return entry.problem("no logger with a file or a port from this file", repr(reaching[0]), why)
    if entry.name in PLACES and entry.value != (usual := getattr(Job(), entry.name)):
        why = f"bamboo would write to that folder; {entry.foreign}"
        only = f"no folder but {usual!r}" if usual else "no folder"
        return entry.problem(f"{only} from this file", repr(entry.value), why)
    return None


def note(job: Job) -> None:
    """Notes the code and the folders of a job that is run in the current folder, where a note can be written."""
    noted = _noted()
    if (lines := noted | {_line(each) for each in _acting(job) if _refused(each)}) == noted:
        return
    with suppress(OSError, RuntimeError, StorageError):  # of a home that nobody has, or may write
        path = _notes()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(path, "".join(f"{each}\n" for each in sorted(lines)))


def without_noted(entries: Iterable[FieldValue]) -> list[FieldValue]:
    """Returns the values of a checkpoint; those that a run had here, and the place of its run, are foreign no more."""
    noted = _noted()
    return [replace(each, foreign="") if _line(each) in noted or _is_place(each) else each for each in entries]


def _is_place(entry: FieldValue) -> bool:
    """Returns whether a value is the folder of results with the run from which it comes."""
    if entry.name != "results" or not isinstance(entry.value, str):
        return False
    folders = Path(os.path.realpath(entry.source)).parents
    run = next((each for each in folders if (each / "run.json").is_file()), None)
    return run is not None and os.path.realpath(entry.value) == str(run.parent)


def needs_word(run: Path, job: Job) -> bool:
    """Returns whether a run with this job is resumed in this folder with the user's word only."""
    return any(each.foreign and _refused(each) for each in without_noted(_acting(job, str(run / "run.json"))))


def _acting(job: Job, source: str = "") -> list[FieldValue]:
    return [FieldValue((name,), getattr(job, name), "", source, foreign=KEPT) for name in ACTING]


def _line(entry: FieldValue) -> str:
    is_place = entry.name in PLACES
    text = json.dumps([os.path.realpath(str(entry.value) if is_place else "."), entry.name, is_place or entry.value])
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _notes() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state, "bamboo", "trusted-code")


def _noted() -> frozenset[str]:
    """Returns the lines of the notes, which count if only this user can have written them."""
    with suppress(OSError, RuntimeError, UnicodeDecodeError), open(open_to_read(_notes()), encoding="ascii") as file:
        facts = os.fstat(file.fileno())
        is_own = facts.st_uid == os.geteuid() and not facts.st_mode & 0o022
        return frozenset(file.read(_MOST_BYTES).split() if is_own else ())
    return frozenset()


# The kind of a file, told by its keys: a job, a scenario, a matrix, or the record of a run (``run.json``).
#
# Rule: a command that gets a file of another kind names the kind, and the command for it.

FileKind = Literal["job", "scenario", "matrix", "run"]

_NAMES: dict[FileKind, str] = {
    "job": "a job",
    "scenario": "a scenario",
    "matrix": "a matrix",
    "run": "the record of a run",
}
_COMMANDS: dict[FileKind, str] = {"job": "run", "scenario": "inject --scenario", "matrix": "matrix", "run": "run"}
_OF_A_RECORD = {"job", "origins", "host"}


def kind_of(document: Document) -> FileKind | None:
    """Returns the kind of a document; None if no key tells it."""
    keys = {path[0] for path in document.key_places if len(path) == 1}
    if keys >= _OF_A_RECORD:
        return "run"
    if keys & {"cases", "axes"}:
        return "matrix"
    if keys & {"job", "faults", "host_faults", "expect"}:
        return "scenario"
    return "job" if keys & (FIELD_TYPES.keys() - {"name"}) else None


def other_kind(document: Document, *kinds: FileKind) -> Problem | None:
    """Returns the problem of a document of another kind than `kinds`, with the command that takes it."""
    kind = kind_of(document)
    if kind is None or kind in kinds:
        return None
    hint = f"run it with: bamboo {_COMMANDS[kind]} {shlex.quote(document.source)}"
    return Problem("", " or ".join(_NAMES[each] for each in kinds), _NAMES[kind], hint, document.source)


def init_of(record: Document) -> str:
    """Returns the hash of the weights that a run was given, from its record; empty without them."""
    init: Any = record.value.get("init") if isinstance(record.value, dict) else None
    return str(init.get("sha256", "")) if isinstance(init, dict) else ""


def with_its_faults(record: Document) -> str:
    """Returns the command that repeats a run with its faults, from the record of the run; empty if it had none."""
    value: Any = record.value
    folder = Path(os.path.realpath(Path(record.source).parent))  # `latest` leads to another run soon
    folder = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    if isinstance(scenario := value.get("scenario"), dict):
        words = ["inject", "--scenario", str(folder / "scenario.yaml"), "--seed", str(scenario.get("seed", 0))]
        words += flags("--set", map(str, scenario.get("settings", ())))
        words += trust_words(scenario.get("needs_trust") is True)
    elif kills := value.get("kill"):
        words = ["run", str(folder / Path(record.source).name), *flags("--kill", map(str, kills))]
    else:
        return ""
    return shlex.join(["bamboo", *words])


VERSION = 1
_MOST_ARGUMENTS = 1000  # of a model or another part
LISTED_ARGS = ("optimizer_args", "lr_args")  # their lists of numbers become text with commas
PROJECT_FILE = "bamboo.yaml"  # the job of the current folder
# Of the variables that set no field of a job; the last one is that of `bamboo.progress`.
RESERVED_PREFIXES = ("BAMBOO_ETCD", TRUST_VARIABLE, "BAMBOO_PROGRESS")


@dataclass(slots=True)
class Layer:
    """The valid values of one layer, and the problems with others; from the `record` of a run it has every field."""

    entries: list[FieldValue] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    record: Document | None = None

    def add(self, entry: FieldValue) -> None:
        """Adds a value, or the problem with it."""
        checked = check(entry)
        if isinstance(checked, Problem):
            self.problems.append(checked)
        else:
            self.entries.append(checked)

    def add_text(self, entry: FieldValue) -> None:
        """Adds a value from the command line or the environment, where it is text."""
        if not is_known(entry.path) or (holds_text(entry.path) and not entry.value.startswith(("'", '"'))):
            self.add(entry)
            return
        document = read_scalar(entry.value, entry.source, entry.name)
        self.problems += document.problems
        if not document.problems:
            self.add(FieldValue(entry.path, document.value, entry.origin, entry.source))


def file_layer(path: Path, foreign: str = "") -> Layer:
    """Returns the layer of a job file or a run's record, or its problem; `foreign` is as in `FieldValue`."""
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
        text = shown(document.value)
        layer.problems.append(Problem("", "a mapping of fields", text, "", document.source, *document.places[()]))
    return layer


def _add_from_file(layer: Layer, document: Document, name: str, value: Any, foreign: str) -> None:
    def given(*path: str, value: Any) -> FieldValue:
        # The place of an unknown field is its key: the mistake is there and not in the value.
        place = document.places[path] if is_known(path) or name == "version" else document.key_places[path]
        return FieldValue(path, value, f"{document.source}:{place[0]}:{place[1]}", document.source, *place, foreign)

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


def _add_field(layer: Layer, entry: FieldValue) -> None:
    """Adds the value of a field; lists that have a form as text become that text."""
    name, value = entry.name, entry.value
    if name == "param_groups" and isinstance(value, list) and all(isinstance(each, dict) for each in value):
        try:
            value = as_text(value)
        except ValueError as error:
            layer.problems.append(entry.problem(PARAM_GROUPS_FORM, shown(value), str(error)))
            return
    elif name == "partition" and isinstance(value, list) and value and all(type(each) is int for each in value):
        value = ",".join(str(each) for each in value)
    layer.add(replace(entry, value=value))


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
            layer.add_text(FieldValue(path, environment[variable], variable, variable))
        else:
            variables = [f"BAMBOO_{name.upper()}" for name in FIELD_TYPES]
            layer.problems.append(Problem(variable, "a variable that bamboo knows", "", nearest(variable, variables)))
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
        f"--set={masked_setting(word.removeprefix('--set='))}" if word.startswith("--set=") else masked_setting(word)
        for word in words
    ]


def set_layer(settings: Iterable[str]) -> Layer:
    """Returns the layer of ``--set``; each of `settings` is one ``FIELD=VALUE``."""
    layer = Layer()
    for setting in settings:
        name, equals, text = setting.partition("=")
        if equals:
            layer.add_text(FieldValue(tuple(name.split(".", 1)), text, "--set", f"--set {masked_setting(setting)}"))
        else:
            layer.problems.append(Problem("--set", "FIELD=VALUE", repr(setting)))
    return layer


def flag_layer(flags: Mapping[str, str]) -> Layer:
    """Returns the layer of flags such as ``--microbatch-size 4``; `flags` maps each field to its text."""
    layer = Layer()
    for name, text in flags.items():
        denial = "no-" if FIELD_TYPES.get(name) is bool and text == "false" else ""
        flag = f"--{denial}{name.replace('_', '-')}"
        layer.add_text(FieldValue((name,), text, flag, flag))
    return layer


def keyword_layer(values: Mapping[str, Any], source: str) -> Layer:
    """Returns the layer of the keywords of a call in Python; `source` names the call in messages."""
    layer = Layer()
    for name, value in values.items():
        if name in ARGS_FIELDS and isinstance(value, dict):
            for key, each in value.items():
                layer.add(FieldValue((name, key), _as_listed(name, each), source, source))
        else:
            _add_field(layer, FieldValue((name,), value, source, source))
    return layer


def last_with(name: str, layers: Sequence[Layer]) -> int:
    """Returns the number of the last layer that gives a field; -1 if none does."""
    return max(
        (index for index, layer in enumerate(layers) if any(each.name == name for each in layer.entries)), default=-1
    )
