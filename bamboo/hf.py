"""A Trainer in the shape of transformers', which trains with bamboo; docs/hugging-face.md has an example.

    from bamboo.hf import Trainer, TrainingArguments

    args = TrainingArguments("out", stages=2)
    Trainer(model=model, args=args, train_dataset=rows).train()

It needs the packages transformers and accelerate.
"""

from __future__ import annotations

from engine.api.trainer import Trainer
from engine.api.trainer_arguments import TrainingArguments

__all__ = ["Trainer", "TrainingArguments"]
