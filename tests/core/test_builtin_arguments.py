"""The parameters of built-in factories, read by the workers of one process at the same time."""

from __future__ import annotations

import gc
import sys
import threading
from functools import partial

import pytest

from engine.models.arguments import builtin_arguments


class Cycle:
    """Garbage that runs code when it is collected, so that threads change while one of them parses."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        for _ in range(50):
            pass


def test_threads_read_the_parameters_at_once(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(partial(gc.set_threshold, *gc.get_threshold()))
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    gc.set_threshold(20)
    sys.setswitchinterval(1e-6)
    errors: list[BaseException] = []

    def read() -> None:
        try:
            for _ in range(30):
                _ = [Cycle() for _ in range(30)]
                builtin_arguments.__wrapped__("engine.models.arguments", "check_builtin_args")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert errors == []
