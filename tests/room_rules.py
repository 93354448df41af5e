"""The rooms of the house as a table, and the rules that hold it: pure functions, as in `house_rules`.

A room is a package. The table says which rooms a room may import; a room that is not in it does not exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter

from tests.house_rules import OUR_PACKAGES, Module, floor_of, import_graph

MOST_STOREYS = 16

# "room: the rooms that it may import", beside itself and the ground (engine.core); all are rooms of the engine.
_TABLE = """
api: core.checks core.faults core.history core.job core.protocol files files.jobs harness models observers report
    runtime.checkpoint runtime.faults runtime.process
bench: codec core.checks core.faults core.history core.hosts core.job core.program core.protocol external files
    files.jobs harness models observers runtime.agent runtime.checkpoint runtime.device runtime.faults runtime.process
    runtime.stage runtime.store runtime.transport runtime.worker
codec: core.history core.job core.program core.protocol
core.checks: core.faults core.history core.job core.program
core.faults: core.history core.job core.program core.protocol
core.history: core.job
core.hosts: core.history core.job
core.job: core.program
core.program:
core.protocol: core.history core.job core.program
external: core.checks core.faults core.history core.job files files.jobs runtime.process runtime.stage
files: codec core.checks core.history core.job
files.jobs: codec core.checks core.faults core.job core.program files
harness: codec core.checks core.faults core.history core.hosts core.job core.protocol files files.jobs models
    observers runtime.agent runtime.checkpoint runtime.faults runtime.process runtime.store
models: codec core.job
models.traced: core.job models
observers: core.checks core.history core.job files report runtime.process
report: codec core.checks core.history core.job core.program
report.pages: core.checks core.history core.job core.program engine report
runtime.agent: codec core.checks core.faults core.history core.hosts core.job core.program core.protocol files
    files.jobs runtime.faults runtime.process runtime.store
runtime.checkpoint: core.job core.protocol files models runtime.device runtime.process runtime.stage
runtime.device: core.checks
runtime.faults: core.faults files runtime.device runtime.process runtime.stage runtime.transport
runtime.process: codec core.history core.program core.protocol files
runtime.stage: codec core.checks core.history core.job core.program models runtime.device runtime.transport
runtime.store: core.history files runtime.process
runtime.transport: core.history core.program files models runtime.device runtime.process
runtime.worker: codec core.checks core.faults core.history core.job core.program core.protocol files models
    runtime.checkpoint runtime.device runtime.faults runtime.process runtime.stage runtime.transport
"""

ROOMS: dict[str, frozenset[str]] = {
    **dict.fromkeys(("engine", "engine.core", "engine.runtime"), frozenset()),
    "bamboo": frozenset({"engine.api", "engine.external"}),
}
for _line in _TABLE.replace("\n    ", " ").split("\n"):
    _room, _, _others = _line.partition(":")
    if _room:
        ROOMS[f"engine.{_room}"] = frozenset(
            each if each == "engine" else f"engine.{each}" for each in ["core", *_others.split()]
        )

# They may import any room of the engine but where torch is.
COMMANDS = ("bamboo_cli",)
NOT_FOR_COMMANDS = frozenset(
    f"engine.{each}"
    for each in """
    runtime.checkpoint runtime.device runtime.stage runtime.transport runtime.worker
    """.split()
)

# floor -> floors that it may import, beside itself: the union of its rooms
FLOORS: dict[str, frozenset[str]] = {
    floor: frozenset(floor_of(other) for room in ROOMS if floor_of(room) == floor for other in ROOMS[room]) - {floor}
    for floor in map(floor_of, ROOMS)
} | {"bamboo_cli": frozenset(map(floor_of, ROOMS)) - {"engine"}}


def room_of(module: Module) -> str:
    """Returns the package that a module stands in; a package stands in itself."""
    return module.name if module.is_package else module.name.rpartition(".")[0]


def imported_rooms(modules: Iterable[Module]) -> dict[str, dict[str, str]]:
    """Returns for each room the other rooms that it imports, each with one place."""
    known = {module.name: module for module in modules}
    found: dict[str, dict[str, str]] = {room_of(module): {} for module in known.values()}
    for module in known.values():
        here = room_of(module)
        for line, target in module.imports:
            name = target if target in known else target.rpartition(".")[0]
            if name in known and name.split(".")[0] in OUR_PACKAGES and (there := room_of(known[name])) != here:
                found[here].setdefault(there, f"{module.path}:{line}")
    return found


def broken_rooms(modules: Iterable[Module], rooms: Mapping[str, frozenset[str]]) -> list[str]:
    """Every room stands in the table, and imports the rooms that the table allows."""
    problems = []
    for here, others in imported_rooms(modules).items():
        if here in COMMANDS:
            problems += [
                f"{place}: {here} imports {each}" for each, place in others.items() if each in NOT_FOR_COMMANDS
            ]
        elif here not in rooms:
            problems.append(f"{here}: no room of this name")
        else:
            problems += [f"{place}: {here} imports {each}" for each, place in others.items() if each not in rooms[here]]
    return problems


def circles(modules: Iterable[Module]) -> list[str]:
    """No room reaches itself over the rooms that it imports."""
    try:
        TopologicalSorter({here: set(others) for here, others in imported_rooms(modules).items()}).prepare()
    except CycleError as error:
        return [" -> ".join(reversed(error.args[1]))]
    return []


def too_high(modules: Iterable[Module]) -> list[str]:
    """No chain of imports is longer than the house is high; imports for types and inside functions count."""
    graph = import_graph(modules)
    chains: dict[str, list[str]] = {}
    for name in TopologicalSorter(graph).static_order():  # each module comes after those that it imports
        chains[name] = [name, *max((chains[each] for each in sorted(graph[name])), key=len, default=[])]
    longest = max(chains.values(), key=len, default=[])
    return [f"{len(longest)} storeys: {' -> '.join(longest)}"] if len(longest) > MOST_STOREYS else []
