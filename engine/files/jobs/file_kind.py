"""The kind of a file, told by its keys: a job, a scenario, a matrix, or the record of a run (``run.json``).

Rule: a command that gets a file of another kind names the kind, and the command for it.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any, Literal

from engine.core.errors import Problem
from engine.core.texts import flags, trust_words
from engine.files.jobs.job_value import FIELD_TYPES
from engine.files.strict_yaml import Document

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


def other_kind(document: Document, *wanted: FileKind) -> Problem | None:
    """Returns the problem of a document of another kind than the `wanted` ones, with the command that takes it."""
    found = kind_of(document)
    if found is None or found in wanted:
        return None
    hint = f"run it with: bamboo {_COMMANDS[found]} {shlex.quote(document.source)}"
    return Problem("", " or ".join(_NAMES[each] for each in wanted), _NAMES[found], hint, document.source)


def init_of(record: Document) -> str:
    """Returns the hash of the weights that a run was given, from its record; empty without them."""
    found: Any = record.value.get("init") if isinstance(record.value, dict) else None
    return str(found.get("sha256", "")) if isinstance(found, dict) else ""


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
