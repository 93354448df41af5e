"""Carries out the list of `engine/core/checks/determinism.py`, and finds the operations without a deterministic form.

Rules: a worker calls `set_up` before it imports the user's code and before CUDA starts. The settings belong to the
process: workers that are threads of one process share them.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from functools import reduce
from importlib import import_module
from typing import Any

import torch
from torch.utils import deterministic
from torch.utils._python_dispatch import TorchDispatchMode

from engine.core.checks.determinism import DEMANDED, Setting, changed_setting
from engine.core.errors import Problem

_OF_TORCH = "torch."
_WITHOUT_FORM = re.compile(r"(\S+) does not have a deterministic implementation")


def set_up(settings: Iterable[Setting]) -> None:
    """Sets each of the settings."""
    for each in settings:
        if not each.name.startswith(_OF_TORCH):
            os.environ[each.name] = str(each.value)
        elif each.read:
            _found(each.name)(each.value)
        else:
            owner, _, name = each.name.rpartition(".")
            setattr(_found(owner), name, each.value)


def changed(settings: Iterable[Setting]) -> list[Problem]:
    """Returns a problem for each setting that has another value by now, and may not."""
    found = ((each, _value(each)) for each in settings if not each.may_change)
    return [changed_setting(each, value) for each, value in found if value != each.value]


def _value(setting: Setting) -> object:
    if not setting.name.startswith(_OF_TORCH):
        return os.environ.get(setting.name)
    return _found(setting.read)() if setting.read else _found(setting.name)


def _found(name: str) -> Any:
    parts = name.split(".")[1:]
    if parts[:1] == ["utils"]:  # `import torch` does not load it
        import_module("torch.utils.deterministic")
    return reduce(getattr, parts, torch)


class WithoutForm(TorchDispatchMode):
    """Lets operations without a deterministic form run in this thread, and notes their names in `found`, each once."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # with True, the first operation imports the compiler of torch, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation; if it raises for want of a deterministic form, it is run again without that demand."""
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError as error:
            told = _WITHOUT_FORM.match(str(error))
            if told is None:
                raise
        if told[1] not in self.found:
            self.found.append(told[1])
        torch.set_deterministic_debug_mode(0)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            torch.set_deterministic_debug_mode(DEMANDED)


@contextlib.contextmanager
def unwritten_filled() -> Iterator[None]:
    """Fills new memory with NaN in the block: who reads it before it is written gets other bits."""
    holder: Any = deterministic  # a module whose class has the property
    before = holder.fill_uninitialized_memory
    holder.fill_uninitialized_memory = True
    try:
        yield
    finally:
        holder.fill_uninitialized_memory = before
