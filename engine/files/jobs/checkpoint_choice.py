"""Finds the checkpoint with which a run begins or goes on, and refuses one that would give other bits.

Rules: a checkpoint with a wrong byte is refused by the name of its file, and the next older one is tried. A run that
was itself resumed, and has kept nothing yet, stands for the checkpoint that it came from, with its own job.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from engine.core.checkpoint_rules import Resumption
from engine.core.errors import BambooError, NothingMatchedError, Problem, StorageError, UserError
from engine.core.job.bit_fields import (
    OF_TENSORS,
    BitDifference,
    bit_differences,
    fingerprint_of,
    identity_difference,
    is_same_job,
)
from engine.core.job.job import Job
from engine.core.job.update_rules import monitor_rules
from engine.core.manifest import Manifest
from engine.core.monitors import NO_MONITORS, Monitors, in_words
from engine.core.texts import counted, numbered, trust_words
from engine.files.checkpoint_folder import CheckpointName, NewestGood, checkpoints_at
from engine.files.host_facts import fixed_instruction_set, host_facts
from engine.files.jobs.checkpoint_place import (
    CheckpointPlace,
    ResumedRun,
    checkpoint_places,
    fingerprint_at,
    finished_steps,
    places_of,
    places_of_job,
)
from engine.files.jobs.job_layers import needs_word
from engine.files.jobs.resolved_job import secret_arguments
from engine.files.jobs.user_files import DataFile, code_files, data_files
from engine.files.run_folder import RunFolder, run_names
from engine.files.strict_yaml import Document, KeyPath

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

    @property
    def words(self) -> str:
        """A line about the step, the run and the place that the run resumes from, and about the heir's job."""
        heir = f", with the job of run {Path(self.heir.file).parent.name}" if self.heir else ""
        return f"resuming after step {self.origin.step} of run {self.origin.run} ({self.origin.place}){heir}"


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
        if (choice := _choice_of(good, place)) is not None:
            if place.asked != newest.asked:
                of = "" if step is None else f" of step {step}"
                say(f"the newest run {newest.asked} has no good checkpoint{of}; this is one of run {choice.origin.run}")
            return choice
    at = "" if step is None else f" of step {step}"
    if num_refused:
        raise StorageError(
            f"no checkpoint{at} of {text!r} is good: {num_refused} {'was' if num_refused == 1 else 'were'} refused"
        )
    if others and newest is not None:
        why = f"the newest run {newest.asked} has none, nor has another run of its job"
        raise NothingMatchedError(f"no checkpoint{at} in {text!r}: {why}; name a run: {', '.join(others.values())}")
    raise NothingMatchedError(f"no checkpoint{at} in {text!r}")


def _choice_of(good: NewestGood, place: CheckpointPlace) -> CheckpointChoice | None:
    if good.name is None or good.manifest is None:
        return None
    manifest, is_named = good.manifest, place.step is not None
    other_bits = place.heir is not None and place.heir.other_bits
    origin = Resumption(good.name.step, place.folder.place, good.name.file, manifest.run, is_named, manifest.init)
    origin = replace(origin, other_bits=other_bits, monitors=manifest.monitors or NO_MONITORS)
    return CheckpointChoice(origin, manifest, place.heir)


class JobSoFar(NamedTuple):
    """What the runs of a job have left: its newest good checkpoint, or all of its steps in a run, or nothing.

    The run that has committed all steps is `finished_by`, and `steps` is their number; it is empty without one.
    """

    choice: CheckpointChoice | None = None
    finished_by: str = ""
    steps: int = 0


def find_for_job(job: Job, results: Path, say: Callable[[str], object]) -> JobSoFar:
    """Returns what the runs of a job have left. Those of other jobs do not count; `say` gets a line about a newer one.

    Raises:
        StorageError: the job has checkpoints, and none is good. To start over would throw them away.
    """
    now = host_facts(Path.cwd())
    _tell_other(job, results, say)
    runs, names = dict[str, None](), set[CheckpointName]()  # a run and the one that was resumed from it share some
    for place in places_of_job(job, results):
        if place.asked not in runs and (steps := finished_steps(RunFolder(results / place.asked), job, now)):
            return JobSoFar(finished_by=place.asked, steps=steps)
        runs[place.asked] = None
        good = place.folder.newest_good(place.run, place.step)
        news = tuple(each for each in good.refused if each.name not in names)
        names |= {each.name for each in news}
        tell_refused(replace(good, refused=news), place.folder.place, say)
        if (choice := _choice_of(good, place)) is not None:
            is_whole = job.has_steps and choice.origin.step >= last_of(job, choice.origin.monitors)
            is_same = not bit_differences(choice.job, choice.manifest.facts, job, now)
            return JobSoFar(choice, choice.origin.run if is_whole and is_same else "", choice.origin.step + 1)
    if names:
        why = f"{counted(len(names), 'checkpoint was', 'checkpoints were')} refused; move them away to start over"
        raise StorageError(f"no checkpoint of this job is good: {why}")
    nothing = f"{numbered('run', tuple(runs))} of this job has kept no checkpoint" if runs else "no run of this job yet"
    say(f"{nothing}: it begins with step 0")
    return JobSoFar()


def _tell_other(job: Job, results: Path, say: Callable[[str], object]) -> None:
    """Says that the newest run is of another job, and in what."""
    newest = next(reversed(run_names(results)), "")
    folder = RunFolder(results / newest)
    if not newest or fingerprint_at(folder) == fingerprint_of(job):
        return
    place = next(places_of(folder), None)
    other = identity_difference(place.job, job) if place is not None and place.job else None
    what = "cannot be read" if other is None else "is of another job"
    how = "" if other is None else f" ({other.name} {repr(other.before)[:80]}, and here {repr(other.now)[:80]})"
    say(f"the newest run {newest} {what}{how}: it is left alone")


def _named(place: CheckpointPlace) -> dict[str, str]:
    """Returns a run of another job with its newest checkpoint, in words, by the name of the run, if it has one."""
    names: tuple[CheckpointName, ...] = ()
    with contextlib.suppress(StorageError):
        names = place.names()
    model = f"model {str(place.job.get('model'))[:80]}"
    return {place.asked: f"{place.asked} ({model}, step {names[-1].step})"} if names else {}


def last_of(job: Job, monitors: Monitors) -> int:
    """Returns the last step of a job after a checkpoint with these monitors: an early stop by the same rule is one."""
    ends_at = monitors.begun(monitor_rules(job), monitors.ends_at).ends_at if monitors.ends_at >= 0 else -1
    return ends_at if 0 <= ends_at == monitors.ends_at else job.steps - 1


def tell_refused(good: NewestGood, place: str, say: Callable[[str], object]) -> int:
    """Says which checkpoints were refused, and why; returns their number."""
    for each in good.refused[:_MOST_TOLD]:
        say(f"a checkpoint in {place} is refused: {each.reason}")
    if more := len(good.refused[_MOST_TOLD:]):
        say(f"{counted(more, 'more checkpoint')} in {place} {'is' if more == 1 else 'are'} refused")
    return len(good.refused)


def refuse_other_bits(choice: CheckpointChoice, job: Job, other_bits: bool) -> None:
    """Refuses a job that cannot go on from a checkpoint.

    An heir with other bits was allowed its own job and host, its code and its data: only a job with others is refused.

    Raises:
        UserError: fields, facts of the host, code or data files differ that decide bits, with `other_bits` those that
            the tensors fit; or no step is left.
    """
    manifest = choice.manifest
    problems = []
    place = f"run {manifest.run} in {choice.origin.place}"
    if manifest.step >= job.steps - 1:
        hint = f"all {job.steps} steps are committed in the checkpoint of {place}"
        problems.append(Problem("steps", f"more than {manifest.step + 1}", str(job.steps), hint))
    elif manifest.step >= last_of(job, choice.origin.monitors):
        hint = f"{place} has {in_words(choice.origin.monitors)}; a greater patience lets it continue"
        problems.append(Problem("early_stop", "a rule that is not met", repr(job.early_stop), hint))
    is_granted = choice.heir is not None and choice.heir.other_bits
    facts = choice.heir.facts if choice.heir is not None and is_granted else manifest.facts
    differences = bit_differences(choice.job, facts, job, host_facts(Path.cwd()))
    if not (other_bits or is_granted):
        differences += _changed("code file", manifest.code_files, lambda: code_files(job))
        differences += _changed("data file", manifest.data_files, lambda: data_files(job))
    refused = (each for each in differences if not other_bits or each.name in OF_TENSORS)
    problems += _as_problems(refused, manifest.run)
    of_state = _problems_of_state(choice, job)
    known_fields = {each.field for each in of_state}
    problems = [*(each for each in problems if each.field not in known_fields), *of_state]
    if problems:
        raise UserError(problems)


def _problems_of_state(choice: CheckpointChoice, job: Job) -> list[Problem]:
    """Returns the problems of the job's optimizer with the state in the checkpoint, also with --other-bits."""
    wrote, args = choice.manifest.job.get("optimizer"), choice.manifest.job.get("optimizer_args", {})
    new = [name for name in _STATE_ARGS if job.optimizer_args.get(name) and not args.get(name)]
    if (wrote == job.optimizer and (job.optimizer in _BEGINS_ANEW or not new)) or not _has_optimizer_state(choice):
        return []
    place = shlex.quote(f"{choice.origin.place}@{choice.origin.step}")
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


def _has_optimizer_state(choice: CheckpointChoice) -> bool:
    """Returns whether a part has state of an optimizer; SGD without momentum has none."""
    folder = checkpoints_at(choice.origin.place)
    return any(
        name.startswith("optimizer/")
        for layer in choice.manifest.layers
        for name in folder.layer(choice.manifest, layer.layer).tensors
    )


def _as_problems(differences: Iterable[BitDifference], run: str) -> Iterator[Problem]:
    for difference in differences:
        hint = (
            "it decides bits: the run would not be the one that was interrupted; --other-bits resumes all the same, "
            "--name NAME begins another job"
        )
        if difference.name in OF_TENSORS:
            hint = "the tensors of a checkpoint fit no other, with --other-bits neither"
        yield Problem(
            difference.name, f"{difference.before!r} as in the checkpoint of run {run}", repr(difference.now), hint
        )


def _changed(what: str, files: Iterable[DataFile], files_now: Callable[[], Iterable[DataFile]]) -> list[BitDifference]:
    before = {name: (size, sha256) for name, size, sha256 in files}
    now = {name: (size, sha256) for name, size, sha256 in files_now()} if before else {}
    return [
        BitDifference(f"{what} {name}", _words(before.get(name)), _words(now.get(name)))
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]


def _words(facts: tuple[int, str] | None) -> str:
    return "no file" if facts is None else f"{facts[0]} bytes, SHA-256 {facts[1][:12]}"


def resume_command(run: Path, job: Job) -> str:
    """Returns the command that goes on with a run from its newest checkpoint; empty if there is none to read."""
    has_one = False
    for place in places_of(RunFolder(run)):
        for name in place.names():
            with contextlib.suppress(BambooError):
                has_one = has_one or place.folder.manifest(name).run == place.run
    if not has_one:
        return ""
    words = [word for name in secret_arguments(job) for word in ("--set", f"{name}=VALUE")]
    words += trust_words(needs_word(run, job))
    words += ["--isa", isa] if (isa := fixed_instruction_set()) else []
    return shlex.join(["bamboo", "run", "--resume", str(run), *words])
