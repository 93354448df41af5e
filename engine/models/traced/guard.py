"""Shows the recorder what torch's mode for functions is not shown: every dispatch, and own autograd functions."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_alone = threading.Semaphore()  # the patch belongs to the process, where workers may be threads
_apply = torch.autograd.Function.__dict__["apply"]


class DispatchGuard(TorchDispatchMode):
    """Calls `sees` with each operation that torch dispatches, its arguments and its result."""

    def __init__(self, sees: Callable[[Any, tuple[Any, ...], Any], None]):
        super().__init__()
        self._sees = sees

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first operation imports torch._dynamo: more than a second

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._sees(func, args, result)
        return result


@contextlib.contextmanager
def recorded_functions(is_recording: Callable[[], bool], record: Callable[..., Any]) -> Iterator[None]:
    """Gives calls of own autograd functions in this thread to `record` while `is_recording`."""
    thread = threading.get_ident()

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        bound = _apply.__get__(None, cls)
        if threading.get_ident() != thread or not is_recording():
            return bound(*args, **kwargs)
        return record(bound, bound, args, kwargs)

    with _alone:
        setattr(torch.autograd.Function, "apply", classmethod(apply))  # noqa: B010
        try:
            yield
        finally:
            setattr(torch.autograd.Function, "apply", _apply)  # noqa: B010
