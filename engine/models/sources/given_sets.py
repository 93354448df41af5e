"""The data sets that a factory may return as they are: one, a pair, or several by name.

training                                    no evaluation: a validation pass has nothing to do
(training, evaluation)                      the name of the second one is validation
{"train": ..., "validation": ..., ...}      each but the first is an evaluation set, by its name
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from engine.models.indexed import Indexed, indexed

_TRAINING = ("train", "training")


def given_sets(made: Any) -> Indexed | None:
    """Returns the source of the data sets that a factory returned; None for any other object."""
    if isinstance(made, Mapping):
        training = next((name for name in _TRAINING if name in made), None)
        if training is None or not all(map(_is_map_style, made.values())):
            return None
        others = {str(name): _formatted(each) for name, each in made.items() if name != training}
        return indexed(_formatted(made[training]), others)
    if isinstance(made, tuple):
        is_pair = len(made) == 2 and all(map(_is_map_style, made)) and not isinstance(made[0], Tensor)
        return indexed(_formatted(made[0]), _formatted(made[1])) if is_pair else None
    return indexed(_formatted(made)) if _is_map_style(made) else None


def why_not(made: Any) -> str:
    """Returns the way out for an object that is no data set, in words; empty if there is none."""
    if isinstance(made, DataLoader):
        return "return its dataset: bamboo makes the microbatches"
    if isinstance(made, IterableDataset | Iterator):
        return "its samples have no numbers to load them by: make it a map-style data set, with __len__ and __getitem__"
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], Tensor):
        return "return torch.utils.data.TensorDataset(inputs, targets)"
    if isinstance(made, Mapping):
        return f"the set to train on is called {_TRAINING[0]!r}; found {', '.join(map(str, made)) or 'no set'}"
    return ""


def _is_map_style(each: Any) -> bool:
    is_other = isinstance(each, str | bytes | Mapping | tuple | IterableDataset | Tensor)
    return not is_other and hasattr(each, "__len__") and hasattr(each, "__getitem__")


def _formatted(each: Any) -> Any:
    """Returns a set whose columns are tensors, if it can do that itself, as those of the package datasets."""
    form = getattr(each, "format", None)
    has_none = not isinstance(form, Mapping) or form.get("type") is None
    return each.with_format("torch") if hasattr(each, "with_format") and has_none else each
