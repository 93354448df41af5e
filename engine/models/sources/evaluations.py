"""The evaluation sets of a data source, each with its name and its number of samples.

A source that has no sets of its own has one without limit, its `validation`.
"""

from __future__ import annotations

from engine.core.samples.evaluation import EvaluationSets
from engine.models.data import Data
from engine.models.indexed import ONLY
from engine.models.layers import Batch


def evaluation_sets(data: Data) -> EvaluationSets:
    """Returns the number of samples of each evaluation set by its name; 0 for a set without limit."""
    found: EvaluationSets = getattr(data, "evaluation_sets", {ONLY: 0})
    return found


def evaluation(data: Data, name: str, index: int, size: int) -> Batch:
    """Returns microbatch `index` of an evaluation set; one at the end of the set goes on at its begin."""
    load = getattr(data, "evaluation", None)
    batch: Batch = data.validation(index, size) if load is None else load(name, index, size)
    return batch
