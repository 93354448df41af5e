"""The house rules as pure functions: source text in, broken rules out.

Each takes parsed modules (or plain text) and returns one line per violation, so that a test can apply it to the tree
and another test can feed it a planted offence.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 50
OUR_PACKAGES = ("bamboo", "bamboo_cli", "engine")

# Parts of the standard library that compute values and touch nothing: no clock, file, thread, socket or global state.
PURE_STDLIB = frozenset(
    """
    __future__ abc array bisect collections csv dataclasses difflib enum fractions functools graphlib hashlib heapq
    hmac ipaddress itertools json math operator re statistics string struct textwrap types typing zlib
    """.split()
)
# Single names that are pure in modules that are not: text in memory, text for a shell.
PURE_NAMES = frozenset({"errno", "io.StringIO", "shlex.quote"})
IMPORTING_CALLS = frozenset({"importlib.import_module", "import_module", "__import__"})
EFFECTFUL_BUILTINS = frozenset({"open", "print", "input", "breakpoint"})
REPORT_ONLY = frozenset({"pandas"})
NOT_AT_TOP_OF_CLI = frozenset({"torch", "pandas", "numpy"})
# Modules and calls that run code chosen by a file or a peer, or write data for such a reader.
UNSAFE_MODULES = frozenset({"pickle", "cloudpickle", "dill", "joblib", "marshal", "multiprocessing", "shelve"})
UNSAFE_CALLS = frozenset(
    {"eval", "exec", "torch.load", "torch.save", "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load"}
)
# The one place that writes such data, for the user's own programs: tensors by name, which weights_only reads.
WRITES_TORCH_FILES = ("engine/runtime/checkpoint/export.py", "torch.save")
# torch.distributed's object collectives pickle their arguments.
UNSAFE_SUFFIXES = ("_object_list", "gather_object")
# Constructions that no native writer uses, or that must be read twice: in pages and in help texts.
BANNED = re.compile(
    r"""
    \b(?:is|are|was|were|be)\ (?:told|heard|said)\b          # speech for data: reported, received
    | \bputs?\ out\b                                        # evict
    | \bsays?\ what\b | \bmakes?\ of\b | \bof\ which\ (?:one|it|each)\b
    | \bgo(?:es)?\ on\ (?:with|from|at|in|by|all)\b          # continue, resume
    | \bof\ late\b | \banew\b | \bas\ ever\b | \bin\ its\ turn\b | \bbegin\ of\b
    | \bstands?\ (?:in|beside|behind|under|below|there)\b # for texts and values: is in
    | \b(?:holds?|held)\ (?:\w+\ ){0,3}against\b             # compared with
    | \bin\ the\ place\ of\b                                # instead of
    | \b(?:give|gives|given)\ (?:\w+\ )?free\b              # free
    | \bis\ no\ matter\b
    # a relative without a noun, or a genitive, that opens a sentence
    | (?:^|[.:;]\ )(?:Of|Who|What)\ (?!course\b)(?!a\ layer)[a-z ,]+\ (?:is|are|has|have|may|says|reaches)\b(?![^.]*\?)
    """,
    re.VERBOSE | re.MULTILINE,
)
# Rooms that decide by data: a pattern would read sentences that are made for people.
WITHOUT_PATTERNS = ("engine.core.checks.", "engine.core.protocol.")
# Words that name nothing: a variable has the noun, but for a loop or a comprehension that the eye takes in at once.
NO_NOUNS = frozenset({"each", "found"})
MOST_LINES_WITHOUT_NOUN = 2
WRITER = "engine.files.atomic_write"  # opens every file that is written
TABLES_OF_OPS = ("engine/core/action.py", "engine/runtime/worker/executor.py")  # rules, and the methods that run them
MAX_OPS = 10
FORWARDING = (
    "bamboo/__init__.py",
    "bamboo/hf.py",
    "engine/__init__.py",
)  # names for users, whose modules are imported at the first use
FORBIDDEN_NAMES = frozenset({"util", "utils", "helper", "helpers", "common", "manager", "misc"})


@dataclass(frozen=True)
class Module:
    """One source file: dotted name, path relative to the root, and text."""

    name: str
    path: str
    text: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        """The syntax tree; every process of the tests collects the modules, one needs their trees."""
        return ast.parse(self.text, self.path)

    @functools.cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the tree, for the twenty rules that go through them."""
        return tuple(ast.walk(self.tree))

    @functools.cached_property
    def imports(self) -> tuple[tuple[int, str], ...]:
        """The imports in the module, as `imports_of` has them."""
        return tuple(imports_of(self.tree))

    @property
    def is_package(self) -> bool:
        """Whether this is an ``__init__.py``."""
        return self.path.endswith("__init__.py")


def parse(path: str, text: str) -> Module:
    """Returns the module at `path`, a POSIX path relative to the root."""
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return Module(name, path, text)


def imports_of(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields (line, dotted name) for each import under `node`, also inside functions and by importlib with a constant.

    ``from a import b`` yields ``a.b``; whether b is a module or a name is for the caller to tell.
    """
    for each in ast.walk(node):
        if isinstance(each, ast.Import):
            yield from ((each.lineno, alias.name) for alias in each.names)
        elif isinstance(each, ast.ImportFrom):
            prefix = "." * each.level + (each.module or "")
            yield from ((each.lineno, f"{prefix}.{alias.name}") for alias in each.names)
        elif isinstance(each, ast.Call) and dotted(each.func) in IMPORTING_CALLS:
            yield from ((each.lineno, str(value.value)) for value in each.args[:1] if isinstance(value, ast.Constant))


def dotted(node: ast.AST) -> str:
    """Returns ``a.b.c`` for a chain of names, or an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        left = dotted(node.value)
        return f"{left}.{node.attr}" if left else ""
    return ""


def floor_of(name: str) -> str:
    """Returns the floor that a dotted name of ours stands on, such as ``engine.core``."""
    parts = name.split(".")
    return parts[0] if parts[0] != "engine" else ".".join(parts[:2])


def broken_floors(modules: Iterable[Module], floors: Mapping[str, frozenset[str]]) -> list[str]:
    """Floors go one way; relative imports are refused because they would hide the floor."""
    problems = []
    for module in modules:
        here = floor_of(module.name)
        for line, target in module.imports:
            if target.startswith("."):
                problems.append(f"{module.path}:{line}: relative import {target}")
            elif target.split(".")[0] in OUR_PACKAGES:
                there = floor_of(target)
                if there != here and there not in floors.get(here, frozenset()):
                    problems.append(f"{module.path}:{line}: {here} imports {there}")
    return problems


def impure_core(modules: Iterable[Module]) -> list[str]:
    """The core imports itself and the pure part of the standard library, and calls no builtin with an effect."""
    problems = []
    for module in modules:
        if floor_of(module.name) != "engine.core":
            continue
        for line, target in module.imports:
            top = target.split(".")[0]
            if top not in PURE_STDLIB and top not in OUR_PACKAGES and target not in PURE_NAMES:
                problems.append(f"{module.path}:{line}: the core imports {top}")
        for each in module.nodes:
            if isinstance(each, ast.Call) and dotted(each.func) in EFFECTFUL_BUILTINS:
                problems.append(f"{module.path}:{each.lineno}: the core calls {dotted(each.func)}")
    return problems


def import_graph(modules: Iterable[Module]) -> dict[str, set[str]]:
    """Returns the modules that each module imports, wherever in the file the imports stand."""
    known = {module.name: module for module in modules}
    graph: dict[str, set[str]] = {}
    for name, module in known.items():
        targets = {target for _, target in module.imports}
        reached = {target if target in known else target.rpartition(".")[0] for target in targets}
        graph[name] = {target for target in reached if target in known}
    return graph


def import_cycles(modules: Iterable[Module]) -> list[str]:
    """No module reaches itself over imports."""
    try:
        TopologicalSorter(import_graph(modules)).prepare()
    except CycleError as error:
        return [" -> ".join(reversed(error.args[1]))]
    return []


def misplaced_imports(modules: Iterable[Module]) -> list[str]:
    """Tables belong to engine/report and the interface for programs, gRPC comes by the module that makes forks safe.

    Nothing heavy stands at the top of the command line.
    """
    problems = []
    for module in modules:
        floor = floor_of(module.name)
        for line, target in module.imports:
            if target.split(".")[0] == "grpc" and module.name != "engine.runtime.process.grpc_import":
                problems.append(f"{module.path}:{line}: grpc not by engine.runtime.process.grpc_import")
            if target.split(".")[0] in REPORT_ONLY and floor not in ("engine.report", "engine.api"):
                problems.append(f"{module.path}:{line}: {target.split('.')[0]} outside engine.report")
        if floor == "bamboo_cli":
            top_level = [each for each in module.tree.body if isinstance(each, (ast.Import, ast.ImportFrom))]
            for line, target in imports_of(ast.Module(list(top_level), [])):
                if target.split(".")[0] in NOT_AT_TOP_OF_CLI:
                    problems.append(f"{module.path}:{line}: {target.split('.')[0]} at the top of a module")
    return problems


def unsafe_code(modules: Iterable[Module]) -> list[str]:
    """Nothing read from a file or a peer may choose the code that runs."""
    problems = []
    for module in modules:
        for line, target in module.imports:
            if target.split(".")[0] in UNSAFE_MODULES or target in UNSAFE_CALLS:
                problems.append(f"{module.path}:{line}: imports {target}")
        for each in module.nodes:
            if isinstance(each, ast.Call):
                name = dotted(each.func)
                if (module.path, name) == WRITES_TORCH_FILES or (name == "torch.load" and _is_of_weights(each)):
                    continue
                if name in UNSAFE_CALLS or name.endswith(UNSAFE_SUFFIXES):
                    problems.append(f"{module.path}:{each.lineno}: calls {name}")
    return problems


def _is_of_weights(call: ast.Call) -> bool:
    """Returns whether a call of torch.load takes tensors only, without code."""
    given = (each.value for each in call.keywords if each.arg == "weights_only")
    return any(isinstance(each, ast.Constant) and each.value is True for each in given)


def assertions(modules: Iterable[Module]) -> list[str]:
    """No guard is an `assert`: ``python -O`` drops it, and its error has no exit code. Raise, or call `ensure`."""
    return [
        f"{module.path}:{each.lineno}: asserts"
        for module in modules
        for each in module.nodes
        if isinstance(each, ast.Assert)
    ]


def other_writes(modules: Iterable[Module]) -> list[tuple[str, str]]:
    """Returns (path, line) of each file that is opened for writing outside of the one module that follows no link."""
    return [
        (module.path, f"{each.lineno}: opens a file for writing")
        for module in modules
        if module.name != WRITER
        for each in module.nodes
        if isinstance(each, ast.Call) and _opens_to_write(each)
    ]


def _opens_to_write(call: ast.Call) -> bool:
    arguments = [*call.args, *(each.value for each in call.keywords)]
    verb, given = ast.unparse(call.func), [ast.unparse(each) for each in arguments]
    if verb == "os.open":
        return "os.devnull" not in given and any(flag in "".join(given) for flag in ("O_CREAT", "O_WRONLY", "O_RDWR"))
    modes = [each.value for each in arguments if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    is_written = any(re.fullmatch("[rwaxbt+]*[wax+][bt+]*", mode) for mode in modes)
    is_open = verb.split(".")[-1] == "open" and is_written and not given[0].startswith("open_to_append(")
    return is_open or verb.endswith((".write_text", ".write_bytes", ".touch"))


def patterns(modules: Iterable[Module]) -> list[str]:
    """A decision goes by data, never by a regular expression over a sentence."""
    return [
        f"{module.path}:{line}: imports re"
        for module in modules
        if module.name.startswith(WITHOUT_PATTERNS)
        for line, target in module.imports
        if target.split(".")[0] == "re"
    ]


def shared_names(modules: Iterable[Module]) -> list[tuple[str, str]]:
    """Returns (name, the modules) of each public class or type alias of the engine that several modules define."""
    places: dict[str, list[str]] = {}
    for module in modules:
        for each in module.tree.body if module.name.startswith("engine.") else ():
            match each:
                case ast.Assign(value=ast.Call()):
                    pass  # a type variable stands for any type
                case ast.ClassDef(name=name) | ast.Assign(targets=[ast.Name(id=name)]):
                    if re.match("[A-Z].*[a-z]", name):
                        places.setdefault(name, []).append(module.path)
    return [(name, ", ".join(paths)) for name, paths in places.items() if len(paths) > 1]


def too_long(modules: Iterable[Module]) -> list[tuple[str, str]]:
    """Returns (place, length) of each file and function over its limit; a place is a path, or ``path:function``."""
    problems = []
    for module in modules:
        num_lines = len(module.text.splitlines())
        if num_lines > MAX_FILE_LINES:
            problems.append((module.path, f"{num_lines} lines, at most {MAX_FILE_LINES}"))
        for each in module.nodes:
            if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert each.end_lineno is not None
                num_lines = each.end_lineno - each.lineno + 1
                if num_lines > MAX_FUNCTION_LINES:
                    problems.append((f"{module.path}:{each.name}", f"{num_lines} lines, at most {MAX_FUNCTION_LINES}"))
    return problems


def against_exceptions(found: Iterable[tuple[str, str]], exceptions: Mapping[str, str]) -> list[str]:
    """Returns the findings without an exception (place -> reason), and the exceptions without a finding."""
    found = list(found)
    problems = [f"{what}: {text}" for what, text in found if what not in exceptions]
    return problems + [f"{what}: exception no longer needed" for what in exceptions if what not in dict(found)]


def bad_shape(modules: Iterable[Module]) -> list[str]:
    """Names have a subject, each module says its purpose, and an ``__init__.py`` has only that docstring."""
    problems = []
    for module in modules:
        problems += [f"{module.path}: name {part!r}" for part in module.name.split(".") if part in FORBIDDEN_NAMES]
        if not ast.get_docstring(module.tree):
            problems.append(f"{module.path}: no docstring")
        if module.is_package and len(module.tree.body) > 1 and module.path not in FORWARDING:
            problems.append(f"{module.path}: more than a docstring")
    return problems


def prose_of(module: Module) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of each docstring and comment; a docstring counts from the line of its definition."""
    for each in module.nodes:
        if isinstance(each, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield getattr(each, "lineno", 1), ast.get_docstring(each) or ""
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def gone_modules(modules: Iterable[Module], names: Collection[str]) -> list[str]:
    """Prose names files that are there: returns each place with the name of a module that none of `names` is."""
    return [
        f"{module.path}:{line}: {name}"
        for module in modules
        for line, text in prose_of(module)
        for name in re.findall(r"`(?:[\w/]*/)?(\w+\.py)`", text)
        if name not in names
    ]


def banned(texts: Mapping[str, str]) -> list[str]:
    """Texts for users are idiomatic: returns each place with a banned construction, as ``name: construction``."""
    return [f"{name}: {hit.group().strip()}" for name, text in texts.items() for hit in BANNED.finditer(text)]


def without_noun(modules: Iterable[Module]) -> list[str]:
    """Variables are nouns: returns each variable of `NO_NOUNS` outside of short loops; a field may have such a name."""
    problems = []
    for module in modules:
        allowed: set[int] = set()
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                allowed |= {id(item.target) for item in node.body if isinstance(item, ast.AnnAssign)}
            elif isinstance(node, (ast.For, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
                assert node.end_lineno is not None
                targets = [node.target] if isinstance(node, ast.For) else [part.target for part in node.generators]
                if node.end_lineno - node.lineno < MOST_LINES_WITHOUT_NOUN:
                    allowed |= {id(name) for target in targets for name in ast.walk(target)}
        problems += [
            f"{module.path}:{getattr(node, 'lineno', 0)}: {name}"
            for node in module.nodes
            if (name := _bound_name(node)) in NO_NOUNS and id(node) not in allowed
        ]
    return problems


def _bound_name(node: ast.AST) -> str | None:
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
            return name
        case ast.MatchAs(name=name) | ast.MatchStar(name=name) | ast.ExceptHandler(name=name):
            return name
    return None


def second_op_tables(modules: Iterable[Module]) -> list[str]:
    """The rules of ops stand in one table: returns the other modules that name more than `MAX_OPS` ops."""
    problems = []
    for module in modules:
        named = {
            node.attr
            for node in module.nodes
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Op"
        }
        if len(named) > MAX_OPS and module.path not in TABLES_OF_OPS:
            problems.append(f"{module.path}: names {len(named)} ops")
    return problems


def not_ascii(path: str, text: str) -> list[str]:
    """Code is ASCII: the reader and the interpreter see the same."""
    return [f"{path}:{number}: not ASCII" for number, line in enumerate(text.splitlines(), 1) if not line.isascii()]


def unused_dependencies(declared: Iterable[str], modules: Iterable[Module], traces: Mapping[str, str]) -> list[str]:
    """Every declared import name is imported somewhere, or leaves the trace in the text that `traces` gives for it."""
    modules = list(modules)
    used = {target.split(".")[0] for module in modules for _, target in module.imports}
    used |= {name for name, trace in traces.items() if any(trace in module.text for module in modules)}
    return [f"{name}: declared, but nothing uses it" for name in declared if name not in used]


def plugged_in(modules: Iterable[Module]) -> list[tuple[str, str]]:
    """Returns each place where behaviour is assigned to another object: an editor does not find who calls it.

    A collaborator is a constructor argument. Behaviour is a lambda, a function or a method of ours, a `partial`, and
    whatever goes into an attribute that a class of ours declares as a callable, or gives a lambda at first.
    """
    nodes = {module: module.nodes for module in modules}
    every = [node for found in nodes.values() for node in found]
    methods = {each.name for node in every if isinstance(node, ast.ClassDef) for each in _functions(node.body)}
    methods -= {name for node in every for name in _data_of(node)}
    plugs = {name for node in every for name in _plugs(node)}
    places = []
    for module, found in nodes.items():
        bodies = [node for node in found if isinstance(node, (ast.Module, ast.FunctionDef))]
        inner = [each.name for node in bodies for each in _functions(node.body)]
        for target, value, _ in (each for node in found for each in _assigned(node)):
            if dotted(target.value) in ("self", "cls"):
                continue
            known = inner if isinstance(value, ast.Name) else methods
            is_behaviour = isinstance(value, ast.Lambda) or dotted(value).rpartition(".")[2] in known
            is_behaviour |= isinstance(value, ast.Call) and dotted(value.func) == "partial"
            if is_behaviour or target.attr in plugs:
                places.append((f"{module.path}:{target.attr}", f"line {target.lineno} assigns behaviour"))
    return places


def _functions(body: Iterable[ast.stmt]) -> list[ast.FunctionDef]:
    return [each for each in body if isinstance(each, ast.FunctionDef)]


def _assigned(node: ast.AST) -> Iterator[tuple[ast.Attribute, ast.expr, ast.expr | None]]:
    """Yields the attributes that a node assigns, each with its value and its annotation."""
    pairs: list[tuple[ast.expr, ast.expr]] = []
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        pairs = [(node.target, node.value)]
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            are_tuples = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            pairs += zip(target.elts, node.value.elts, strict=True) if are_tuples else [(target, node.value)]  # type: ignore[attr-defined]
    annotation = node.annotation if isinstance(node, ast.AnnAssign) else None
    yield from ((target, value, annotation) for target, value in pairs if isinstance(target, ast.Attribute))


def _data_of(node: ast.AST) -> Iterator[str]:
    """Yields the names of properties, fields and own attributes that a node defines."""
    if isinstance(node, ast.FunctionDef) and any(dotted(each).endswith("property") for each in node.decorator_list):
        yield node.name
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
    yield from (target.attr for target, _, _ in _assigned(node) if dotted(target.value) == "self")


def _plugs(node: ast.AST) -> Iterator[str]:
    """Yields the fields and own attributes that a node declares as callables."""
    for each in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and _is_callable(each.annotation):
            yield each.target.id
    for target, value, annotation in _assigned(node):
        if dotted(target.value) == "self" and (isinstance(value, ast.Lambda) or _is_callable(annotation)):
            yield target.attr


def _is_callable(annotation: ast.expr | None) -> bool:
    return annotation is not None and ast.unparse(annotation).startswith("Callable[")
