"""The parameters of built-in factories, parsed or of the factory itself; parsed in several threads at the same time."""

from __future__ import annotations

import gc
import sys
import threading
from functools import partial
from importlib import import_module

import pytest

from engine.models.arguments import builtin_arguments
from engine.models.model_registry import DATA, LOSSES, MODELS, Builtin

FACTORIES: list[Builtin] = [
    *(entry.factory for entry in MODELS.values()),
    *LOSSES.values(),
    *(factory for of_tasks in DATA.values() for factory in of_tasks.values()),
]


class Cycle:
    """Garbage that runs code when it is collected, so that threads change while one of them parses."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        for _ in range(50):
            pass


@pytest.mark.parametrize(
    "factory", {(each.module, each.name): each for each in FACTORIES}.values(), ids=lambda each: each.name
)
def test_a_factory_has_the_parameters_of_its_source(factory: Builtin, monkeypatch: pytest.MonkeyPatch) -> None:
    module = f"engine.models.{factory.module}"
    import_module(module)
    loaded = builtin_arguments.__wrapped__(module, factory.name)
    monkeypatch.delitem(sys.modules, module)
    parsed = builtin_arguments.__wrapped__(module, factory.name)
    assert [(name, type(value), value) for name, value in loaded.items()] == [
        (name, type(value), value) for name, value in parsed.items()
    ]


def test_threads_read_the_parameters_at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "engine.models.arguments")  # else nothing is parsed
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
