from engine.api.trainer import Trainer as Trainer
from engine.api.trainer_arguments import TrainingArguments as TrainingArguments

__all__ = ["Trainer", "TrainingArguments"]
