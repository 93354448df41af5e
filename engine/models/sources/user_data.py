"""A user's data, named ``package.module:factory``: the source that a factory returns; checks of its microbatches."""

from __future__ import annotations

from functools import partial

import torch

from engine.core.config.job import Job
from engine.core.random_key import random_key
from engine.core.texts import counted
from engine.models.data import Data, DataFacts
from engine.models.indexed import ONLY, Indexed
from engine.models.layers import Batch, Tensors
from engine.models.losses import shapes_of
from engine.models.sources.evaluations import evaluation, evaluation_sets
from engine.models.sources.given_sets import given_sets, why_not
from engine.models.sources.indexed_data import bound, num_samples, samples_of
from engine.models.user_code import running
from engine.models.user_factory import made_by, wrong_factory
from engine.models.whole_batches import SplitBatches, WholeBatches


def user_data(job: Job) -> Data:
    """Returns the data of the factory `job.data`, called with `job.data_args` and the job's seed; raises UserError.

    The name may also be that of the data itself.
    """
    with torch.random.fork_rng(devices=[]):
        returned = made_by("data", job.data, {"seed": job.seed, **job.data_args}, random_key(job.seed, "data"))
    with running("the data"):
        is_whole = isinstance(returned, Data | WholeBatches | Indexed)
        made = bound(returned if is_whole else given_sets(returned) or returned, job)
    if isinstance(made, Data) and isinstance(made.facts, DataFacts):
        return OwnData(made)
    if isinstance(made, WholeBatches) and isinstance(made.facts, DataFacts):
        with running("the data", type(made).batch):
            return OwnData(SplitBatches(made, job))
    expected = (
        "a factory that returns a data set with __len__ and __getitem__, several of them by name, an object with facts "
        "(DataFacts), microbatch() and validation(), or one with facts, spec, batch() and validation_batch()"
    )
    lacks = f": {why}" if (why := why_not(made)) else _lacks(made)
    raise wrong_factory("data", job.data, expected, f"it returned {type(made).__name__}{lacks}")


def _lacks(made: object) -> str:
    """Returns the parts that an object lacks to be a data source, in words that follow its type."""
    if not isinstance(getattr(made, "facts", None), DataFacts):
        found = f", whose facts are a {type(made.facts).__name__}" if hasattr(made, "facts") else " without facts"
        return f"{found}: facts = DataFacts(task=...)"
    wanted = ("spec", "batch", "validation_batch") if hasattr(made, "batch") else ("microbatch", "validation")
    missing = [name if name == "spec" else f"{name}()" for name in wanted if not hasattr(made, name)]
    return f" without {' and '.join(missing)}" if missing else ""


class OwnData:
    """A user's data source; an exception in it, or a microbatch of another size or shape, names the data."""

    def __init__(self, source: Data):
        self.facts = source.facts
        self.num_samples = num_samples(source)
        self.samples_of = partial(samples_of, source)
        self.evaluation_sets = evaluation_sets(source)
        self._source = source
        self._kinds: dict[tuple[str, int], str] = {}  # the dtypes and shapes of the first batch

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
        # The split of a whole batch has checked the rows, which need not be the first dimension.
        for part, tensors in () if isinstance(self._source, SplitBatches) else _parts(batch):
            rows = tensors[0].shape[0] if tensors and tensors[0].dim() else size
            if rows != size:
                raise ValueError(f"{name} returned {counted(rows, 'row')} in {part}[0], {size} were asked for")
        for part, tensors in _parts(batch):
            found = shapes_of(tensors)
            # The inputs of a validation are those of training, its targets may be others.
            key = part if part == "inputs" else f"{part} of {call.partition('(')[0]}"
            if (first := self._kinds.setdefault((key, size), found)) != found:
                raise ValueError(f"{name} returned {found} as {part}, the first were {first}")
        return batch


def _parts(batch: Batch) -> tuple[tuple[str, Tensors], ...]:
    return ("inputs", batch.inputs), ("targets", batch.targets)
