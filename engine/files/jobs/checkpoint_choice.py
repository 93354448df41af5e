"""Finds the checkpoint with which a run begins or goes on, and refuses one that would give other bits.

Rules: a checkpoint with a wrong byte is refused by the name of its file, and the next older one is tried. A run that
was itself resumed, and has kept nothing yet, stands for the checkpoint that it came from, with its own job.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from engine.core.checkpoint_rules import Resumption, keeps_any
from engine.core.errors import BambooError, NothingMatchedError, Problem, StorageError, UserError
from engine.core.job.bit_fields import OF_TENSORS, BitDifference, bit_differences, is_same_job
from engine.core.job.job import Job
from engine.core.manifest import Manifest, can_be_parsed, draft, draft_of, is_manifest, step_of
from engine.core.texts import counted, trust_words
from engine.files.atomic_write import open_to_read, storage_errors
from engine.files.checkpoint_folder import CheckpointFolder, CheckpointName, NewestGood, checkpoints_at
from engine.files.checkpoint_storage import folder_at, is_half_url, is_url
from engine.files.checkpoint_stores import credentials_problem, is_private
from engine.files.host_facts import fixed_instruction_set, host_facts
from engine.files.jobs.job_layers import needs_word
from engine.files.jobs.resolved_job import secret_arguments
from engine.files.jobs.user_files import DataFile, code_files, data_files, file_hash
from engine.files.run_folder import LATEST, RunFolder, find_run, run_names
from engine.files.strict_yaml import Document, KeyPath

# The places of checkpoints that a user names: a run, a folder or a URL, also of one step, alone or behind an @.


_STEP = re.compile(r"(.*)@([0-9]{1,12})", re.DOTALL)
_MOST_BYTES = 16 << 20  # of run.json
_UNREADABLE = (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError)


class ResumedRun(NamedTuple):
    """A run that began after another run's checkpoint: its own job and host, and whether it may have other bits."""

    job: Mapping[str, Any]
    facts: Mapping[str, Any]
    other_bits: bool
    file: str


@dataclass(frozen=True, slots=True)
class CheckpointPlace:
    """Checkpoints: all in a folder or at a URL, or those of one run; of one step, or of all.

    `run` is the name of the run whose checkpoints count, empty for all. A `heir` began after one of them, and its job
    goes on from there. `asked` is the folder's name of the run that stands for them, and `job` its job; both are empty
    without one.
    """

    folder: CheckpointFolder
    run: str = ""
    step: int | None = None
    heir: ResumedRun | None = None
    asked: str = ""
    job: Mapping[str, Any] = field(default_factory=dict)

    def names(self) -> tuple[CheckpointName, ...]:
        """Returns the names of the checkpoints, by step, also of those whose manifests cannot be read."""
        found = (name for name in self.folder.names() if self.step in (None, name.step))
        return tuple(name for name in found if not self.run or self._is_of_run(name))

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
        found = next(each for each in (place, *place.parents) if os.path.lexists(each))
        reason = "" if found.is_dir() else "it is a link to no folder" if found.is_symlink() else "it is no folder"
        if not reason and not os.access(found, os.W_OK | os.X_OK):
            reason = "no permission to write there"
    except (OSError, ValueError) as error:
        found, reason = place, str(error)
    return [Problem("checkpoints", expected, repr(str(found)), reason)] if reason else []


def refuse_unwritable(job: Job, in_process: bool = False) -> None:
    """Writes and removes a file in the place that the user names for checkpoints; raises UserError if that fails.

    A store in the memory of one process is refused too, unless the workers are threads of it: `in_process`.
    """
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
    """Yields the place of a run's checkpoints, then that of the run that it was resumed from.

    The checkpoints have the name that the run began with: its folder may have another one since.
    """
    facts = _facts_of(run)
    asked = run.path.name
    job, name = facts.get("job", {}), str(facts.get("run") or asked)
    of_run = {"step": step, "asked": asked, "job": job}
    if named := job.get("checkpoints"):
        yield CheckpointPlace(checkpoints_at(named if is_url(named) else Path(named).absolute()), name, **of_run)
    else:
        yield CheckpointPlace(checkpoints_at(run.checkpoints.absolute(), run.path.absolute()), name, **of_run)
    if before := facts.get("resumed"):
        begun = before["step"] if before.get("is_named") else None
        if begun is None or step is None or step <= begun:  # what the other run did later is not this run's
            heir = ResumedRun(job, facts["host"], bool(before.get("other_bits")), str(run.run_json))
            yield CheckpointPlace(
                checkpoints_at(before["place"]), before["run"], begun if step is None else step, heir, asked, job
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


# Arguments of torch.optim with which a parameter has one more tensor of state; sgd takes its first gradient for it.
_STATE_ARGS = ("amsgrad", "centered", "momentum")
_BEGINS_ANEW = ("sgd",)
_MOST_NAMED = 5  # runs of other jobs, in a message
_MOST_TOLD = 10  # refused checkpoints of one place


class CheckpointChoice(NamedTuple):
    """A checkpoint of which every byte is right; a run that began after it, and has kept none, may be its `heir`."""

    origin: Resumption
    manifest: Manifest
    heir: ResumedRun | None = None

    @property
    def job(self) -> Mapping[str, Any]:
        """The job that goes on from it."""
        return self.heir.job if self.heir else self.manifest.job

    @property
    def source(self) -> str:
        """The file with that job."""
        return self.heir.file if self.heir else f"{self.origin.place}/{self.manifest.folder}/{self.origin.file}"

    @property
    def document(self) -> Document:
        """The job as a document; its text has one line."""
        paths: list[KeyPath] = [(), *((name,) for name in self.job)]
        paths += ((name, key) for name, value in self.job.items() if isinstance(value, dict) for key in value)
        places = dict.fromkeys(paths, (1, 1))
        return Document(self.source, dict(self.job), places, places)

    def to_plain(self) -> list[Any]:
        """Returns it as plain values, for another process."""
        return [asdict(self.origin), draft(self.manifest), self.heir]

    @classmethod
    def of_plain(cls, plain: list[Any]) -> CheckpointChoice:
        """Returns what another process has found."""
        origin, manifest, heir = plain
        return cls(Resumption(**origin), draft_of(manifest), None if heir is None else ResumedRun(*heir))

    @property
    def words(self) -> str:
        """A line about the step, the run and the place that the run goes on from, and about the heir's job."""
        heir = f", with the job of run {Path(self.heir.file).parent.name}" if self.heir else ""
        return f"goes on after step {self.origin.step} of run {self.origin.run} ({self.origin.place}){heir}"


def find_checkpoint(text: str, results: Path, say: Callable[[str], object]) -> CheckpointChoice:
    """Returns the checkpoint that ``latest``, a run, a folder or a URL of checkpoints stands for, ``@STEP`` behind it.

    Where the newest run has no good one, ``latest`` is that of an older run of the same job. `say` gets a line about
    each newer one that is refused, and about a newest run of which none is good.

    Raises:
        NothingMatchedError: there is no such run, or it has no checkpoint; runs of other jobs are named.
        StorageError: there are checkpoints, and none is good.
    """
    num_refused, step = 0, None
    newest: CheckpointPlace | None = None
    others: dict[str, str] = {}
    for place in checkpoint_places(text, results):
        step, newest = place.step, newest or place
        if place.asked != newest.asked and not is_same_job(newest.job, place.job):
            others |= _named(place) if len(others) < _MOST_NAMED else {}
            continue
        good = place.folder.newest_good(place.run, step)
        num_refused += tell_refused(good, place.folder.place, say)
        if good.name is not None and good.manifest is not None:
            file, manifest = good.name.file, good.manifest
            if place.asked != newest.asked:
                of = "" if step is None else f" of step {step}"
                say(f"the newest run {newest.asked} has no good checkpoint{of}; this is one of run {manifest.run}")
            origin = Resumption(
                good.name.step, place.folder.place, file, manifest.run, is_named=step is not None, init=manifest.init
            )
            other_bits = place.heir is not None and place.heir.other_bits
            return CheckpointChoice(replace(origin, other_bits=other_bits), manifest, place.heir)
    at = "" if step is None else f" of step {step}"
    if num_refused:
        raise StorageError(
            f"no checkpoint{at} of {text!r} is good: {num_refused} {'was' if num_refused == 1 else 'were'} refused"
        )
    if others and newest is not None:
        why = f"the newest run {newest.asked} has none, nor has another run of its job"
        raise NothingMatchedError(f"no checkpoint{at} in {text!r}: {why}; name a run: {', '.join(others.values())}")
    raise NothingMatchedError(f"no checkpoint{at} in {text!r}")


def _named(place: CheckpointPlace) -> dict[str, str]:
    """Returns a run of another job with its newest checkpoint, in words, by the name of the run, if it has one."""
    names: tuple[CheckpointName, ...] = ()
    with contextlib.suppress(StorageError):
        names = place.names()
    model = f"model {str(place.job.get('model'))[:80]}"
    return {place.asked: f"{place.asked} ({model}, step {names[-1].step})"} if names else {}


def tell_refused(good: NewestGood, place: str, say: Callable[[str], object]) -> int:
    """Says which checkpoints were refused, and why; returns their number."""
    for each in good.refused[:_MOST_TOLD]:
        say(f"a checkpoint in {place} is refused: {each.reason}")
    if more := len(good.refused[_MOST_TOLD:]):
        say(f"{counted(more, 'more checkpoint')} in {place} {'is' if more == 1 else 'are'} refused")
    return len(good.refused)


def refuse_other_bits(found: CheckpointChoice, job: Job, other_bits: bool) -> None:
    """Refuses a job that cannot go on from a checkpoint.

    An heir with other bits was allowed its own job and host, its code and its data: only a job with others is refused.

    Raises:
        UserError: fields, facts of the host, code or data files differ that decide bits, with `other_bits` those that
            the tensors fit; or no step is left.
    """
    manifest = found.manifest
    problems = []
    if manifest.step >= job.steps - 1:
        hint = f"all {job.steps} steps are committed in the checkpoint of run {manifest.run} in {found.origin.place}"
        problems.append(Problem("steps", f"more than {manifest.step + 1}", str(job.steps), hint))
    is_granted = found.heir is not None and found.heir.other_bits
    facts = found.heir.facts if found.heir is not None and is_granted else manifest.facts
    differences = bit_differences(found.job, facts, job, host_facts(Path.cwd()))
    if not (other_bits or is_granted):
        differences += _changed("code file", manifest.code_files, lambda: code_files(job))
        differences += _changed("data file", manifest.data_files, lambda: data_files(job))
    refused = (each for each in differences if not other_bits or each.name in OF_TENSORS)
    problems += _as_problems(refused, manifest.run)
    of_state = _problems_of_state(found, job)
    known = {each.field for each in of_state}
    problems = [*(each for each in problems if each.field not in known), *of_state]
    if problems:
        raise UserError(problems)


def _problems_of_state(found: CheckpointChoice, job: Job) -> list[Problem]:
    """Returns the problems of the job's optimizer with the state in the checkpoint, also with --other-bits."""
    wrote, args = found.manifest.job.get("optimizer"), found.manifest.job.get("optimizer_args", {})
    new = [name for name in _STATE_ARGS if job.optimizer_args.get(name) and not args.get(name)]
    if (wrote == job.optimizer and (job.optimizer in _BEGINS_ANEW or not new)) or not _has_optimizer_state(found):
        return []
    place = shlex.quote(f"{found.origin.place}@{found.origin.step}")
    hint = (
        "the checkpoint lacks its tensors, with --other-bits too; to begin with the weights alone: bamboo export "
        f"{place} --output weights.safetensors, then bamboo run --init weights.safetensors"
    )
    if wrote != job.optimizer:
        return [Problem("optimizer", f"{wrote!r}, which wrote the state in the checkpoint", repr(job.optimizer), hint)]
    return [
        Problem(f"optimizer_args.{name}", "no such state, as in the checkpoint", repr(job.optimizer_args[name]), hint)
        for name in new
    ]


def _has_optimizer_state(found: CheckpointChoice) -> bool:
    """Returns whether a part has state of an optimizer; SGD without momentum has none."""
    folder = checkpoints_at(found.origin.place)
    return any(
        name.startswith("optimizer/")
        for each in found.manifest.layers
        for name in folder.layer(found.manifest, each.layer).tensors
    )


def _as_problems(differences: Iterable[BitDifference], run: str) -> Iterator[Problem]:
    for each in differences:
        hint = "it decides bits: the run would not be the one that was interrupted; --other-bits goes on all the same"
        if each.name in OF_TENSORS:
            hint = "the tensors of a checkpoint fit no other, with --other-bits neither"
        yield Problem(each.name, f"{each.before!r} as in the checkpoint of run {run}", repr(each.now), hint)


def _changed(what: str, kept: Iterable[DataFile], found: Callable[[], Iterable[DataFile]]) -> list[BitDifference]:
    before = {name: (size, sha256) for name, size, sha256 in kept}
    now = {name: (size, sha256) for name, size, sha256 in found()} if before else {}
    return [
        BitDifference(f"{what} {name}", _words(before.get(name)), _words(now.get(name)))
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]


def _words(found: tuple[int, str] | None) -> str:
    return "no file" if found is None else f"{found[0]} bytes, SHA-256 {found[1][:12]}"


def resume_command(run: Path, job: Job) -> str:
    """Returns the command that goes on with a run from its newest checkpoint; empty if there is none to read."""
    has_one = False
    for place in places_of(RunFolder(run)):
        for each in place.names():
            with contextlib.suppress(BambooError):
                has_one = has_one or place.folder.manifest(each).run == place.run
    if not has_one:
        return ""
    words = [word for name in secret_arguments(job) for word in ("--set", f"{name}=VALUE")]
    words += trust_words(needs_word(run, job))
    words += ["--isa", isa] if (isa := fixed_instruction_set()) else []
    return shlex.join(["bamboo", "run", "--resume", str(run), *words])


# The hash of the weights that a user gives to a job, for its records and its twin.
_SUFFIXES = (".safetensors", ".json")  # of the files in a folder of weights, with its index


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
    """Returns the hash of given weights; raises UserError if it is not that of the run `before`, if there was one.

    What holds no weights, or is a damaged checkpoint, is refused before a run begins.
    """
    found = weights_hash(path)
    if before and before != found:
        hint = "put the weights of that run back, or name others: --init FILE"
        raise UserError([Problem("init", f"SHA-256 {before} as in that run", f"{found} of {path!r}", hint)])
    if not path:
        return found
    if (place := place_of_step(Path(path))) is not None:
        _refuse_damaged(path, place)
    elif not (files := _files_of(Path(path))) or not all(map(_may_be_weights, files)):
        expected = "weights: FILE.safetensors, a state_dict that torch.save wrote, or a folder of safetensors files"
        hint = "it begins as no file of weights does" if files else "it has no safetensors file"
        raise UserError([Problem("init", expected, repr(path), hint)])
    return found


def _refuse_damaged(path: str, place: CheckpointPlace) -> None:
    """Reads every byte of the checkpoint in the folder `path`; raises UserError if one is wrong, or for several."""
    names = place.names()
    if len(names) > 1:
        told = f"{path!r}: {', '.join(each.file for each in names)[:300]}"
        raise UserError([Problem("init", "the folder of one checkpoint", told)])
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
