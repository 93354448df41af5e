"""The loggers that a job can name: csv, tensorboard, wandb, mlflow, or a class of the user's."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import NamedTuple

from engine.core.config.job import FACTORY, logger_names
from engine.core.errors import Problem, nearest


class _Shipped(NamedTuple):
    module: str
    attribute: str
    package: str = ""  # that it needs
    extra: str = ""  # of bamboo-train, which brings it


LOGGERS = {
    "csv": _Shipped("csv_logger", "CsvLogger"),
    "tensorboard": _Shipped("tensorboard_logger", "TensorboardLogger", "tensorboard", "tensorboard"),
    "wandb": _Shipped("wandb_logger", "WandbLogger", "wandb", "wandb"),
    "mlflow": _Shipped("mlflow_logger", "MlflowLogger", "mlflow", "mlflow"),
}


def logger_problems(text: str) -> list[Problem]:
    """Returns the problems with the loggers of a job: unknown names, and packages that are not installed."""
    found = []
    for name in logger_names(text):
        shipped = LOGGERS.get(name)
        if shipped is None and not FACTORY.fullmatch(name):
            expected = f"{', '.join(LOGGERS)} or package.module:Class, with commas between several"
            found.append(Problem("logger", expected, repr(name), nearest(name, LOGGERS)))
        elif shipped is not None and shipped.package and importlib.util.find_spec(shipped.package) is None:
            hint = f"pip install 'bamboo-train[{shipped.extra}]', or pip install {shipped.package}"
            found.append(Problem("logger", f"the package {shipped.package}", repr(name), hint))
    return found


def made_logger(name: str) -> object:
    """Returns a new logger of this name; an import or a class of the user's may raise anything."""
    if (shipped := LOGGERS.get(name)) is not None:
        module = importlib.import_module(f"engine.observers.{shipped.module}")
        return getattr(module, shipped.attribute)()
    module_name, _, attribute = name.partition(":")
    if (folder := os.getcwd()) not in sys.path:  # as workers look there
        sys.path.insert(0, folder)
    return getattr(importlib.import_module(module_name), attribute)()
