"""The user's word on files: values that reach beyond a job, and the files from which they count.

Rules: code (``module:attribute``) and the folder of results count from the command line, from ``BAMBOO_*``, from the
user's own file, and from a job file or the record of a run that the command line names. Any other file is foreign: a
scenario, a matrix, the job file that one of them names, and a ``bamboo.yaml`` that lies in the current folder. From a
foreign file these values count with ``--trust-code`` only.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.core.config.job import CODE_FIELDS, PLACES, Job, code_in
from engine.core.errors import Problem
from engine.core.texts import TRUST_FLAG
from engine.files.jobs.job_value import Given

TRUST_VARIABLE = "BAMBOO_TRUST_CODE"
# The advice about a value of a foreign file (`Given.foreign`).
FOREIGN = f"if you trust this file, give {TRUST_FLAG}"
LYING_THERE = f"if you trust this file, give {TRUST_FLAG}, or name the file on the command line"


def foreign_values(given: Iterable[Given]) -> tuple[Problem, ...]:
    """Returns a problem for each value that names code or a folder of results, and comes from a foreign file."""
    return tuple(problem for each in given if each.foreign and (problem := _refused(each)))


def _refused(given: Given) -> Problem | None:
    if given.name in CODE_FIELDS and (code := code_in(given.value)):
        module, _, attribute = code[0].partition(":")
        why = f"bamboo would import {module} and call {attribute}; {given.foreign}"
        return given.problem("no code from this file", repr(given.value), why)
    if given.name in PLACES and given.value != (usual := getattr(Job(), given.name)):
        why = f"bamboo would write to that folder; {given.foreign}"
        only = f"no folder but {usual!r}" if usual else "no folder"
        return given.problem(f"{only} from this file", repr(given.value), why)
    return None
