"""Arguments of factories, as a user writes them (``model_args``, ``data_args``): names, types and ranges.

Rule: the keyword-only parameters of a factory are what a user may set, and the type of a default is the type asked
for. In the built-in factories whole numbers are counts (>= 1), floats are >= 0, and shares such as a dropout below 1.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

from engine.core.errors import Problem, UserError, nearest
from engine.core.job import Args, Scalar

Factory = Callable[..., Any]

_SHARES = frozenset({"dropout", "beta1", "beta2"})


def check_builtin_args(field: str, factory: Factory, args: Args) -> None:
    """Raises UserError with every argument of a built-in factory that is unknown or has no fitting value."""
    known = _keyword_only(factory)
    problems = [_unknown(field, name, known) for name in args if name not in known]
    for name, value in args.items():
        expected = _expected(name, known[name].default) if name in known else ""
        if expected and not _fits(name, known[name].default, value):
            problems.append(Problem(f"{field}.{name}", expected, repr(value)))
    if problems:
        raise UserError(problems)


def check_user_args(field: str, factory: Factory, args: Args) -> None:
    """Raises UserError where a user's factory cannot be called with these names; types are its own affair."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:  # something built into Python that tells no signature: the call will show
        return
    known = {each.name: each for each in parameters if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)}
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    problems = [_unknown(field, name, known) for name in args if name not in known and not takes_any]
    problems += [
        Problem(f"{field}.{name}", "a value, since the factory has no default for it")
        for name, each in known.items()
        if each.default is each.empty and name not in args
    ]
    if problems:
        raise UserError(problems)


def _keyword_only(factory: Factory) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(factory).parameters.values()
    return {each.name: each for each in parameters if each.kind is each.KEYWORD_ONLY}


def _unknown(field: str, name: str, known: dict[str, inspect.Parameter]) -> Problem:
    expected = f"one of {', '.join(sorted(known))}" if known else "no arguments"
    from_job = "every data factory gets the job's seed" if (field, name) == ("data_args", "seed") else ""
    return Problem(field, expected, repr(name), nearest(name, known) or from_job)


def _expected(name: str, default: Scalar) -> str:
    if isinstance(default, bool):
        return "true or false"
    if isinstance(default, int):
        return "a whole number >= 1"
    return "a number >= 0 and < 1" if name in _SHARES else "a finite number >= 0"


def _fits(name: str, default: Scalar, value: Scalar) -> bool:
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    if isinstance(default, int):
        return isinstance(value, int) and value >= 1
    if isinstance(value, str):
        return False
    return math.isfinite(value) and 0 <= value < (1 if name in _SHARES else math.inf)
