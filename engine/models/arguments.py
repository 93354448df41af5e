"""Checks of a user's arguments for factories (``model_args``, ``data_args``): names, types and ranges.

Rule: a user may set the keyword-only parameters of a factory, and the type of a default is the required type. In the
built-in factories, integers are counts (>= 1), floats are >= 0, and fractions such as a dropout are below 1. The
parameters are parsed from the source, so that a mistake is reported before torch is imported, unless the module is
there.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from engine.core.errors import InvariantError, Problem, UserError
from engine.core.job.torch_parts import Argument, ArgumentForm, unknown_argument
from engine.core.job.torch_parts import argument_problems as problems_of_arguments
from engine.core.units import Args, Scalar

Factory = Callable[..., Any]

_SHARES = frozenset({"dropout", "beta1", "beta2", "label_smoothing"})
# Two threads that parse at once break each other's count of recursions (CPython's gh-106905).
_parsing = threading.Lock()


def check_builtin_args(field: str, factory: Factory, args: Args) -> None:
    """Raises UserError with each unknown or wrong argument of a built-in factory; parses nothing, for threads."""
    if problems := _problems(field, _keywords(factory), args):
        raise UserError(problems)


def _keywords(factory: Factory) -> dict[str, Scalar]:
    """Returns the keyword-only parameters of a factory, with their defaults."""
    parameters = inspect.signature(factory).parameters.values()
    return {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}


def argument_problems(field: str, module: str, name: str, args: Args, beside: Collection[str] = ()) -> list[Problem]:
    """Returns the problems with the arguments of the built-in factory `name` in `module`; names `beside` are others."""
    return _problems(field, builtin_arguments(module, name) if args else {}, args, beside)


def _problems(field: str, defaults: Mapping[str, Scalar], args: Args, beside: Collection[str] = ()) -> list[Problem]:
    arguments = {name: Argument(_form(name, default), default) for name, default in defaults.items()}
    return problems_of_arguments(field, arguments, args, all_of=False, beside=beside)


def _form(name: str, default: Scalar) -> ArgumentForm:
    if isinstance(default, bool):
        return "flag"
    return "count" if isinstance(default, int) else "share" if name in _SHARES else "amount"


@functools.cache
def builtin_arguments(module: str, name: str) -> Mapping[str, Scalar]:
    """Returns the keyword-only parameters of a function, or of a class's constructor, with their defaults."""
    if (factory := getattr(sys.modules.get(module), name, None)) is not None:  # as in a worker: parsing takes 10 ms
        return _keywords(factory)
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise InvariantError(f"no source of {module}")
    # Read as a file, because not every loader returns sources (pytest's loader of plugins does not).
    with _parsing:
        definition = _definition(ast.parse(Path(spec.origin).read_bytes()).body, name)
    if isinstance(definition, ast.ClassDef):
        definition = _definition(definition.body, "__init__")
    if not isinstance(definition, ast.FunctionDef):
        raise InvariantError(f"{module} has no {name}")
    pairs = zip(definition.args.kwonlyargs, definition.args.kw_defaults, strict=True)
    return {each.arg: ast.literal_eval(default) for each, default in pairs if default is not None}


def _definition(body: Iterable[ast.stmt], name: str) -> ast.stmt:
    return next(each for each in body if isinstance(each, (ast.FunctionDef, ast.ClassDef)) and each.name == name)


def check_user_args(field: str, factory: Factory, args: Args) -> None:
    """Raises UserError if a user's factory cannot be called with arguments of these names; ignores types."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:  # a C function without a signature: the call itself will raise
        return
    by_name = {each.name: each for each in parameters if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)}
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    problems = [unknown_argument(field, name, by_name) for name in args if name not in by_name and not takes_any]
    problems += [
        Problem(f"{field}.{name}", "a value, since the factory has no default for it")
        for name, parameter in by_name.items()
        if parameter.default is parameter.empty and name not in args
    ]
    if problems:
        raise UserError(problems)


def takes(factory: Factory, name: str) -> bool:
    """Returns whether a user's factory can be called with an argument of this name."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:
        return True
    return any(each.name == name or each.kind is each.VAR_KEYWORD for each in parameters)
