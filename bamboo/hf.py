"""A Trainer in the shape of transformers', which trains with bamboo; docs/hugging-face.md has an example.

    from bamboo.hf import Trainer, TrainingArguments

    args = TrainingArguments("out", stages=2)
    Trainer(model=model, args=args, train_dataset=rows).train()

It needs the packages transformers and accelerate, which the first use of a name imports.
"""

from __future__ import annotations

import importlib

_PLACES = {"Trainer": "engine.api.trainer", "TrainingArguments": "engine.api.trainer_arguments"}


def __getattr__(name: str) -> object:
    """Returns the Trainer or its arguments; raises AttributeError for any other one, UserError without the packages."""
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
