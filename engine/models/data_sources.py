"""The data of a user as microbatches: data sets by index, columns, validation sets, and the count of samples."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from engine.core.errors import BambooError, Problem, UserError, required
from engine.core.job.hugging_face import DATASET, TEXT
from engine.core.job.job import Job
from engine.core.job.samples import EvaluationPart, EvaluationSets, first_position, sample_at, shares
from engine.core.random_key import random_key
from engine.core.texts import counted
from engine.models.data import ONLY, Columns, Data, DataFacts, DataSets, MapStyle, SplitBatches, WholeBatches, indexed
from engine.models.layers import Batch, Tensors
from engine.models.losses import shapes_of
from engine.models.model_registry import data_factory, data_problems, is_own, name_problems
from engine.models.streams import StreamPosition, StreamReader, set_streams
from engine.models.token_limits import TokenLimits, row_problem, set_problem
from engine.models.user_code import RAISED, exception_of, running
from engine.models.user_factory import import_factory, made_by, wrong_factory

# Samples and microbatches that are mappings of columns, such as ``{"input_ids": ..., "labels": ...}``.
#
# Rules: the target is the first of `TARGETS` that is there. A column that has no numbers, such as a text, is left out.
# The other columns are the inputs, and the first layer takes them by name (`engine.models.data.Columns`).

_MOST_TRIED = 64  # microbatches, of which the largest is taken
TARGETS = ("labels", "label", "targets", "target", "y")


def collate_columns(samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Returns the columns of samples, stacked; raises ValueError for a column whose rows have several shapes."""
    first = {name: tensor for name, value in samples[0].items() if (tensor := _tensor(value)) is not None}
    return {name: _stacked(name, [torch.as_tensor(each[name]) for each in samples]) for name in first}


def batch_of(columns: Mapping[str, Any]) -> tuple[Columns, Batch]:
    """Returns a microbatch of columns, and the names of its inputs; raises TypeError without a target."""
    tensors = {name: value for name, value in columns.items() if isinstance(value, Tensor)}
    target = next((name for name in TARGETS if name in tensors), None)
    if target is None or len(tensors) < 2:
        expected = f"a column of targets ({', '.join(TARGETS)}) and one of inputs"
        names = ", ".join(tensors) or "no column of numbers"
        raise TypeError(f"the data: expected {expected}, found {names}; a collate function can name them")
    return Columns(tuple(tensors), target), Batch(tuple(tensors.values()), (tensors[target],))


def named_inputs(inputs: Mapping[str, Any], targets: tuple[Tensor, ...]) -> tuple[Columns, Batch]:
    """Returns a microbatch of named inputs beside its targets."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    return Columns(tuple(tensors), ""), Batch(tuple(tensors.values()), targets)


def _tensor(value: Any) -> Tensor | None:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _stacked(name: str, rows: Sequence[Tensor]) -> Tensor:
    other = next((each for each in rows if each.shape != rows[0].shape), None)
    if other is not None:
        shapes = f"{list(rows[0].shape)} and {list(other.shape)}"
        raise ValueError(f"the column {name!r} has rows of several shapes, {shapes}; a collate function can pad them")
    return torch.stack(list(rows))


# The evaluation sets of a data source, each with its name and its number of samples.
#
# A source that has no sets of its own has one without limit, its `validation`.


def evaluation_sets(data: Data) -> EvaluationSets:
    """Returns the number of samples of each evaluation set by its name; 0 for a set without limit."""
    sets: EvaluationSets = getattr(data, "evaluation_sets", {ONLY: 0})
    return sets


def evaluation(data: Data, name: str, index: int, size: int) -> Batch:
    """Returns microbatch `index` of an evaluation set; one at the end of the set continues at its beginning."""
    load = getattr(data, "evaluation", None)
    batch: Batch = data.validation(index, size) if load is None else load(name, index, size)
    return batch


# The data sets that a factory may return as they are: one, a pair, or several by name.
#
# The training set may be a stream: an iterable without numbers.
#
# training                                    no evaluation: a validation pass has nothing to do
# (training, evaluation)                      the name of the second one is validation
# {"train": ..., "validation": ..., ...}      each but the first is an evaluation set, by its name

TRAINING = "training"
_TRAINING = ("train", TRAINING)


def given_sets(returned: Any) -> DataSets | None:
    """Returns the source of the data sets that a factory returned; None for any other object."""
    if isinstance(returned, Mapping):
        training = next((name for name in _TRAINING if name in returned), None)
        others = {str(name): _formatted(each) for name, each in returned.items() if name != training}
        return _sets(returned[training], others) if training is not None else None
    if isinstance(returned, tuple):
        return _sets(returned[0], {ONLY: _formatted(returned[1])}) if len(returned) == 2 else None
    return _sets(returned, {})


def _sets(training: Any, others: Mapping[str, Any]) -> DataSets | None:
    if not all(map(_is_map_style, others.values())) or not (_is_stream(training) or _is_map_style(training)):
        return None
    if _is_stream(training):
        return DataSets(_formatted(training), others, None, None, None, draws=False)
    return indexed(_formatted(training), others)


def why_not(returned: Any) -> str:
    """Returns the way out for an object that is no data set, in words; empty if there is none."""
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], Tensor):
        return "return torch.utils.data.TensorDataset(inputs, targets)"
    if isinstance(returned, Mapping):
        return f"the set to train on is called {_TRAINING[0]!r}; found {', '.join(map(str, returned)) or 'no set'}"
    return ""


def _is_map_style(samples: Any) -> bool:
    is_other = isinstance(samples, str | bytes | Mapping | tuple | IterableDataset | Tensor)
    return not is_other and hasattr(samples, "__len__") and hasattr(samples, "__getitem__")


def _is_stream(samples: Any) -> bool:
    """Returns whether samples come in an order of their own, without numbers."""
    is_other = isinstance(samples, str | bytes | Mapping | tuple | set | frozenset | Tensor | torch.nn.Module)
    return not is_other and hasattr(samples, "__iter__") and not _is_map_style(samples)


def _formatted(samples: Any) -> Any:
    """Returns a set whose columns are tensors, if it can do that itself, as those of the package datasets."""
    form = getattr(samples, "format", None)
    has_none = not isinstance(form, Mapping) or form.get("type") is None
    return samples.with_format("torch") if hasattr(samples, "with_format") and has_none else samples


# The rows of a microbatch that count: the last one of an evaluation set may have fewer samples than rows.
#
# Its other rows are filled with samples from the beginning of the set, which the first microbatch has too. So the rows
# of these samples show whether dimension 0 is the sample: outputs may have as many rows for another reason, as time.

_NEAR, _NEAR_NARROW = 1e-2, 5e-2  # of the largest; a kernel may round the rows of a matrix in other ways
_EXPECTED = "outputs and targets with one row per sample"


class EvaluatedBatch(NamedTuple):
    """The outputs and targets of an evaluation microbatch."""

    outputs: Tensors
    targets: Tensors

    def first(self, part: EvaluationPart, size: int, begin: EvaluatedBatch, *, is_narrow: bool) -> EvaluatedBatch:
        """Returns the samples of a part that count, of `size`; raises UserError if rows are no samples."""
        for name, ours, theirs in zip(self._fields, self, begin, strict=True):
            near = _NEAR_NARROW if is_narrow else _NEAR
            for number, (tensor, of_begin) in enumerate(zip(ours, theirs, strict=True)):
                if why := _why_no_samples(tensor, of_begin, size, part.rows, near if name == "outputs" else 0.0):
                    raise _refusal(part, f"{name}[{number}] {shapes_of((tensor,))}, {why}")
        return EvaluatedBatch(*(tuple(each[: part.rows] for each in tensors) for tensors in self))


def _why_no_samples(last: Tensor, begin: Tensor, size: int, rows: int, near: float) -> str:
    """Returns why dimension 0 is not the sample, in words; empty if it is."""
    if not last.dim() or last.shape != begin.shape or last.shape[0] != size:
        return f"which has not {size} rows"
    again, before = last[rows:], begin[: size - rows]
    return "" if _are_near(again, before, near) else f"whose row {rows} is not that of the same sample elsewhere"


def _are_near(one: Tensor, other: Tensor, near: float) -> bool:
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    wide = torch.complex128 if one.is_complex() else torch.float64
    one, other = one.to(wide), other.to(wide)
    finite = other.abs()[other.abs().isfinite()]
    return torch.allclose(one, other, near, near * float(finite.max() if finite.numel() else 0.0), equal_nan=True)


def _refusal(part: EvaluationPart, tensor: str) -> UserError:
    hint = "a smaller microbatch_size"
    if part.number:
        hint = f"--validation-microbatches {part.number} measures whole microbatches only"
    where = f"in the last microbatch of the evaluation set {part.name}, of {part.rows} samples"
    return UserError([Problem("validation_microbatches", _EXPECTED, f"{tensor}, {where}", hint)])


# The facts of a data set, as far as its first microbatch shows them; a size that it does not show is 0.
def seen_facts(batch: Batch, form: Columns | None, training: Any) -> DataFacts:
    """Returns the facts of a microbatch of a training set.

    Float targets are values to regress. Whole-number targets are the next tokens if they have the shape of the inputs,
    else classes; their number comes from `classes` or `features` of the set, as torchvision's and datasets' sets have.
    """
    inputs = batch.inputs[0]
    if form is not None:
        columns = zip(form.names, batch.inputs, strict=True)
        inputs = next((tensor for name, tensor in columns if name != form.target), inputs)
    target = batch.targets[0]
    features = inputs.shape[1] if inputs.dim() == 2 else 0
    if target.is_floating_point():
        return DataFacts(task="regress", features=features, outputs=target[0].numel(), form=form)
    if target.shape == inputs.shape and not inputs.is_floating_point():
        return DataFacts(task="causal", sequence=features, form=form)
    channels, height, width = inputs.shape[1:] if inputs.dim() == 4 else (0, 0, 0)
    return DataFacts(
        task="classify",
        num_classes=_num_classes(training, form),
        channels=channels,
        height=height,
        width=width,
        features=features,
        form=form,
    )


def _num_classes(training: Any, form: Columns | None) -> int:
    """Returns the number of classes that a data set names, 0 if it names none."""
    features = getattr(training, "features", None)
    column = features.get(form.target) if isinstance(features, Mapping) and form is not None else None
    count = getattr(column, "num_classes", None)
    classes = getattr(training, "classes", None)
    if isinstance(count, int):
        return count
    return len(classes) if isinstance(classes, list | tuple) else 0


# The microbatches of a finite data set: samples by the ledger, collated.
class IndexedData:
    """The microbatches of a finite data set for one job; `num_samples` are in its training set."""

    def __init__(self, source: DataSets, job: Job):
        self.num_samples = 0 if _is_stream(source.training) else len(source.training)
        self.evaluation_sets = {name: len(each) for name, each in source.evaluations.items()}
        self._source, self._job = source, job
        self._seed = job.seed if source.seed is None else source.seed
        self._collate = import_factory("collate", job.collate) if job.collate else source.collate
        if source.facts is None or self._collate is not None or isinstance(self._training_sample(0, 0), Mapping):
            form, batch = self._formed_at(0, job.microbatch_size)
            facts = source.facts or seen_facts(batch, form, source.training)
            self.facts = replace(facts, form=form)
        else:
            self.facts = source.facts

    def microbatch(self, step: int, pipeline: int, microbatch: int, size: int) -> Batch:
        """Returns the next `size` training samples of the row of all samples of a run."""
        return self._checked(*self._formed_at(first_position(self._job, step, pipeline, microbatch), size))

    def samples_of(self, step: int, pipeline: int, microbatch: int) -> list[int]:
        """Returns the numbers of the samples of a microbatch in the training set."""
        places = self._places(first_position(self._job, step, pipeline, microbatch), self._job.microbatch_size)
        return [sample_at(*at, self.num_samples, self._seed) for at in places]

    def rows(self) -> dict[str, MapStyle]:
        """Returns the sets by name whose samples can be read at any time: those that do not draw or are no streams."""
        training = {} if self._source.draws or not self.num_samples else {TRAINING: self._source.training}
        return {**training, **self._source.evaluations}

    def validation(self, index: int, size: int) -> Batch:
        """Returns the next `size` samples of the first evaluation set."""
        return self.evaluation(next(iter(self.evaluation_sets)), index, size)

    def evaluation(self, name: str, index: int, size: int) -> Batch:
        """Returns the next `size` samples of an evaluation set, or of the training set, in its order, cyclically."""
        if (samples := self.rows().get(name)) is None:
            raise UserError([Problem("--samples", "samples that do not depend on draws", repr(name))])
        numbers = (number % len(samples) for number in range(index * size, (index + 1) * size))
        return self._checked(*self._formed([samples[number] for number in numbers]))

    def _formed_at(self, position: int, size: int) -> tuple[Columns | None, Batch]:
        return self._formed([self._training_sample(*at) for at in self._places(position, size)])

    def _places(self, position: int, size: int) -> Iterator[tuple[int, int]]:
        for share in shares(position, size, self.num_samples):
            for place in range(share.first, share.first + share.length):
                yield share.data_epoch, place

    def _training_sample(self, data_epoch: int, place: int) -> Any:
        source = self._source
        number = sample_at(data_epoch, place, self.num_samples, self._seed)
        if source.draws:
            # The streams are not set back: a source that touches them is never read ahead, in another thread.
            set_streams(random_key(self._seed, "sample", data_epoch, number))
        return source.training[number]

    def _checked(self, form: Columns | None, batch: Batch) -> Batch:
        if form != self.facts.form:
            raise ValueError(f"collate: expected the same columns in every microbatch, found {form}")
        return batch

    def _formed(self, samples: list[Any]) -> tuple[Columns | None, Batch]:
        """Returns the microbatch of some samples, and the names of its inputs if they have names."""
        usual = collate_columns if isinstance(samples[0], Mapping) else default_collate
        return self._form_of((self._collate or usual)(samples))

    def _form_of(self, sample: Any) -> tuple[Columns | None, Batch]:
        if isinstance(sample, Batch):
            return None, sample
        if isinstance(sample, Mapping):
            return batch_of(sample)
        if not isinstance(sample, Sequence) or len(sample) != 2:
            expected = "a pair of inputs and targets, a mapping of columns or a Batch"
            raise TypeError(f"collate: expected {expected}, found {type(sample).__name__}")
        inputs, targets = sample
        if isinstance(inputs, Mapping):
            return named_inputs(inputs, _tensors(targets, "targets"))
        return None, Batch(_tensors(inputs, "inputs"), _tensors(targets, "targets"))


class StreamData(IndexedData):
    """The microbatches of an iterable data set, whose items are samples or whole batches; `begin` restarts it."""

    def __init__(self, source: DataSets, job: Job, begin: Callable[[], Iterable[Any]]):
        self._reader = StreamReader(begin, job.seed)
        (first,) = self._reader.items(0, 1)
        self._reader.state()  # that no checkpoint can keep is refused at the start
        self._is_whole = isinstance(first, Batch) or isinstance(source.training, DataLoader)
        if self._is_whole and job.collate:
            hint = "this stream has whole microbatches"
            raise UserError([Problem("collate", "a data set of samples", repr(job.data), hint)])
        batch_size = getattr(source.training, "batch_size", None) if self._is_whole else None
        if batch_size not in (None, job.microbatch_size):
            expected, hint = f"{batch_size}, the batch_size of the DataLoader", "or let the factory return its data set"
            raise UserError([Problem("microbatch_size", expected, str(job.microbatch_size), hint)])
        super().__init__(source, job)

    def microbatch(self, step: int, pipeline: int, microbatch: int, size: int) -> Batch:
        """Returns the next items of the stream; those that no replay can ask for any more are forgotten."""
        self._reader.forget(self._place(step - 1) if step else 0)
        return self._checked(*self._formed_at(self._place(step, pipeline, microbatch), size))

    def samples_of(self, step: int, pipeline: int, microbatch: int) -> list[int]:
        """Returns no numbers: the samples of a stream have none."""
        return []

    def begin_at(self, text: str) -> None:
        """Goes on from the position that a checkpoint has kept, whatever the size of a step was then."""
        self._reader.begin_at(StreamPosition.of_text(text))

    def follow(self, step: int) -> None:
        """Reads on to the end of a step that is committed, so that this worker can take over the next one."""
        self._reader.forget(self._place(step))
        self._reader.items(self._place(step + 1), 0)

    def position_after(self, step: int) -> str:
        """Returns the position behind a step, as a checkpoint keeps it."""
        return self._reader.position(step + 1, self._place(step + 1)).text()

    def _place(self, step: int, pipeline: int = 0, microbatch: int = 0) -> int:
        job, start = self._job, self._reader.start
        start = start if step >= start.step else StreamPosition()
        number = first_position(job, step - start.step, pipeline, microbatch) // job.microbatch_size
        return start.items + number * (1 if self._is_whole else job.microbatch_size)

    def _formed_at(self, position: int, size: int) -> tuple[Columns | None, Batch]:
        items = self._reader.items(position, 1 if self._is_whole else size)
        return self._form_of(items[0]) if self._is_whole else self._formed(items)


def bound(source: Data | DataSets, job: Job, begin: Callable[[], Iterable[Any]] | None = None) -> Data:
    """Returns a job's data, whose stream `begin` starts; raises UserError for an unusable collate function."""
    if isinstance(source, DataSets) and _is_stream(source.training):
        return StreamData(source, job, required(begin, "a stream comes from a factory"))
    if isinstance(source, DataSets):
        return IndexedData(source, job)
    if job.collate:
        raise UserError([Problem("collate", "a data set of samples", repr(job.data), "this source makes microbatches")])
    return source


def num_samples(data: Data) -> int:
    """Returns the number of samples in the training set of a source; 0 for one without limit."""
    return int(getattr(data, "num_samples", 0))


def largest(job: Job, data: Data) -> tuple[int, int, int]:
    """Returns the place of the microbatch to try layers with: the first, or with variable shapes the largest."""
    if not job.variable_shapes:
        return 0, 0, 0
    if named := getattr(data, "largest", None):
        step, pipeline, microbatch = named
        return step, pipeline, microbatch
    size, count = job.microbatch_size, min(_MOST_TRIED, job.pipelines * job.microbatches)
    first = [(0, *divmod(number, job.microbatches)) for number in range(count)]
    sizes = [sum(each.nbytes for each in data.microbatch(*at, size).inputs) for at in first]
    return first[sizes.index(max(sizes))]


def samples_of(data: Data, step: int, pipeline: int, microbatch: int) -> list[int]:
    """Returns the numbers of the samples of a microbatch in the training set; none for a source without limit."""
    named = getattr(data, "samples_of", None)
    return list(named(step, pipeline, microbatch)) if named else []


def _tensors(part: Any, name: str) -> Tensors:
    tensors = tuple(part) if isinstance(part, list | tuple) else (part,)
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"collate: expected tensors in the {name}, found {type(tensor).__name__}")
    return tensors


# A user's data, named ``package.module:factory``: the source that a factory returns; checks of its microbatches.
def user_data(job: Job) -> Data:
    """Returns the data of a factory, called with `job.data_args` and the seed, or of that name; raises UserError."""

    def make() -> Any:
        with torch.random.fork_rng(devices=[]):
            return made_by("data", job.data, {"seed": job.seed, **job.data_args}, random_key(job.seed, "data"))

    def begin() -> Iterable[Any]:
        again = given_sets(make())
        return cast(Iterable[Any], required(again, "a factory returns the same each time").training)

    returned = make()
    with running("the data"):
        is_whole = isinstance(returned, Data | WholeBatches | DataSets)
        source = bound(returned if is_whole else given_sets(returned) or returned, job, begin)
    if isinstance(source, Data) and isinstance(source.facts, DataFacts):
        return OwnData(source, job)
    if isinstance(source, WholeBatches) and isinstance(source.facts, DataFacts):
        with running("the data", type(source).batch):
            return OwnData(SplitBatches(source, job), job)
    expected = (
        "a factory that returns a data set with __len__ and __getitem__, several of them by name, an object with facts "
        "(DataFacts), microbatch() and validation(), or one with facts, spec, batch() and validation_batch()"
    )
    lacks = f": {why}" if (why := why_not(source)) else _lacks(source)
    raise wrong_factory("data", job.data, expected, f"it returned {type(source).__name__}{lacks}")


def _lacks(source: object) -> str:
    """Returns the parts that an object lacks to be a data source, in words that follow its type."""
    if not isinstance(getattr(source, "facts", None), DataFacts):
        facts = f", whose facts are a {type(source.facts).__name__}" if hasattr(source, "facts") else " without facts"
        return f"{facts}: facts = DataFacts(task=...)"
    parts = ("spec", "batch", "validation_batch") if hasattr(source, "batch") else ("microbatch", "validation")
    missing = [name if name == "spec" else f"{name}()" for name in parts if not hasattr(source, name)]
    return f" without {' and '.join(missing)}" if missing else ""


class OwnData:
    """A user's data source; an exception in it, or a microbatch of another size or shape, names the data."""

    def __init__(self, source: Data, job: Job):
        self.facts = source.facts
        self._is_variable = job.variable_shapes
        self.num_samples = num_samples(source)
        self.samples_of = partial(samples_of, source)
        self.evaluation_sets = evaluation_sets(source)
        self.largest = getattr(source, "largest", None)
        self.stream = source if isinstance(source, StreamData) else None
        self._source = source
        self._is_text = job.data in (TEXT, DATASET)
        self._limits: TokenLimits = {}
        self._kinds: dict[tuple[str, int], tuple[str, str]] = {}  # the dtypes and shapes of the first batch

    def limit_rows(self, limits: TokenLimits) -> None:
        """Refuses rows of tokens beyond some limits from now on; raises UserError for those of a finite set."""
        self._limits = limits
        hint = f"--set data_args.length={limits['input_ids'].length}" if self._is_text else ""
        with running("the data"):
            sets = self._source.rows() if isinstance(self._source, IndexedData) else {}
            if problem := set_problem(sets, limits, hint):
                raise UserError([problem])

    def microbatch(self, step: int, pipeline: int, microbatch: int, size: int) -> Batch:
        """Returns `size` training samples; raises TypeError if it is no Batch, ValueError for wrong rows or shapes."""
        with running("the data", self._source.microbatch):
            batch = self._source.microbatch(step, pipeline, microbatch, size)
            return self._checked(batch, f"microbatch({step=}, {pipeline=}, {microbatch=}, {size=})", size)

    def validation(self, index: int, size: int) -> Batch:
        """Returns `size` samples of the first evaluation set; raises as `microbatch` does."""
        return self.evaluation(next(iter(self.evaluation_sets)), index, size)

    def evaluation(self, name: str, index: int, size: int) -> Batch:
        """Returns `size` samples of an evaluation set; raises as `microbatch` does."""
        call = f"validation({index=}, {size=})" if name == ONLY else f"evaluation({name=}, {index=}, {size=})"
        with running("the data", getattr(self._source, "evaluation", self._source.validation)):
            return self._checked(evaluation(self._source, name, index, size), call, size)

    def _checked(self, batch: object, call: str, size: int) -> Batch:
        name = f"{type(self._source).__name__}.{call}"
        if not isinstance(batch, Batch):
            hint = "return Batch(inputs=(x,), targets=(y,))"
            raise TypeError(f"{name}: expected a Batch, found {type(batch).__name__}: {hint}")
        form = self.facts.form
        columns = dict(zip(form.names, batch.inputs, strict=True)) if isinstance(form, Columns) and self._limits else {}
        if problem := row_problem(columns, self._limits, call):
            raise UserError([problem])
        # The split of a whole batch has checked the rows, which need not be the first dimension.
        has_rows = self._is_variable or isinstance(self._source, SplitBatches)
        for part, tensors in () if has_rows else _parts(batch):
            rows = tensors[0].shape[0] if tensors and tensors[0].dim() else size
            if rows != size:
                raise ValueError(f"{name} returned {counted(rows, 'row')} in {part}[0], {size} were asked for")
        for part, tensors in _parts(batch):
            shapes = _ranks_of(tensors) if self._is_variable else shapes_of(tensors)
            # The inputs of a validation are those of training, its targets may be others.
            key = part if part == "inputs" else f"{part} of {call.partition('(')[0]}"
            first, ranks = self._kinds.setdefault((key, size), (shapes, _ranks_of(tensors)))
            if first != shapes:
                is_of_sizes = not self._is_variable and ranks == _ranks_of(tensors)
                hint = "; --variable-shapes lets sizes differ" if is_of_sizes else ""
                raise ValueError(f"{name} returned {shapes} as {part}, the first were {first}{hint}")
        return batch


def _ranks_of(tensors: Tensors) -> str:
    """Returns what microbatches of other sizes have in common, such as ``float32 with 2 dimensions``."""
    kinds = (f"{str(each.dtype).removeprefix('torch.')} with {counted(each.dim(), 'dimension')}" for each in tensors)
    return " and ".join(kinds) or "none"


def _parts(batch: Batch) -> tuple[tuple[str, Tensors], ...]:
    return ("inputs", batch.inputs), ("targets", batch.targets)


# Opens the data of a job: built in (`engine.models.model_registry`) or the user's own. It depends only on the job.
def open_data(job: Job) -> Data:
    """Opens the data of `job`; raises UserError or EnvironmentLacksError if it cannot."""
    if problems := name_problems(job):
        raise UserError(problems)
    if is_own(job.data):
        return user_data(job)
    if problems := data_problems(job):
        raise UserError(problems)
    factory = required(data_factory(job), "data without a problem have a factory")
    return bound(factory(job.seed, **job.data_args), job)


# ``python -m engine.models.data_sources FD`` opens the data of a job, and reports how many samples it has.
def _count(job: Job) -> dict[str, Any]:
    return {"samples": num_samples(open_data(job))}


def answer_about(job: Job, what: Callable[[Job], dict[str, Any]] = _count) -> dict[str, Any]:
    """Returns what a function says about a job, by default its `samples`; or an error under another key."""
    try:
        return what(job)
    except UserError as error:
        return {"problems": [asdict(each) for each in error.problems]}
    except BambooError as error:
        return {"error": str(error), "code": int(error.exit_code)}
    except RAISED as error:
        return {"raised": exception_of(error).at_start()}


def main(what: Callable[[Job], dict[str, Any]] = _count) -> None:
    """Answers over the socket whose descriptor is the first argument of the program."""
    with socket.socket(fileno=int(sys.argv[1])) as link:
        question = b"".join(iter(lambda: link.recv(65536), b""))
        link.sendall(json.dumps(answer_about(Job(**json.loads(question)), what)).encode())


if __name__ == "__main__":
    main()
