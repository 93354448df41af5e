"""The rooms of the house as a table, and the rules that hold it: pure functions, as in `house_rules`.

A room is a package. The table says which rooms a room may import; a room that is not in it does not exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter

from tests.house_rules import OUR_PACKAGES, Module, floor_of, import_graph, imports_of

MOST_MODULES = 16
MOST_STOREYS = 16

_GROUND = frozenset({"engine.core"})
_PLANS = _GROUND | {"engine.core.schedules", "engine.core.program", "engine.core.config"}
_HOST = _GROUND | {"engine.core.history", "engine.files", "engine.runtime.ipc", "engine.runtime.process"}
_ARRAYS = frozenset(
    {
        "engine.runtime.device",
        "engine.runtime.transport",
        "engine.runtime.optimizers",
        "engine.runtime.stage",
        "engine.runtime.replica",
    }
)  # where torch is

# room -> rooms that it may import, beside itself
ROOMS: dict[str, frozenset[str]] = {
    "engine": frozenset(),
    "engine.core": frozenset(),
    "engine.core.schedules": _GROUND,
    "engine.core.links": _GROUND,
    "engine.core.program": _GROUND | {"engine.core.schedules"},
    "engine.core.checkpoints": _GROUND,
    "engine.core.config": _PLANS | {"engine.core.checkpoints"},
    "engine.core.analysis": _PLANS | {"engine.core.checkpoints"},
    "engine.core.samples": _PLANS,
    "engine.core.recovery": _GROUND | {"engine.core.program"},
    "engine.core.worker": _GROUND | {"engine.core.checkpoints", "engine.core.config", "engine.core.recovery"},
    "engine.core.membership": _GROUND | {"engine.core.recovery"},
    "engine.core.elastic": _GROUND
    | {"engine.core.analysis", "engine.core.config", "engine.core.membership", "engine.core.program"}
    | {"engine.core.recovery"},
    "engine.core.history": _GROUND | {"engine.core.config", "engine.core.membership", "engine.core.samples"},
    "engine.core.store": _GROUND,
    "engine.core.faults": _PLANS | {"engine.core.checkpoints", "engine.core.history", "engine.core.membership"},
    "engine.core.agent": _GROUND,
    "engine.core.coordinator": _PLANS
    | {"engine.core.checkpoints", "engine.core.recovery", "engine.core.membership", "engine.core.history"}
    | {"engine.core.elastic", "engine.core.faults"},
    "engine.core.hosts": _GROUND | {"engine.core.checkpoints", "engine.core.config", "engine.core.history"},
    "engine.core.launch": _GROUND | {"engine.core.hosts"},
    "engine.core.merging": _GROUND | {"engine.core.config", "engine.core.history"},
    "engine.core.checks": _PLANS
    | {"engine.core.checkpoints", "engine.core.faults", "engine.core.history", "engine.core.merging"},
    "engine.core.evidence": _GROUND | {"engine.core.checkpoints", "engine.core.checks", "engine.core.history"},
    "engine.files": _GROUND
    | {"engine.core.checks", "engine.core.config", "engine.core.evidence", "engine.core.history"},
    "engine.files.evidence": _GROUND
    | {"engine.core.checks", "engine.core.evidence", "engine.core.history", "engine.files"},
    "engine.files.checkpoints": _GROUND | {"engine.core.checkpoints", "engine.files"},
    "engine.files.jobs": _PLANS | {"engine.core.checkpoints", "engine.files", "engine.files.checkpoints"},
    "engine.files.merging": _GROUND
    | {"engine.core.evidence", "engine.core.history", "engine.core.merging", "engine.files", "engine.files.evidence"},
    "engine.files.scenarios": _PLANS
    | {"engine.core.checkpoints", "engine.core.faults", "engine.core.checks", "engine.files", "engine.files.jobs"},
    "engine.models": _GROUND | {"engine.core.config"},
    "engine.models.networks": frozenset({"engine.models"}),
    "engine.models.traced": _GROUND | {"engine.core.checkpoints", "engine.core.config", "engine.models"},
    "engine.models.datasets": _GROUND | {"engine.models"},
    "engine.models.sources": _GROUND | {"engine.core.config", "engine.core.samples", "engine.models"},
    "engine.report": _PLANS
    | {"engine.core.analysis", "engine.core.checks", "engine.core.evidence", "engine.core.history"}
    | {"engine.core.samples"},
    "engine.report.pages": _PLANS
    | {"engine", "engine.core.analysis", "engine.core.checks", "engine.core.history", "engine.core.samples"}
    | {"engine.report"},
    "engine.runtime": frozenset(),
    "engine.runtime.ipc": _GROUND
    | {"engine.core.recovery", "engine.core.history", "engine.core.membership", "engine.core.worker", "engine.files"}
    | {"engine.files.evidence"},
    "engine.runtime.process": _GROUND | {"engine.files", "engine.runtime.ipc"},
    "engine.runtime.store": _HOST | {"engine.core.store"},
    "engine.runtime.doctor": _HOST | {"engine.runtime.hosts", "engine.runtime.store"},
    "engine.runtime.device": _GROUND | {"engine.core.checks"},
    "engine.runtime.links": _GROUND | {"engine.core.links", "engine.runtime.ipc"},
    "engine.runtime.transport": _HOST
    | {"engine.core.links", "engine.core.program", "engine.models", "engine.runtime.device", "engine.runtime.links"},
    "engine.runtime.nccl": _GROUND
    | {"engine.files", "engine.models", "engine.runtime.device", "engine.runtime.ipc", "engine.runtime.process"}
    | {"engine.runtime.transport"},
    "engine.runtime.optimizers": _GROUND | {"engine.core.checkpoints", "engine.core.config", "engine.models"},
    "engine.runtime.stage": _PLANS
    | {"engine.core.analysis", "engine.core.checks", "engine.models"}
    | {"engine.runtime.device", "engine.runtime.optimizers", "engine.runtime.transport"},
    "engine.runtime.replica": _PLANS
    | {
        "engine.core.analysis",
        "engine.core.history",
        "engine.models",
        "engine.runtime.device",
        "engine.runtime.stage",
        "engine.runtime.transport",
    },
    "engine.runtime.keeping": _HOST
    | {"engine.files.evidence"}
    | {"engine.core.checkpoints", "engine.core.config", "engine.files.checkpoints", "engine.files.jobs"},
    "engine.runtime.checkpoint": _GROUND
    | {"engine.core.checkpoints", "engine.core.checks", "engine.core.config", "engine.core.worker"}
    | {"engine.files", "engine.files.checkpoints"}
    | {"engine.models", "engine.runtime.device", "engine.runtime.ipc", "engine.runtime.stage"}
    | {"engine.runtime.replica"},
    "engine.runtime.faults": _HOST
    | {"engine.core.faults", "engine.files.checkpoints", "engine.runtime.device", "engine.runtime.stage"}
    | {"engine.core.links", "engine.runtime.replica", "engine.runtime.transport"},
    "engine.runtime.worker": _HOST
    | _PLANS
    | _ARRAYS
    | {"engine.core.recovery", "engine.core.worker", "engine.core.faults", "engine.core.checks", "engine.models"}
    | {"engine.core.checkpoints", "engine.files.checkpoints", "engine.runtime.checkpoint", "engine.runtime.faults"}
    | {"engine.core.samples", "engine.models.sources", "engine.runtime.links", "engine.runtime.nccl"},
    "engine.runtime.in_process": _HOST | {"engine.runtime.device", "engine.runtime.links", "engine.runtime.transport"},
    "engine.runtime.coordinator": _HOST
    | {"engine.core.config", "engine.core.coordinator", "engine.core.membership", "engine.core.store"}
    | {"engine.runtime.store"},
    "engine.runtime.requests": _HOST | {"engine.core.config", "engine.core.history", "engine.core.membership"},
    "engine.runtime.agent": _HOST
    | {"engine.runtime.requests"}
    | {"engine.core.agent", "engine.core.config", "engine.core.coordinator", "engine.core.membership"}
    | {"engine.core.checkpoints", "engine.core.store", "engine.files.checkpoints", "engine.files.jobs"}
    | {"engine.core.faults", "engine.core.checks", "engine.core.recovery", "engine.runtime.store"}
    | {"engine.runtime.keeping"}
    | {"engine.core.elastic", "engine.runtime.faults", "engine.runtime.coordinator"},
    "engine.runtime.hosts": _HOST
    | {"engine.core.config", "engine.core.hosts", "engine.core.membership", "engine.core.merging", "engine.core.store"}
    | {"engine.core.faults"}
    | {"engine.core.checkpoints", "engine.runtime.agent"},
    "engine.bench": _HOST
    | _PLANS
    | _ARRAYS
    | {"engine.core.coordinator", "engine.core.history", "engine.core.store", "engine.core.checks", "engine.files"}
    | {"engine.core.elastic", "engine.core.evidence"}
    | {
        "engine.models",
        "engine.models.networks",
        "engine.models.sources",
        "engine.runtime.store",
        "engine.runtime.worker",
    }
    | {"engine.runtime.agent", "engine.runtime.coordinator", "engine.bench.figures", "engine.bench.peers"}
    | {"engine.core.checkpoints", "engine.core.worker", "engine.runtime.checkpoint"},
    "engine.bench.figures": _PLANS | {"engine.core.history", "engine.files"},
    "engine.bench.hosts": _HOST
    | {"engine.core.config", "engine.core.history", "engine.core.checks", "engine.core.hosts", "engine.files"}
    | {"engine.harness.bed", "engine.bench.figures"},
    "engine.bench.peers": _HOST
    | _PLANS
    | _ARRAYS
    | {"engine.core.checkpoints", "engine.core.checks", "engine.runtime.checkpoint"}
    | {"engine.models", "engine.models.sources", "engine.runtime.links", "engine.runtime.worker"}
    | {"engine.bench.figures"},
    "engine.harness.cases": _GROUND
    | {"engine.core.config", "engine.core.faults", "engine.core.checks", "engine.core.history", "engine.files"}
    | {"engine.core.agent", "engine.core.checkpoints", "engine.files.scenarios", "engine.runtime.faults"},
    "engine.harness.bed": _HOST | {"engine.runtime.doctor", "engine.runtime.store"},
    "engine.harness.breaking": _HOST
    | {"engine.core.checks", "engine.core.config", "engine.core.evidence", "engine.core.faults", "engine.core.merging"}
    | {"engine.files.evidence", "engine.files.merging", "engine.files.scenarios"}
    | {"engine.harness", "engine.harness.bed", "engine.harness.cases", "engine.runtime.agent", "engine.runtime.doctor"}
    | {"engine.runtime.keeping"},
    "engine.harness.hosts": _HOST
    | {"engine.core.config", "engine.core.coordinator", "engine.core.hosts", "engine.files.jobs", "engine.models"}
    | {"engine.core.store"}
    | {"engine.core.launch"}
    | {"engine.harness", "engine.harness.cases", "engine.runtime.agent", "engine.runtime.hosts"}
    | {"engine.runtime.keeping", "engine.runtime.requests", "engine.runtime.store"},
    "engine.harness": _HOST
    | {"engine.runtime.requests"}
    | {"engine.harness.cases"}
    | {"engine.core.config", "engine.core.faults", "engine.core.checks", "engine.models", "engine.files"}
    | {"engine.core.samples", "engine.files.evidence", "engine.files.scenarios"}
    | {"engine.runtime.store", "engine.runtime.doctor", "engine.runtime.faults"}
    | {"engine.core.checkpoints", "engine.files.checkpoints", "engine.files.jobs", "engine.runtime.agent"}
    | {"engine.observers", "engine.runtime.checkpoint", "engine.runtime.keeping"},
    "engine.observers": _GROUND
    | {"engine.core.checks", "engine.core.config", "engine.core.history", "engine.files", "engine.runtime.process"},
    "engine.api": _GROUND
    | {"engine.core.config", "engine.core.faults", "engine.core.history", "engine.core.membership", "engine.files"}
    | {
        "engine.files.checkpoints",
        "engine.files.evidence",
        "engine.files.jobs",
        "engine.files.scenarios",
        "engine.harness",
        "engine.harness.cases",
        "engine.report",
    }
    | {"engine.observers", "engine.runtime.checkpoint", "engine.runtime.faults", "engine.runtime.process"},
}
COMMANDS = (
    "bamboo_cli",
    "bamboo_cli.hosts",
    "bamboo_cli.options",
    "bamboo_cli.stock",
    "bamboo_cli.terminal",
)  # they may import any room of the engine but where torch is
NOT_FOR_COMMANDS = _ARRAYS | {"engine.runtime.checkpoint", "engine.runtime.worker", "engine.bench.peers"}

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
        for line, target in imports_of(module.tree):
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


def crowded(modules: Iterable[Module]) -> list[str]:
    """No room has more modules than one can look over."""
    count: dict[str, int] = {}
    for module in modules:
        if not module.is_package:
            count[room_of(module)] = count.get(room_of(module), 0) + 1
    return [
        f"{room}: {number} modules, at most {MOST_MODULES}" for room, number in count.items() if number > MOST_MODULES
    ]


def too_high(modules: Iterable[Module]) -> list[str]:
    """No chain of imports is longer than the house is high; imports for types and inside functions count."""
    graph = import_graph(modules)
    chains: dict[str, list[str]] = {}
    for name in TopologicalSorter(graph).static_order():  # each module comes after those that it imports
        chains[name] = [name, *max((chains[each] for each in sorted(graph[name])), key=len, default=[])]
    longest = max(chains.values(), key=len, default=[])
    return [f"{len(longest)} storeys: {' -> '.join(longest)}"] if len(longest) > MOST_STOREYS else []
