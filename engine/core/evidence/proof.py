"""The verdict on the weights of a run: computed of the hashes, losses and records that are there, each time it is told.

Rules: a flaw is a place where the evidence contradicts itself, and a run with one is neither identical nor different.
Evidence that is missing proves nothing: then the weights are not verified. The record of the comparison is one more
fact that must fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from engine.core.checkpoints.part_file import joined_buffers
from engine.core.checks.trajectory import TrajectoryRow
from engine.core.checks.twin import Step, compare_steps, in_steps, twin_of
from engine.core.evidence.seal import EVENTS
from engine.core.history.process_records import EndedRecord, ResumedRecord
from engine.core.history.record import AGENT, StampedRecord
from engine.core.history.run_history import RunHistory
from engine.core.history.run_records import AuditRecord
from engine.core.history.verdict_records import (
    CheckRecord,
    ComparisonRecord,
    NotComparedRecord,
    SealRecord,
    TwinRecord,
    VerdictRecord,
)

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
    """The proof that the evidence of a run makes; `missing` says in words why it proves nothing, or is empty.

    `comparison` is the comparison with the twin as computed now; None of a run that has none.
    """

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
    """The hashes that workers told after a step: of layers, of their buffers in each pipeline; `clash` contradicts."""

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
class Computed:
    """The computation of a run, or of its twin, as files tell it: the rows of its trajectory in the order of steps.

    `folder` is the beginning of its paths. `losses` are told beside the rows, each way by step. `hashes` returns those
    that workers told after a step, None if they were left out, or are not in this folder.
    """

    folder: str
    rows: Iterable[TrajectoryRow]
    losses: Mapping[str, Callable[[int], float | None]]
    num_layers: int = 0  # 0: unknown
    num_pipelines: int = 1
    hashes: Callable[[int], StepHashes | None] = lambda step: None
    is_alone: bool = True  # its folder has the hashes of all workers


def proved(
    history: RunHistory, run: Computed | None, twin: Computed | None, found: Iterable[Flaw], missing: str
) -> Proof:
    """Returns the proof of the evidence: `run` and `twin` are None if there is none, `found` are flaws of its files.

    `missing` says why the files prove nothing, or is empty.
    """
    flaws = [*found, *_of_records(history)]
    told = history.first(ComparisonRecord)
    if run is None or twin is None:
        if told is not None or history.of(TwinRecord):
            missing = missing or f"there is no trajectory {'of the run' if run is None else 'of the twin'}"
        return Proof(tuple(flaws[:_MOST_FLAWS]), missing)
    comparison = compare_steps(_checked(run, flaws), _checked(twin, flaws), history)
    if told is not None:
        flaws += _other_words(told, comparison)
        if told.difference is not None and comparison.difference is not None:  # it knows the tensor, too
            comparison = replace(comparison, difference=told.difference)
    elif not flaws:
        missing = missing or str(history.first(NotComparedRecord) or "the run has no verdict yet")
    return Proof(tuple(flaws[:_MOST_FLAWS]), missing, comparison)


def _other_words(told: ComparisonRecord, found: ComparisonRecord) -> Iterator[Flaw]:
    """Yields that the record of the comparison tells of another one than the hashes."""
    ours, its = ((each.compared, each.steps, each.last_step) for each in (found, told))
    if ours != its:
        text = f"{its[0]} of {its[1]} steps compared, up to step {its[2]}; the hashes are of {ours[0]} of {ours[1]}"
        yield Flaw(EVENTS, f"the comparison tells of {text}, up to step {ours[2]}")
    steps = [None if each.difference is None else each.difference.step for each in (found, told)]
    if found.difference is not None and told.difference is not None and found.difference.part == told.difference.part:
        if replace(told.difference, tensor="") != found.difference:
            yield Flaw(EVENTS, f"the comparison tells of {told.difference}; the hashes tell of {found.difference}")
    elif steps[0] != steps[1]:
        first, second = ("no difference" if each is None else f"a difference in step {each}" for each in steps)
        yield Flaw(EVENTS, f"the comparison tells of {second}, and the hashes have {first}")


def _of_records(history: RunHistory) -> Iterator[Flaw]:
    """Yields each contradiction between the records and the job, or another record."""
    steps = history.commits.steps
    firsts = {0, *(each.step + 1 for each in history.of(ResumedRecord))}
    for expected, step in enumerate(steps, start=steps[0] if steps and steps[0] in firsts else 0):
        if step != expected:
            yield Flaw(EVENTS, f"step {step} is committed where step {expected} comes next")
            break
    ended = history.training_ended
    if ended is not None and ended.outcome == "finished" and history.committed != history.job.steps - 1:
        yield Flaw(EVENTS, f"training has finished after step {history.committed}, of {history.job.steps} steps")
    if len(told := history.of(ComparisonRecord)) > 1:
        yield Flaw(EVENTS, f"the run was compared {len(told)} times")
    if (late := next(_late(history), None)) is not None:
        yield Flaw(EVENTS, f"a record of {type(late).__name__.removesuffix('Record').lower()} follows the seal")


def _late(history: RunHistory) -> Iterator[StampedRecord]:
    """Yields the records behind the seal that no launcher writes there; a worker that was left behind may go on."""
    for each in history.behind(SealRecord):
        if isinstance(each, StampedRecord) and each.worker == AGENT and not isinstance(each, _BEHIND_SEAL):
            yield each


def _checked(of: Computed, flaws: list[Flaw]) -> Iterator[Step]:
    """Yields the steps of a trajectory that are whole, and adds all that contradicts it to the flaws."""
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


def _wrong_step(of: Computed, step: int, rows: list[TrajectoryRow], before: int) -> str:
    """Returns in words the first mistake in the rows of a step; empty if there is none."""
    if step <= before:
        return f"step {step} stands behind step {before}"
    if [row.layer for row in rows] != list(range(of.num_layers or len(rows))):
        return f"step {step} has not one row for each layer"
    for told, loss_of in of.losses.items():
        loss = loss_of(step)
        if repr(loss) != repr(rows[0].loss) or any(repr(row.loss) != repr(loss) for row in rows):
            return f"step {step} has the loss {rows[0].loss!r}, and {told} has {'none' if loss is None else repr(loss)}"
    hashes = of.hashes(step)
    return _other_hashes(of, step, rows, hashes) if hashes is not None else ""


def _other_hashes(of: Computed, step: int, rows: list[TrajectoryRow], told: StepHashes) -> str:
    if told.clash:
        return f"{told.clash[0]}, in the files of hashes"
    for row in rows:
        place = f"step {step}, layer {row.layer}"
        if row.layer not in told.states:
            if of.is_alone:
                return f"{place}: no worker has told this hash"
            continue
        if told.states[row.layer] != row.state:
            return f"{place}: the workers have told another hash of the weights and optimizer state"
        buffers = [told.buffers.get((row.layer, each)) for each in range(of.num_pipelines)]
        whole = [each for each in buffers if each is not None]
        if len(whole) == len(buffers) and joined_buffers(whole) != row.buffers:
            return f"{place}: the workers have told another hash of the buffers"
    return ""


def is_twin_of(history: RunHistory, twin: RunHistory) -> bool:
    """Whether the job of a twin is that of the twin of a run."""
    return twin_of(history.job) == twin_of(twin.job)
