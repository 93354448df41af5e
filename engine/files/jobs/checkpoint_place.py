"""The places of checkpoints that a user names, and the hash of weights that a user gives."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from engine.core.checkpoint_rules import keeps_any
from engine.core.errors import NothingMatchedError, Problem, StorageError, UserError
from engine.core.job.bit_fields import bit_differences, fingerprint_of, job_fingerprint
from engine.core.job.job import Job
from engine.core.manifest import can_be_parsed, is_manifest, step_of
from engine.files.atomic_write import open_to_read, storage_errors
from engine.files.checkpoint_folder import CheckpointFolder, CheckpointName, checkpoints_at
from engine.files.checkpoint_storage import folder_at, is_half_url, is_url
from engine.files.checkpoint_stores import credentials_problem, is_private
from engine.files.jobs.user_files import file_hash
from engine.files.run_folder import LATEST, RunFolder, find_run, run_names

_STEP = re.compile(r"(.*)@([0-9]{1,12})", re.DOTALL)
_MOST_BYTES = 16 << 20  # of run.json
_SUFFIXES = (".safetensors", ".json")  # of the files in a folder of weights, with its index
_UNREADABLE = (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError)


class ResumedRun(NamedTuple):
    """A run that began after another run's checkpoint: its own job and host, and whether it may have other bits."""

    job: Mapping[str, Any]
    facts: Mapping[str, Any]
    other_bits: bool
    file: str


@dataclass(frozen=True, slots=True)
class CheckpointPlace:
    """Checkpoints: all in a folder or at a URL, or those of one `run`; of one step, or of all.

    The job of a `heir` continues from one of them. `asked` is the folder's name of the run that stands for them, and
    `job` its job.
    """

    folder: CheckpointFolder
    run: str = ""
    step: int | None = None
    heir: ResumedRun | None = None
    asked: str = ""
    job: Mapping[str, Any] = field(default_factory=dict)

    def names(self) -> tuple[CheckpointName, ...]:
        """Returns the names of the checkpoints, by step, also of those whose manifests cannot be read."""
        names = (name for name in self.folder.names() if self.step in (None, name.step))
        return tuple(name for name in names if not self.run or self._is_of_run(name))

    def _is_of_run(self, name: CheckpointName) -> bool:
        try:
            return self.folder.manifest(name).run == self.run
        except StorageError:
            return True


def checkpoint_places(text: str, results: Path) -> Iterator[CheckpointPlace]:
    """Yields the places that `text` names: a run or the beginning of its name, ``latest``, a folder or a URL.

    The place of a run comes before that of the run that it was resumed from, and ``latest`` before older runs.

    Raises:
        NothingMatchedError: there is no such run.
        UserError: the URL is none that can be used, or the names of several runs begin so.
    """
    match = None if Path(text).exists() else _STEP.fullmatch(text)
    where, step = (match[1] or LATEST, int(match[2])) if match else (text or LATEST, None)
    if is_url(where):
        yield CheckpointPlace(checkpoints_at(where), step=step)
    elif where == LATEST:
        if not (names := run_names(results)):
            raise NothingMatchedError(f"no run in {str(results)!r} yet")
        for each in reversed(names):
            yield from places_of(RunFolder(results / each), step)
    elif Path(where).is_dir() and not RunFolder(Path(where)).events.exists():
        yield place_of_step(Path(where)) or CheckpointPlace(checkpoints_at(Path(where).absolute()), step=step)
    else:
        yield from places_of(find_run(results, where), step)


def places_of_job(job: Job, results: Path) -> Iterator[CheckpointPlace]:
    """Yields the places of a job's runs, the newest run first: those in `results`, and the job's own place."""
    fingerprint = fingerprint_of(job)
    here: dict[str, CheckpointPlace | None] = dict.fromkeys(run_names(results))
    elsewhere: dict[str, CheckpointPlace] = {}
    if job.checkpoints:
        shared = checkpoints_at(job.checkpoints if is_url(job.checkpoints) else Path(job.checkpoints).absolute())
        runs = shared.runs(lambda manifest: job_fingerprint(manifest.job) == fingerprint)
        elsewhere = {name: CheckpointPlace(shared, name, asked=name) for name in runs}
    for name in sorted(here | elsewhere, reverse=True):
        if name not in here:
            yield elsewhere[name]
        elif fingerprint_at(run := RunFolder(results / name)) == fingerprint:
            yield from places_of(run)


def fingerprint_at(run: RunFolder) -> str:
    """Returns the fingerprint of the job in a run folder, also of one that did not record it; empty if unreadable."""
    facts = _facts_of(run)
    return str(facts.get("fingerprint") or job_fingerprint(facts.get("job", {})))


def run_before(run: RunFolder) -> tuple[str, int] | None:
    """Returns the run that a run was resumed from, and the last step before it began; None if there is none."""
    before = _facts_of(run).get("resumed")
    return None if before is None else (before["run"], before["step"])


def finished_steps(run: RunFolder, job: Job, now: Mapping[str, object]) -> int:
    """Returns the steps of a run that has committed all of a job, with the bits that it has on a host with `now`, or 0.

    Those up to an early stop by the same rule are all.
    """
    facts = _facts_of(run)
    result = facts.get("result")
    if not isinstance(result, dict) or result.get("outcome") != "finished" or not job.has_steps:
        return 0
    is_early = bool(result.get("stopped_early")) and facts["job"].get("early_stop") == job.early_stop
    if not isinstance(steps := result.get("steps"), int) or not (is_early or steps >= job.steps):
        return 0
    return steps if not bit_differences(facts["job"], facts["host"], job, now) else 0


def place_of_step(path: Path) -> CheckpointPlace | None:
    """Returns the place of the step whose folder is at `path`, such as ``KEPT/step-00000003``; None for another path.

    Raises:
        StorageError: the folder cannot be read.
    """
    whole = path.absolute()
    with storage_errors("read", path):
        is_one = path.is_dir() and any(is_manifest(each) for each in os.listdir(path))
    step = step_of(whole.name) if is_one else None
    return None if step is None else CheckpointPlace(checkpoints_at(whole.parent), step=step)


def with_whole_place(job: Job) -> Job:
    """Returns the job with the whole path of its checkpoints, as commands in other folders need it."""
    is_path = job.checkpoints and not is_url(job.checkpoints)
    return replace(job, checkpoints=str(Path(job.checkpoints).absolute())) if is_path else job


def place_problems(job: Job) -> list[Problem]:
    """Returns the problem of a place for checkpoints that no run can make; it is not opened."""
    text, expected = job.checkpoints, "a folder or a URL"
    if is_half_url(text):
        hint = (
            "a URL is SCHEME://PLACE, such as s3://bucket/folder or file:///data/kept; a folder with a colon is ./A:B"
        )
        return [Problem("checkpoints", expected, repr(text), hint)]
    if not text:
        return []
    if (place := folder_at(text)) is None:
        problem = credentials_problem(text)
        return [problem] if problem else []
    try:
        base = next(path for path in (place, *place.parents) if os.path.lexists(path))
        reason = "" if base.is_dir() else "its target is not a folder" if base.is_symlink() else "it is not a folder"
        if not reason and not os.access(base, os.W_OK | os.X_OK):
            reason = "no permission to write there"
    except (OSError, ValueError) as error:
        base, reason = place, str(error)
    return [Problem("checkpoints", expected, repr(str(base)), reason)] if reason else []


def refuse_unwritable(job: Job, in_process: bool = False) -> None:
    """Writes and removes a file in the place for checkpoints; raises UserError, also for memory of another process."""
    if not job.checkpoints or not keeps_any(job.checkpoint_every):
        return
    if is_url(job.checkpoints) and is_private(job.checkpoints) and not in_process:
        expected, reason = "a place that all processes share", "each worker would write into its own memory"
        raise UserError([Problem("checkpoints", expected, repr(job.checkpoints), reason)])
    try:
        checkpoints_at(job.checkpoints).try_writing()
    except (StorageError, ValueError) as error:
        expected, reason = "a folder or a URL that can be written", str(error).splitlines()[0]
        raise UserError([Problem("checkpoints", expected, repr(job.checkpoints), reason)]) from error


def places_of(run: RunFolder, step: int | None = None) -> Iterator[CheckpointPlace]:
    """Yields the place of a run's checkpoints, under its first name, then of the run that it was resumed from."""
    facts = _facts_of(run)
    run_name = run.path.name
    job, name = facts.get("job", {}), str(facts.get("run") or run_name)
    of_run = {"step": step, "asked": run_name, "job": job}
    if named := job.get("checkpoints"):
        yield CheckpointPlace(checkpoints_at(named if is_url(named) else Path(named).absolute()), name, **of_run)
    else:
        yield CheckpointPlace(checkpoints_at(run.checkpoints.absolute(), run.path.absolute()), name, **of_run)
    if before := facts.get("resumed"):
        begun = before["step"] if before.get("is_named") else None
        if begun is None or step is None or step <= begun:  # what the other run did later is not this run's
            heir = ResumedRun(job, facts["host"], bool(before.get("other_bits")), str(run.run_json))
            yield CheckpointPlace(
                checkpoints_at(before["place"]), before["run"], begun if step is None else step, heir, run_name, job
            )


def _facts_of(run: RunFolder) -> dict[str, Any]:
    try:
        with open(open_to_read(run.run_json), "rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if not can_be_parsed(data, _MOST_BYTES):
            return {}
        facts: dict[str, Any] = json.loads(data)
        job, before = dict(facts["job"]), facts.get("resumed")
        if before is not None:
            before = {**before, "place": _path(before["place"]), "run": str(before["run"]), "step": int(before["step"])}
        checkpoints = _path(job.get("checkpoints", ""))
        return {**facts, "job": job | {"checkpoints": checkpoints}, "host": dict(facts["host"]), "resumed": before}
    except _UNREADABLE:
        return {}


def _path(text: str) -> str:
    """Returns the text of a path; raises ValueError for one that the system cannot have."""
    if b"\0" in os.fsencode(text):
        raise ValueError("a path has no NUL")
    return text


# The hash of the weights that a user gives to a job, for its records and its twin.
def weights_hash(path: str) -> str:
    """Returns the SHA-256 (hex) of a file, or of the names and hashes of the files in a folder; empty for no path.

    Raises:
        StorageError: a file cannot be read.
    """
    if not path:
        return ""
    with storage_errors("read", Path(path)):
        if not Path(path).is_dir():
            return file_hash(path).sha256
        lines = "".join(f"{file_hash(each).sha256}  {each.name}\n" for each in sorted(_files_of(Path(path))))
        return hashlib.sha256(lines.encode()).hexdigest()


def hash_as_given(path: str, before: str) -> str:
    """Returns the hash of given weights; raises UserError if it differs from the run `before`, or there are none."""
    sha256 = weights_hash(path)
    if before and before != sha256:
        hint = "put the weights of that run back, or name others: --init FILE"
        raise UserError([Problem("init", f"SHA-256 {before} as in that run", f"{sha256} of {path!r}", hint)])
    if not path:
        return sha256
    if (place := place_of_step(Path(path))) is not None:
        _refuse_damaged(path, place)
    elif not (files := _files_of(Path(path))) or not all(map(_may_be_weights, files)):
        expected = "weights: FILE.safetensors, a state_dict that torch.save wrote, or a folder of safetensors files"
        hint = "it begins as no file of weights does" if files else "it has no safetensors file"
        raise UserError([Problem("init", expected, repr(path), hint)])
    return sha256


def _refuse_damaged(path: str, place: CheckpointPlace) -> None:
    """Reads every byte of the checkpoint in the folder `path`; raises UserError if one is wrong, or for several."""
    names = place.names()
    if len(names) > 1:
        text = f"{path!r}: {', '.join(each.file for each in names)[:300]}"
        raise UserError([Problem("init", "the folder of one checkpoint", text)])
    try:
        for each in names:
            place.folder.verify(each)
    except StorageError as error:
        raise UserError([Problem("init", "weights that can be read", f"{path!r}: {error}")]) from error


def _files_of(path: Path) -> list[Path]:
    """Returns the file, or the files in a folder that may have its weights."""
    if not path.is_dir():
        return [path]
    return [each for each in path.iterdir() if each.suffix in _SUFFIXES]


def _may_be_weights(path: Path) -> bool:
    """Returns whether a file begins as one of torch or safetensors does; torch names a class of its own error only."""
    if path.suffix == ".json":  # the index of a folder
        return True
    with storage_errors("read", path), open(path, "rb") as file:
        begin = file.read(9)
    return begin[8:] == b"{" if path.suffix == ".safetensors" else begin.startswith((b"PK\x03\x04", b"\x80"))


def with_weights_hash(job: Job) -> Job:
    """Returns the job with the hash of its given weights in the place of their path, as its bits depend on that."""
    return replace(job, init=weights_hash(job.init))
