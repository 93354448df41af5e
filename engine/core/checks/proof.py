"""The verdict on the weights of a run, computed from its hashes, losses and records each time it is shown.

Rules: a flaw is a place where the evidence contradicts itself; a run with a flaw is neither identical nor different.
Missing evidence proves nothing: the weights are then unverified. The record of the comparison is one more fact that
must fit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from engine.core.checks.trajectory import TrajectoryRow, first_difference
from engine.core.history.evidence import EVENTS
from engine.core.history.process_records import (
    CheckRecord,
    ComparisonRecord,
    EndedRecord,
    ExitRecord,
    NotComparedRecord,
    ResumedRecord,
    SealRecord,
    TwinRecord,
    VerdictRecord,
)
from engine.core.history.run_history import RunHistory
from engine.core.history.run_records import AGENT, AuditRecord, CommitRecord, EpochRecord, FaultRecord, StampedRecord
from engine.core.job.bit_fields import bit_facts, own_code, twin_of
from engine.core.job.job import Job
from engine.core.manifest import joined_buffers

# The fault-free twin of a run: the same training without faults and redundancy; and the comparison with it.
#
# Rules: only steps with hashes in both runs are compared. An earlier twin may be reused if all inputs of its bits are
# known and equal.

Rows = list[TrajectoryRow]
Step = tuple[int, Rows]
# The data that bamboo ships. The user's files count by their hashes; a factory may read anything.
BUILT_IN_DATA = frozenset({"auto", "text", "digits", "synthetic"})


def fingerprint(
    job: Job, facts: Mapping[str, object], sources: str, files: Sequence[tuple[str, int, str]] = ()
) -> str | None:
    """Returns a name (hex) for the trajectory of the twin of `job`, or None if it must not be reused.

    It covers the `facts` of the host, the hash of bamboo's `sources`, and the data `files`: (name, size, SHA-256).
    """
    if own_code(job) or not (files or job.data in BUILT_IN_DATA):
        return None
    inputs = {"job": asdict(twin_of(job)), "facts": bit_facts(facts), "sources": sources, "files": files}
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:32]


def compare(rows: Iterable[TrajectoryRow], twin: Iterable[TrajectoryRow], history: RunHistory) -> ComparisonRecord:
    """Returns the comparison of the rows of a run, which has this history, with the rows of its twin."""
    by_step = attrgetter("step")
    return compare_steps(in_steps(sorted(rows, key=by_step)), in_steps(sorted(twin, key=by_step)), history)


def in_steps(rows: Iterable[TrajectoryRow]) -> Iterator[Step]:
    """Yields the rows of one step after another; they must come in the order of steps."""
    return ((step, list(of)) for step, of in groupby(rows, key=attrgetter("step")))


def compare_steps(run: Iterator[Step], twin: Iterator[Step], history: RunHistory) -> ComparisonRecord:
    """Returns the comparison of a run with its twin, whose steps are read one by one: a long run has millions."""
    num_compared, last_step, difference = 0, -1, None
    for step, ours, theirs in _both(run, twin):
        num_compared, last_step = num_compared + 1, step
        difference = difference or first_difference(ours, theirs)
    return ComparisonRecord(
        compared=num_compared,
        steps=history.num_steps,
        last_step=last_step,
        difference=difference,
        disturbed=disturbed_step(history),
    )


def _both(run: Iterator[Step], twin: Iterator[Step]) -> Iterator[tuple[int, Rows, Rows]]:
    """Yields the steps that both have; reads each to its end."""
    ours, theirs = next(run, None), next(twin, None)
    while ours is not None or theirs is not None:
        if ours is not None and theirs is not None and ours[0] == theirs[0]:
            yield ours[0], ours[1], theirs[1]
            ours, theirs = next(run, None), next(twin, None)
        elif theirs is None or (ours is not None and ours[0] < theirs[0]):
            ours = next(run, None)
        else:
            theirs = next(twin, None)


def disturbed_step(history: RunHistory) -> int | None:
    """Returns the step in which the first fault struck or worker was lost: all earlier hashes precede that; or None.

    After a commit, a worker may still be inside its optimizer step.
    """
    committed = 0
    for record in history.records:
        match record:
            case CommitRecord():
                committed = record.step
            case FaultRecord():
                return record.step if record.action else committed
            case EpochRecord() if record.verdict:
                return committed
            case ExitRecord() if not record.expected:
                return committed
    return None


_MOST_FLAWS = 20
_BEHIND_SEAL = (EndedRecord, CheckRecord, VerdictRecord)  # of the launcher, and of `bamboo inject --run`


class Flaw(NamedTuple):
    """A place in the evidence, as a path in the folder of the run with a line, and the contradiction there."""

    place: str
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


@dataclass(frozen=True, slots=True)
class Proof:
    """What the evidence of a run proves, or why nothing (`missing`); `comparison` is with the twin, if any."""

    flaws: tuple[Flaw, ...] = ()
    missing: str = ""
    comparison: ComparisonRecord | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the evidence is complete and fits together."""
        return not self.flaws and not self.missing


UNREAD = Proof(missing="only the records were read, not the files beside them")


@dataclass(frozen=True, slots=True)
class StepHashes:
    """The hashes that workers reported after a step, of layers and of their buffers; `clash` has contradictions."""

    states: dict[int, str] = field(default_factory=dict)
    buffers: dict[tuple[int, int], str] = field(default_factory=dict)
    clash: list[str] = field(default_factory=list)

    def add(self, audit: AuditRecord) -> None:
        """Adds the hashes of a worker."""
        for layer, state, buffers in audit.rows:
            same = self.states.setdefault(layer, state) == state
            if not (same and self.buffers.setdefault((layer, audit.pipeline), buffers) == buffers):
                self.clash.append(
                    f"step {audit.step}, layer {layer}: worker {audit.of} has another hash than a replica"
                )


@dataclass(frozen=True, slots=True)
class Computation:
    """The computation of a run, or of its twin, by its files: the rows of its trajectory in the order of steps.

    `folder` is the beginning of its paths. `losses` has other sources of the losses, by name: each returns that of a
    step. `hashes` returns those that workers reported after a step, None if they were left out or are elsewhere.
    """

    folder: str
    rows: Iterable[TrajectoryRow]
    losses: Mapping[str, Callable[[int], float | None]]
    num_layers: int = 0  # 0: unknown
    num_pipelines: int = 1
    hashes: Callable[[int], StepHashes | None] = lambda step: None
    is_alone: bool = True  # its folder has the hashes of all workers


def proved(
    history: RunHistory, run: Computation | None, twin: Computation | None, of_files: Iterable[Flaw], missing: str
) -> Proof:
    """Returns the proof of the evidence of `run` and `twin`, if any; `missing` says why there is no proof.

    `of_files` are the flaws of the files.
    """
    flaws = [*of_files, *_of_records(history)]
    record = history.first(ComparisonRecord)
    if run is None or twin is None:
        if record is not None or history.of(TwinRecord):
            missing = missing or f"there is no trajectory {'of the run' if run is None else 'of the twin'}"
        return Proof(tuple(flaws[:_MOST_FLAWS]), missing)
    comparison = compare_steps(_checked(run, flaws), _checked(twin, flaws), history)
    if record is not None:
        flaws += _contradictions(record, comparison)
        if record.difference is not None and comparison.difference is not None:  # it knows the tensor, too
            comparison = replace(comparison, difference=record.difference)
    elif not flaws:
        missing = missing or str(history.first(NotComparedRecord) or "the run has no verdict yet")
    return Proof(tuple(flaws[:_MOST_FLAWS]), missing, comparison)


def _contradictions(record: ComparisonRecord, comparison: ComparisonRecord) -> Iterator[Flaw]:
    """Yields where the record of the comparison contradicts the comparison of the hashes."""
    ours, its = ((each.compared, each.steps, each.last_step) for each in (comparison, record))
    if ours != its:
        text = f"{its[0]} of {its[1]} steps compared, up to step {its[2]}; the hashes are of {ours[0]} of {ours[1]}"
        yield Flaw(EVENTS, f"the comparison reports {text}, up to step {ours[2]}")
    mine, recorded = comparison.difference, record.difference
    steps = [None if each is None else each.step for each in (mine, recorded)]
    if mine is not None and recorded is not None and mine.part == recorded.part:
        if replace(recorded, tensor="") != mine:
            yield Flaw(EVENTS, f"the comparison reports {recorded}; the hashes show {mine}")
    elif steps[0] != steps[1]:
        first, second = ("no difference" if each is None else f"a difference in step {each}" for each in steps)
        yield Flaw(EVENTS, f"the comparison reports {second}, and the hashes have {first}")


def _of_records(history: RunHistory) -> Iterator[Flaw]:
    """Yields each contradiction between the records and the job, or another record."""
    steps = history.commits.steps
    firsts = {0, *(each.step + 1 for each in history.of(ResumedRecord))}
    for expected, step in enumerate(steps, start=steps[0] if steps and steps[0] in firsts else 0):
        if step != expected:
            yield Flaw(EVENTS, f"step {step} is committed where step {expected} comes next")
            break
    ended = history.training_ended
    if ended is not None and ended.outcome == "finished" and history.committed != history.num_steps - 1:
        yield Flaw(EVENTS, f"training has finished after step {history.committed}, of {history.job.steps} steps")
    if len(comparisons := history.of(ComparisonRecord)) > 1:
        yield Flaw(EVENTS, f"the run was compared {len(comparisons)} times")
    for late in history.behind(SealRecord):  # only a worker that was left behind may go on there
        if isinstance(late, StampedRecord) and late.worker == AGENT and not isinstance(late, _BEHIND_SEAL):
            yield Flaw(EVENTS, f"a record of {type(late).__name__.removesuffix('Record').lower()} follows the seal")
            break


def _checked(of: Computation, flaws: list[Flaw]) -> Iterator[Step]:
    """Yields the whole steps of a trajectory, and adds its contradictions to the flaws."""
    place, before = f"{of.folder}trajectory.csv", -1
    for step, rows in in_steps(of.rows):
        wrong = _wrong_step(of, step, rows, before)
        if wrong:
            flaws.append(Flaw(place, wrong))
            if len(flaws) >= _MOST_FLAWS:
                return
        before = max(before, step)
        if [row.layer for row in rows] == list(range(len(rows))):
            yield step, rows


def _wrong_step(of: Computation, step: int, rows: list[TrajectoryRow], before: int) -> str:
    """Returns in words the first mistake in the rows of a step; empty if there is none."""
    if step <= before:
        return f"step {step} comes after step {before}"
    if [row.layer for row in rows] != list(range(of.num_layers or len(rows))):
        return f"step {step} has not one row for each layer"
    for source, loss_of in of.losses.items():
        loss = loss_of(step)
        if repr(loss) != repr(rows[0].loss) or any(repr(row.loss) != repr(loss) for row in rows):
            other = "none" if loss is None else repr(loss)
            return f"step {step} has the loss {rows[0].loss!r}, and {source} has {other}"
    hashes = of.hashes(step)
    return _other_hashes(of, step, rows, hashes) if hashes is not None else ""


def _other_hashes(of: Computation, step: int, rows: list[TrajectoryRow], hashes: StepHashes) -> str:
    if hashes.clash:
        return f"{hashes.clash[0]}, in the files of hashes"
    for row in rows:
        place = f"step {step}, layer {row.layer}"
        if row.layer not in hashes.states:
            if of.is_alone:
                return f"{place}: no worker reported this hash"
            continue
        if hashes.states[row.layer] != row.state:
            return f"{place}: the workers reported another hash of the weights and optimizer state"
        buffers = [hashes.buffers.get((row.layer, each)) for each in range(of.num_pipelines)]
        whole = [each for each in buffers if each is not None]
        if len(whole) == len(buffers) and joined_buffers(whole) != row.buffers:
            return f"{place}: the workers reported another hash of the buffers"
    return ""
