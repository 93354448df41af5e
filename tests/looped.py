"""Many small cases in one test, where each as a test of its own would cost more than its check."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any


def looped(
    names: str | tuple[str, ...], values: Iterable[Any] | Callable[[], Iterable[Any]]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Calls a test with each of the values, as `pytest.mark.parametrize` does; a failure has a note with its case.

    A name in a text takes each value whole. The calls share the fixtures of the test. Values that take long to make are
    those of a function: it is called by the test, where the collection of all tests would call it in each process.
    """
    own = names if isinstance(names, tuple) else (names,)

    def cases_of(made: Iterable[Any]) -> list[dict[str, Any]]:
        cases = [dict(zip(own, case if isinstance(names, tuple) else (case,), strict=True)) for case in made]
        if not cases:
            raise ValueError(f"there is no case of {names}")
        return cases

    fixed = cases_of(values) if isinstance(values, Iterable) else []

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def all_cases(**fixtures: Any) -> None:
            cases = fixed if isinstance(values, Iterable) else cases_of(values())
            for number, case in enumerate(cases):
                try:
                    test(**case, **fixtures)
                except BaseException as error:
                    error.add_note(f"in case {number} of {len(cases)}: {case}")
                    raise

        signature = inspect.signature(test)
        fixtures = [parameter for name, parameter in signature.parameters.items() if name not in own]
        all_cases.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return all_cases

    return decorate
