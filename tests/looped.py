"""Many small cases in one test, where each as a test of its own would cost more than its check."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any


def looped(names: str | tuple[str, ...], values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Calls a test with each of the values, as `pytest.mark.parametrize` does; a failure has a note with its case.

    A name in a text takes each value whole. The calls share the fixtures of the test.
    """
    cases = [dict(zip(names, case, strict=True)) if isinstance(names, tuple) else {names: case} for case in values]
    if not cases:
        raise ValueError(f"there is no case of {names}")

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def all_cases(**fixtures: Any) -> None:
            for number, case in enumerate(cases):
                try:
                    test(**case, **fixtures)
                except BaseException as error:
                    error.add_note(f"in case {number} of {len(cases)}: {case}")
                    raise

        signature = inspect.signature(test)
        fixtures = [parameter for name, parameter in signature.parameters.items() if name not in cases[0]]
        all_cases.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return all_cases

    return decorate
