from bamboo import testing as testing
from bamboo.progress_lines import fingerprint as fingerprint
from bamboo.progress_lines import progress as progress
from engine.api.predicting import predict as predict
from engine.api.training import TrainingRun as TrainingRun
from engine.api.training import dry_run as dry_run
from engine.api.training import resume as resume
from engine.api.training import train as train
from engine.api.weights import load_weights as load_weights
from engine.core.errors import BambooError as BambooError
from engine.core.errors import ExitCode as ExitCode
from engine.core.errors import UserError as UserError
from engine.observers.loggers import Logger as Callback

__all__ = [
    "BambooError",
    "Callback",
    "ExitCode",
    "TrainingRun",
    "UserError",
    "dry_run",
    "fingerprint",
    "load_weights",
    "predict",
    "progress",
    "resume",
    "testing",
    "train",
]
