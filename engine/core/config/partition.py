"""Partitions: the index of the first layer of each stage, from the class names and weights of the layers.

Stages are never empty.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from engine.core.errors import Problem, UserError

MOST_LAYERS = 8192  # their names travel in one message


def partition(form: str, num_stages: int, kinds: Sequence[str], weights: Sequence[int]) -> tuple[int, ...]:
    """Returns the first layer of each stage.

    `kinds` are the class names of the layers. `weights` are the loads to balance: number of parameters for
    ``parameters``, measured nanoseconds for ``profile``, else unused. Raises UserError if `form` does not fit.
    """
    num_layers = len(kinds)
    if problems := cutting_problems(form, num_stages, num_layers):
        raise UserError(problems)
    if form == "uniform":
        return tuple(stage * num_layers // num_stages for stage in range(num_stages))
    if form in ("parameters", "profile"):
        return balanced(weights, num_stages)
    if form.startswith("type:"):
        return balanced(_matches(form[len("type:") :], kinds), num_stages)
    starts = written(form, num_stages)
    if starts is None:
        raise UserError([_not_rising(form, num_stages, num_layers)])
    return starts


def cutting_problems(form: str, num_stages: int, num_layers: int) -> list[Problem]:
    """Returns the problems of `form` that follow from the number of layers alone."""
    if num_layers > MOST_LAYERS:
        return [Problem("model", f"at most {MOST_LAYERS} layers", str(num_layers))]
    if num_stages > num_layers:
        return [Problem("stages", f"at most {num_layers}, the layers of the model", repr(num_stages))]
    starts = written(form, num_stages) if form[:1].isdigit() else None
    if starts and starts[-1] >= num_layers:
        return [_not_rising(form, num_stages, num_layers)]
    return []


def balanced(weights: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Returns the partition into contiguous stages that minimizes the weight of the heaviest stage.

    Bisects on that weight. For a given bound, filling from the left needs the fewest stages.
    """
    low, high = max(weights), sum(weights)
    while low < high:
        middle = (low + high) // 2
        if _num_filled(weights, middle) <= num_stages:
            high = middle
        else:
            low = middle + 1
    return _fill(weights, num_stages, low)


def _num_filled(weights: Sequence[int], bound: int) -> int:
    count, load = 1, 0
    for weight in weights:
        if load + weight > bound:
            count, load = count + 1, 0
        load += weight
    return count


def _fill(weights: Sequence[int], num_stages: int, bound: int) -> tuple[int, ...]:
    starts, load = [0], weights[0]
    for layer in range(1, len(weights)):
        stages_left = num_stages - len(starts)
        if stages_left and (load + weights[layer] > bound or len(weights) - layer == stages_left):
            starts.append(layer)
            load = 0
        load += weights[layer]
    return tuple(starts)


def _matches(pattern: str, kinds: Sequence[str]) -> list[int]:
    weights = [int(re.search(pattern, kind, re.IGNORECASE) is not None) for kind in kinds]
    if not any(weights):
        known = ", ".join(sorted(set(kinds)))
        raise UserError([Problem("partition", f"a pattern that matches a layer's class ({known})", repr(pattern))])
    return weights


def written(form: str, num_stages: int) -> tuple[int, ...] | None:
    """Returns the first layer of each stage for a `form` such as 2,4,6; None if it does not rise or fit."""
    starts = (0, *(int(part) for part in form.split(",") if part))
    rising = all(before < after for before, after in pairwise(starts))
    return starts if rising and len(starts) == num_stages else None


def _not_rising(form: str, num_stages: int, num_layers: int) -> Problem:
    return Problem("partition", f"{num_stages - 1} rising layer numbers from 1 to {num_layers - 1}", repr(form))
