"""The user's word on files: values that reach beyond a job, and the files from which they count.

Rules: code (``module:attribute``) and the folder of results count from the command line, from ``BAMBOO_*``, from the
user's own file, and from a job file or the record of a run that the command line names. Any other file is foreign: a
scenario, a matrix, the job file that one of them names, a ``bamboo.yaml`` that lies in the current folder, and a
checkpoint. From a foreign file these values count with ``--trust-code`` only.

A user's own checkpoint is told from another one by what its job names, because any file can be unpacked from elsewhere:
each run notes its code, with the current folder, and its folders in a file of the user's. What a run had here before,
it has again, without a word. So does the folder of results in which the run of that checkpoint lies: it was looked for
there, and a machine that takes over after a preemption has no notes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from engine.core.config.job import ACTING, CODE_FIELDS, PLACES, Job, code_in
from engine.core.errors import Problem, StorageError
from engine.core.texts import TRUST_FLAG
from engine.files.atomic_write import open_to_read, write_atomically
from engine.files.jobs.job_value import Given

TRUST_VARIABLE = "BAMBOO_TRUST_CODE"
# The advice about a value of a foreign file (`Given.foreign`).
FOREIGN = f"if you trust this file, give {TRUST_FLAG}"
LYING_THERE = f"if you trust this file, give {TRUST_FLAG}, or name the file on the command line"

KEPT = f"if you trust this checkpoint, give {TRUST_FLAG}, or name the value yourself, as with --set"
_MOST_BYTES = 4 << 20  # of the notes


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


def note(job: Job) -> None:
    """Notes the code and the folders of a job that is run in the current folder, where a note can be written."""
    noted = _noted()
    if (lines := noted | {_line(each) for each in _acting(job) if _refused(each)}) == noted:
        return
    with suppress(OSError, RuntimeError, StorageError):  # of a home that nobody has, or may write
        path = _notes()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(path, "".join(f"{each}\n" for each in sorted(lines)))


def without_noted(given: Iterable[Given]) -> list[Given]:
    """Returns the values of a checkpoint; those that a run had here, and the place of its run, are foreign no more."""
    noted = _noted()
    return [replace(each, foreign="") if _line(each) in noted or _is_place(each) else each for each in given]


def _is_place(given: Given) -> bool:
    """Returns whether a value is the folder of results with the run from which it comes."""
    if given.name != "results" or not isinstance(given.value, str):
        return False
    folders = Path(os.path.realpath(given.source)).parents
    run = next((each for each in folders if (each / "run.json").is_file()), None)
    return run is not None and os.path.realpath(given.value) == str(run.parent)


def needs_word(run: Path, job: Job) -> bool:
    """Returns whether a run with this job is resumed in this folder with the user's word only."""
    return any(each.foreign and _refused(each) for each in without_noted(_acting(job, str(run / "run.json"))))


def _acting(job: Job, source: str = "") -> list[Given]:
    return [Given((name,), getattr(job, name), "", source, foreign=KEPT) for name in ACTING]


def _line(given: Given) -> str:
    is_place = given.name in PLACES
    text = json.dumps([os.path.realpath(str(given.value) if is_place else "."), given.name, is_place or given.value])
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
