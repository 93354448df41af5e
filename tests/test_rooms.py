"""The rooms of the house: the imports that each may have, no circles; each rule has a planted offence."""

from __future__ import annotations

from tests import room_rules
from tests.house_rules import parse
from tests.test_house import MODULES


def test_every_room_imports_what_the_table_allows() -> None:
    assert room_rules.broken_rooms(MODULES, room_rules.ROOMS) == []


def test_an_import_that_the_table_does_not_allow_is_found() -> None:
    target = parse("engine/runtime/stage/b.py", "")
    for path in ("engine/runtime/agent/a.py", "bamboo_cli/a.py"):
        modules = [parse(path, "from engine.runtime.stage.b import x"), target]
        here = room_rules.room_of(modules[0])
        assert room_rules.broken_rooms(modules, room_rules.ROOMS) == [f"{path}:1: {here} imports engine.runtime.stage"]
    assert room_rules.broken_rooms([parse("engine/cellar/a.py", "")], room_rules.ROOMS) == [
        "engine.cellar: no room of this name"
    ]


def test_the_agent_may_never_know_what_a_worker_computes() -> None:
    agent = room_rules.ROOMS["engine.runtime.agent"]
    assert agent.isdisjoint({"engine.runtime.worker", "engine.runtime.stage", "engine.runtime.transport"})


def test_rooms_have_no_circles() -> None:
    assert room_rules.circles(MODULES) == []


def test_a_circle_is_found_though_no_module_reaches_itself() -> None:
    modules = [
        parse("engine/core/a.py", "import engine.files.b"),
        parse("engine/files/b.py", ""),
        parse("engine/files/c.py", "def f():\n    from engine.core import d"),
        parse("engine/core/d.py", ""),
    ]
    (circle,) = room_rules.circles(modules)
    assert {"engine.core", "engine.files"} == set(circle.split(" -> "))


def test_no_chain_of_imports_is_longer_than_the_house_is_high() -> None:
    assert room_rules.too_high(MODULES) == []


def test_a_chain_that_is_too_long_is_found_though_imports_stand_in_functions_or_are_for_types() -> None:
    modules = [parse(f"engine/core/a{number}.py", f"from engine.core import a{number - 1}") for number in range(1, 17)]
    modules += [parse("engine/core/a0.py", "")]
    modules[7] = parse("engine/core/a8.py", "def f():\n    from engine.core.a7 import x")
    modules[8] = parse("engine/core/a9.py", "if TYPE_CHECKING:\n    from engine.core.a8 import X")
    (found,) = room_rules.too_high(modules)
    assert found.startswith("17 storeys: engine.core.a16 -> engine.core.a15 -> ")
    assert room_rules.too_high([each for each in modules if each.name != "engine.core.a16"]) == []
