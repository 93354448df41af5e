"""The trajectory of a run: hashes of its weights, one row per (step, layer); and the comparison of two.

Rules: a trajectory is a set of rows, so the order in which workers wrote them does not matter. Losses are compared by
their `repr`: it differs for any two floats, and nan equals nan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType

from engine.core.errors import Problem, ReplicasDifferError, UserError, ensure
from engine.core.history.process_records import DATA_PART, Difference
from engine.core.manifest import joined_buffers

MARK_DIGITS = 8
_HASH_DIGITS = 12  # of a hash in a message
_PARTS = ("weights or optimizer state", "buffers")

# The names of some tensors, and their marks, of `MARK_DIGITS` each; a mark hashes a tensor and all before it.
TensorMarks = tuple[tuple[str, ...], str]
NO_MARKS: TensorMarks = ((), "")


@dataclass(frozen=True, slots=True)
class TrajectoryRow:
    """One layer after one step: SHA-256 (hex) of weights and optimizer state, of buffers, and the step's loss.

    The marks of the tensors, and of the microbatches of the step (`data`), only explain a difference; files do not
    have them.
    """

    step: int
    layer: int
    state: str
    buffers: str
    loss: float | None
    marks: tuple[TensorMarks, TensorMarks] = field(default=(NO_MARKS, NO_MARKS), compare=False, repr=False)
    data: TensorMarks = field(default=NO_MARKS, compare=False, repr=False)

    def texts(self) -> tuple[str, ...]:
        """Returns the row as text in the order of `COLUMNS`; a missing loss is empty."""
        loss = "" if self.loss is None else repr(self.loss)
        return (str(self.step), str(self.layer), self.state, self.buffers, loss)


_Rows = dict[tuple[int, int], TrajectoryRow]  # by step and layer
COLUMNS = tuple(each.name for each in fields(TrajectoryRow) if each.compare)


def trajectory_hash(rows: Iterable[TrajectoryRow]) -> str:
    """Returns the SHA-256 (hex) over all rows, which may come in any order."""
    ordered = sorted(_by_key(rows).items())
    lines = "".join(",".join(row.texts()) + "\n" for _, row in ordered)
    return hashlib.sha256(lines.encode()).hexdigest()


def first_difference(run: Iterable[TrajectoryRow], twin: Iterable[TrajectoryRow]) -> Difference | None:
    """Returns the first difference between two trajectories, or None.

    In the first step that differs it is a microbatch, which explains all else; else the first layer; else the loss.
    """
    ours, theirs = _by_key(run), _by_key(twin)
    difference = _first_of_results(ours, theirs)
    return difference and (_of_data(difference.step, ours, theirs) or difference)


def _first_of_results(ours: _Rows, theirs: _Rows) -> Difference | None:
    loss: Difference | None = None
    for step, layer in sorted(ours.keys() | theirs.keys()):
        if loss is not None and step > loss.step:
            break
        mine, its = ours.get((step, layer)), theirs.get((step, layer))
        if mine is None or its is None:
            counts = ["none" if row is None else "one" for row in (mine, its)]
            return Difference(step, layer, "rows", "", *counts)
        parts = zip(_PARTS, (mine.state, mine.buffers), (its.state, its.buffers), mine.marks, its.marks, strict=True)
        for part, one, other, marks, its_marks in parts:
            if one != other:
                tensor, _, _ = _first_mark(marks, its_marks)
                return Difference(step, layer, part, tensor, one[:_HASH_DIGITS], other[:_HASH_DIGITS])
        if loss is None and repr(mine.loss) != repr(its.loss):
            loss = Difference(step, None, "loss", "", repr(mine.loss), repr(its.loss))
    return loss


def _of_data(step: int, ours: _Rows, theirs: _Rows) -> Difference | None:
    """Returns the first microbatch of a step that differs; None if the marks do not tell."""
    mine, its = (next((row.data for (at, _), row in rows.items() if at == step), NO_MARKS) for rows in (ours, theirs))
    microbatch, one, other = _first_mark(mine, its)
    return Difference(step, None, DATA_PART, microbatch, one, other) if microbatch else None


def _first_mark(mine: TensorMarks, its: TensorMarks) -> tuple[str, str, str]:
    """Returns the name of the first tensor that differs and its two marks, or empty texts if the marks do not tell."""
    for number, name in enumerate(mine[0][: len(its[0])]):
        place = slice(number * MARK_DIGITS, (number + 1) * MARK_DIGITS)
        if mine[1][place] != its[1][place]:
            return name, mine[1][place], its[1][place]
    return "", "", ""


def _by_key(rows: Iterable[TrajectoryRow]) -> _Rows:
    by_key: _Rows = {}
    for row in rows:
        key = (row.step, row.layer)
        ensure(key not in by_key, f"two rows for step {row.step}, layer {row.layer}")
        by_key[key] = row
    return by_key


# The data that workers load: the same microbatch has the same bits, whichever worker loads it, and whenever.
#
# The first stage loads inputs and the last stage loads targets, independently. They belong together only if the source
# gives both the same microbatch. So each worker sends the mark of each whole microbatch with its vote, also if it loads
# the microbatch again in a recovery, and the marks are compared before the step is committed.
#
# Rule: the marks of a step stay until its commit, also those of workers that die before it.

LoadedMarks = Mapping[int, str]  # microbatch -> its mark: `MARK_DIGITS` of its inputs, then of its targets
SEE = "or give --no-check-pure; see docs/own-model.md"


def impure_data(source: str, difference: str) -> Problem:
    """Returns the problem of a source of data; `difference` says which microbatch differs, and how."""
    hint = (
        "inputs and targets would not belong together: give a data set that draws in __getitem__ as indexed(..., "
        "draws=True) (docs/data.md), draw in another source from keyed_generator(seed, step, pipeline, microbatch) of "
        f"engine.models.data, and keep no counter, iterator, file position or buffer between two calls, {SEE}"
    )
    return Problem("data", "a microbatch with the same bits whenever it is loaded", f"{source}: {difference}", hint)


def another(source: str, name: str, marks: tuple[str, str], how: str) -> Problem:
    """Returns the problem of a microbatch that has two different marks; `how` says between which loads."""
    one, other = marks
    places = {"inputs": slice(MARK_DIGITS), "targets": slice(MARK_DIGITS, None)}
    parts = " and ".join(part for part, place in places.items() if one[place] != other[place])
    return impure_data(source, f"the {parts} of {name} differ {how}")


def named(microbatch: int, pipeline: int, step: int) -> str:
    """Returns the name of a microbatch for messages."""
    return f"microbatch {microbatch} of pipeline {pipeline} in step {step}"


@dataclass(slots=True)
class LoadedBook:
    """The marks of one step at a time; `refuses` says whether a difference is an error."""

    source: str
    refuses: bool = True
    _known: dict[tuple[int, int], tuple[str, int]] = field(default_factory=dict)  # the first mark and its worker

    def add(self, step: int, worker: int, pipeline: int, marks: LoadedMarks) -> None:
        """Adds marks of a worker; raises UserError if another worker sent a different mark of a microbatch."""
        for microbatch, mark in marks.items():
            other, first = self._known.setdefault((pipeline, microbatch), (mark, worker))
            if other != mark and self.refuses:
                name, how = named(microbatch, pipeline, step), f"between worker {first} and worker {worker}"
                raise UserError([another(self.source, name, (other, mark), how)])

    def close(self) -> list[tuple[str, str]]:
        """Returns for each microbatch its name and a mark of it in `MARK_DIGITS`; begins the next step."""
        marks, self._known = self._known, {}
        half = MARK_DIGITS // 2
        return [
            (f"microbatch {microbatch} of pipeline {pipeline}", mark[:half] + mark[MARK_DIGITS:][:half])
            for (pipeline, microbatch), (mark, _) in sorted(marks.items())
        ]


# Purity: a layer makes the same bits from the same inputs, weights and buffers, in any copy and in any process.
#
# Rules: each value that a layer makes has a mark, a digest of its bits. The same value, recomputed, must have the same
# mark. A different mark is a mistake of the model's author: the state behind the difference is on no replica.

DigestByName = Mapping[str, str]  # name of a value, such as "output of microbatch 0" -> digest of its bits

INPUT = "input"  # the layer's input; if it differs, an earlier layer or the data is the cause
DATA = "data"  # the source of data, in place of a layer's name
EITHER = "Either may be the wrong one: a bit may have flipped in a memory or a processor"
ONCE = "a difference that the next start does not show may be a flipped bit of this machine"
OPTIMIZER = "optimizer "  # before the name of the optimizer, in place of a layer's name


def impure_layer(name: str, difference: str) -> Problem:
    """Returns the problem of a layer; `difference` says which value differs."""
    hint = (
        "no replica has what made the difference, so a failover would change the bits: keep state in buffers that "
        f"forwards alone change, draw from torch's default generator, {SEE}; {ONCE}"
    )
    return Problem("model", "layers that make the same bits again", f"{name}: {difference}", hint)


def impure_optimizer(name: str, difference: str) -> Problem:
    """Returns the problem of an optimizer; `difference` says which result differs, and when."""
    hint = (
        "no replica has what made the difference, so a failover would change the bits: keep all state in "
        "`self.state` by parameter, as tensors and numbers; draw no random numbers; look at one parameter alone; "
        f"--no-check-pure leaves out this check; {ONCE}"
    )
    return Problem("optimizer", "an optimizer that makes the same bits again", f"{name!r}: {difference}", hint)


def once_only(difference: str) -> ReplicasDifferError:
    """Returns the error of replicas that differ in one trial, and have the same bits in the next one."""
    return ReplicasDifferError(
        f"{difference}; a second trial gives both the same bits. {EITHER}; an optimizer that keeps something outside "
        "of `self.state` when it is first used would show the same"
    )


@dataclass(slots=True)
class PurityBook:
    """The marks of the layers that the workers have tried, and of the data that they have loaded from `source`."""

    source: str = ""
    # layer -> value -> the first worker that told it, and its mark
    _first: dict[str, dict[str, tuple[int, str]]] = field(default_factory=dict)

    def add(self, worker: int, rows: Iterable[tuple[str, DigestByName]]) -> None:
        """Adds a worker's marks of some layers; raises UserError if another worker has other marks for a layer."""
        problems = []
        for name, marks in rows:
            makers = self._first.setdefault(name, {})
            first = {value: makers.setdefault(value, (worker, mark)) for value, mark in marks.items()}
            differing = (value for value, mark in marks.items() if first[value][1] != mark)
            if (value := next(differing, INPUT)) != INPUT:
                teller, mark = first[value]
                how = f"between worker {teller} and worker {worker}"
                if name.startswith(OPTIMIZER):
                    problems.append(impure_optimizer(name.removeprefix(OPTIMIZER), f"its {value} differs {how}"))
                elif name == DATA:
                    problems.append(another(self.source, value, (mark, marks[value]), how))
                else:
                    problems.append(impure_layer(name, f"its {value} differs {how}"))
        if problems:
            raise UserError(problems)


# The audit of a step: compares the hashes that replicas report, and makes rows of the trajectory of them.
#
# Rules: all replicas of a layer have the same weights and optimizer state, in every pipeline. Replicas in the same
# pipeline have the same buffers too. A worker that reports a layer twice must report the same hash.

AuditMarks = Sequence[Sequence[str]]  # (name, digest of this tensor and all before it) of each tensor
LayerHashes = Mapping[int, tuple[str, str]]  # layer -> (weights and optimizer state, buffers)
LayerMarks = Mapping[int, tuple[AuditMarks, AuditMarks]]  # the same, of each tensor
_Report = tuple[str, str, AuditMarks]  # hash, reporter, marks


@dataclass(slots=True)
class AuditBook:
    """Collects the hashes of one step at a time; a step is complete with every layer of every pipeline."""

    num_layers: int
    num_pipelines: int
    _states: dict[int, _Report] = field(default_factory=dict)  # by layer
    _buffers: dict[tuple[int, int], _Report] = field(default_factory=dict)  # by layer and pipeline
    _is_disputed: bool = False
    _names: dict[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)  # one copy for all steps

    def add(
        self, step: int, worker: int, pipeline: int, hashes: LayerHashes, marks: LayerMarks = MappingProxyType({})
    ) -> None:
        """Adds the hashes of layers of a worker's replica in one pipeline, and the marks of their tensors.

        Raises ReplicasDifferError when they differ from another replica's, with the tensor if marks show it; then
        `close` returns no rows.
        """
        reporter = f"worker {worker} in pipeline {pipeline}"
        try:
            for layer, (state, buffers) in hashes.items():
                of_state, of_buffers = marks.get(layer, ((), ()))
                report: _Report = (state, reporter, of_state)
                _compare(step, f"layer {layer}", self._states.setdefault(layer, report), report)
                report = (buffers, reporter, of_buffers)
                earlier = self._buffers.setdefault((layer, pipeline), report)
                _compare(step, f"a buffer of layer {layer}", earlier, report)
        except ReplicasDifferError:
            self._is_disputed = True
            raise

    def close(self, step: int, loss: float, data: AuditMarks = ()) -> list[TrajectoryRow]:
        """Returns the rows of `step` with its data's marks, none without a complete audit; begins the next one."""
        states, buffers, self._states, self._buffers = self._states, self._buffers, {}, {}
        if self._is_disputed or len(buffers) < self.num_layers * self.num_pipelines:
            return []
        rows, of_data = [], self._marks(data)
        for layer in range(self.num_layers):
            of_buffers = [buffers[layer, pipeline] for pipeline in range(self.num_pipelines)]
            joined = joined_buffers([report[0] for report in of_buffers])
            state, _, of_state = states[layer]
            marks = (self._marks(of_state), self._marks(of_buffers[0][2]))  # of the first pipeline
            rows.append(TrajectoryRow(step, layer, state, joined, loss, marks, of_data))
        return rows

    def _marks(self, of_tensors: AuditMarks) -> TensorMarks:
        """Returns marks in little memory: a run has some for each step, and a commit waits for them."""
        if not of_tensors:
            return NO_MARKS
        names, marks = zip(*of_tensors, strict=True)
        return self._names.setdefault(names, names), "".join(marks)


def _compare(step: int, part: str, one: _Report, other: _Report) -> None:
    if one[0] != other[0]:
        pairs = zip(one[2], other[2], strict=False)
        tensor = next((f", tensor {mine[0]}," for mine, its in pairs if list(mine) != list(its)), "")
        raise ReplicasDifferError(
            f"step {step}: {part}{tensor} differs between {one[1]} and {other[1]}: {one[0][:12]} and {other[0][:12]}. "
            f"{EITHER}, or bamboo has a bug"
        )
