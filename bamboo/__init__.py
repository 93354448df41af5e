"""Training with bamboo from a Python program or a notebook; docs/python.md has examples.

    import bamboo

    run = bamboo.train("gpt", stages=4, steps=100, kills=["30:2"])
    print(run.wait().twin)

Each name is imported at its first use, so `import bamboo` takes milliseconds and loads no torch.
"""

from __future__ import annotations

import importlib

_PLACES = {
    **dict.fromkeys(("train", "resume", "dry_run", "TrainingRun"), "engine.api.training"),
    "predict": "engine.api.predicting",
    "load_weights": "engine.api.weights",
    "Callback": "engine.observers.loggers",
    **dict.fromkeys(("progress", "fingerprint"), "bamboo.progress_lines"),
    **dict.fromkeys(("BambooError", "UserError", "ExitCode"), "engine.core.errors"),
}
_NAMES = {"Callback": "Logger"}  # where a module has another name

__all__ = [  # the names of the table above
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


def __getattr__(name: str) -> object:
    """Returns a name of `__all__`, or `hf`; raises AttributeError for any other one."""
    if name in ("hf", "testing"):
        return importlib.import_module(f"bamboo.{name}")
    if name in _PLACES:
        value = getattr(importlib.import_module(_PLACES[name]), _NAMES.get(name, name))
        return globals().setdefault(name, value)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
