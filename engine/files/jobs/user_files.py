"""Files of a user that a job names: code, data and schedules."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib
import importlib.util
import os
import re
import stat
import sys
import time
import unicodedata
from collections.abc import Iterable, Iterator, Set
from importlib.machinery import ModuleSpec, PathFinder
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from engine.core.errors import Problem, nearest
from engine.core.job.bit_fields import own_code
from engine.core.job.job import FACTORY, Job
from engine.core.program.schedule_csv import is_text
from engine.files.atomic_write import open_to_read, storage_errors

# The SHA-256 of a file of the user's, which is read once for all who ask as long as it stays the same.
#
# Rule: a file is the same while it has the size and the times that it had. One that changed a moment ago is read each
# time: it could change again within one tick of the clock.


_MOMENT_NS = 2_000_000_000  # the coarsest times of a file system
_Facts = tuple[int, int, int, int, int]
_known: dict[_Facts, str] = {}


class FileHash(NamedTuple):
    """The size of a file in bytes, and its SHA-256 (hex)."""

    size: int
    sha256: str


def file_hash(path: str | Path) -> FileHash:
    """Returns the size and the hash of a file; raises OSError if it cannot be read."""
    with open(path, "rb") as file:
        began_ns, status = time.time_ns(), os.fstat(file.fileno())
        facts = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        sha256 = _known.get(facts) or hashlib.file_digest(file, "sha256").hexdigest()
    if began_ns - max(status.st_mtime_ns, status.st_ctime_ns) > _MOMENT_NS:
        _known[facts] = sha256
    return FileHash(status.st_size, sha256)


# The files that a job trains on: their sizes and hashes, so that a resumed job gets the same data.
DataFile = tuple[str, int, str]  # name as the job gives it, size in bytes, SHA-256 (hex)
_MOST_FILES = 10_000  # of one folder


def data_files(job: Job) -> tuple[DataFile, ...]:
    """Returns the files that the data of a job are in; none for built-in data.

    Each text in the job's data arguments that names a file or a folder counts. Of a folder the first `_MOST_FILES`
    count, in the order of their names; the files below it too, but no hidden folders and not what runs keep.

    Raises:
        StorageError: a file cannot be read.
    """
    texts = (job.data, *(each for each in job.data_args.values() if isinstance(each, str)))
    excluded = {os.path.realpath(each) for each in (job.results, job.checkpoints) if each}
    return tuple(_described(path) for path in sorted({path for text in texts for path in _paths(text, excluded)}))


def _paths(text: str, excluded: Set[str]) -> Iterator[str]:
    try:
        mode = os.stat(text).st_mode
    except (OSError, ValueError):  # it is no path
        return
    if stat.S_ISREG(mode):
        yield text
    elif stat.S_ISDIR(mode):
        yield from islice(_below(text, excluded), _MOST_FILES)


def _below(folder: str, excluded: Set[str]) -> Iterator[str]:
    with storage_errors("read", Path(folder)):
        for place, folders, files in os.walk(folder, onerror=_raised):
            real = os.path.realpath(place)
            names = (each for each in folders if each[0] != "." and each != "__pycache__")
            folders[:] = sorted(each for each in names if os.path.join(real, each) not in excluded)
            yield from filter(os.path.isfile, (os.path.join(place, each) for each in sorted(files)))


def _raised(error: OSError) -> None:
    raise error


def _described(path: str) -> DataFile:
    with storage_errors("read", Path(path)):
        return (path, *file_hash(path))


# The code of the user's that decides the bits of a job: its files and their hashes, so that a resumed job runs it.
#
# Rules: files are found by their paths and never imported, because the launcher runs no code of the user's. Of a
# package each Python file counts, of a module its file, and the modules and packages of the current folder that they
# import. Code that changes no bit, as of a schedule or a metric, does not count. A file that cannot be read cannot run
# either.


# ``from a.b import c``, or ``import a.b, c`` with all behind it; in comments and strings too.
_MAYBE = re.compile(r"\bfrom\s+([^\W\d]\w*)(?:[ \t\f.\w]*?\bimport\b)?|\bimport\b([^\n;]*)")


def code_files(job: Job) -> tuple[DataFile, ...]:
    """Returns the Python files of the modules that a job names; each name begins at the folder of the import."""
    named = [top_level(name) for name in own_code(job)]
    modules, files = list(named), dict[str, DataFile]()
    is_here = functools.cache(lambda module: any(_sources(module, anywhere=False)))
    for module in modules:
        for name, path in _sources(module, anywhere=module in named):
            with contextlib.suppress(OSError):
                size, sha256 = file_hash(path)
                files[name] = (name, size, sha256)
                if any(each not in modules and is_here(each) for each in _maybe_imported(path, sha256)):
                    modules += (each for each in dict.fromkeys(_imported(path)) if each not in modules)
    return tuple(files[name] for name in sorted(files))


def top_level(factory: str) -> str:
    """Returns the first part of the module in ``package.module:factory``."""
    return factory.partition(":")[0].partition(".")[0]


def module_spec(module: str) -> ModuleSpec | None:
    """Returns where Python finds a top-level module, first in the current folder; nothing is imported."""
    return PathFinder.find_spec(module, [str(Path.cwd()), *sys.path]) or importlib.util.find_spec(module)


def _sources(module: str, anywhere: bool) -> Iterator[tuple[str, Path]]:
    """Yields the name and the path of each Python file of a module, which may have to stand in the current folder."""
    spec = None
    with contextlib.suppress(ImportError, ValueError):  # a finder of another package, or a module without a file
        spec = module_spec(module)
    if spec is None:
        return
    for place in map(Path, spec.submodule_search_locations or [spec.origin or ""]):
        if anywhere or place.parent == Path.cwd():
            for path in place.rglob("*.py") if place.is_dir() else [place] if place.suffix == ".py" else []:
                yield str(path.relative_to(place.parent)), path


_maybes: dict[str, frozenset[str]] = {}  # by the SHA-256 of a file


def _maybe_imported(path: Path, sha256: str) -> frozenset[str]:
    """Returns at least the top-level modules that a file of the user's imports: to parse all files takes seconds."""
    if {"site-packages", "dist-packages"} & set(path.parts):
        return frozenset()  # what is installed imports nothing from here
    if sha256 not in _maybes:
        text = ""
        with contextlib.suppress(SyntaxError, ValueError):  # it is no Python
            text = unicodedata.normalize("NFKC", importlib.util.decode_source(path.read_bytes()))
        matches = _MAYBE.findall(text.replace("\\\n", " "))
        _maybes[sha256] = frozenset(each for one, more in matches for each in (one, *re.findall(r"\w+", more)) if each)
    return _maybes[sha256]


def _imported(path: Path) -> Iterator[str]:
    """Yields the top-level modules that a file imports by name."""
    with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                yield from (top_level(each.name) for each in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                yield top_level(node.module or "")


# The names that a file of the user's can have as a module, read off its text: a typo need not cost a start.
#
# Rule: no code runs, and a doubt counts as yes. A file that makes names in a way that its text does not show has every
# name.

_MOST_CODE_BYTES = 1 << 20
_MAKERS = frozenset({"globals", "locals", "vars", "setattr", "exec", "eval", "modules", "__dict__", "__getattr__"})


def missing_name(field: str, factory: str) -> Problem | None:
    """Returns the problem of ``module:name`` whose file has no such name; None for one that has it, or is no file.

    A package decides while it is imported where its modules are, so only a module without a dot is looked at.
    """
    module, _, name = factory.partition(":")
    file = _file_of(module)
    try:
        if file is None or file.stat().st_size > _MOST_CODE_BYTES:
            return None
        names = names_in(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError, RecursionError):  # importing it will tell
        return None
    if names is None or name in names:
        return None
    hint = nearest(name, [each for each in names if not each.startswith("_")])
    return Problem(field, f"a name that {file.name} has", repr(factory), hint)


def names_in(text: str) -> frozenset[str] | None:
    """Returns every name that the text of a module gives to something, in any scope; None if it may make others."""
    bindings: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                bindings.add(name)
            case ast.Import(names) | ast.ImportFrom(names=names):
                bindings |= {(each.asname or each.name).partition(".")[0] for each in names}
            case ast.Name(id=name, ctx=ast.Store()):
                bindings.add(name)
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
                bindings.add(name)
        if bindings & {"*", "__getattr__"} or _name_of(node) in _MAKERS:
            return None
    return frozenset(bindings)


def _name_of(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _file_of(module: str) -> Path | None:
    if "." in module:
        return None
    try:
        spec = module_spec(module)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.submodule_search_locations or not (spec.origin or "").endswith(".py"):
        return None
    return Path(spec.origin or "")


# Turns a user's schedule, a CSV file or a generator named ``package.module:generator``, into CSV text.
#
# Rules: a generator is trusted code. It is called with P workers, V stages per worker and M microbatches, and returns
# one list per worker, of actions or of texts such as 2F0. File and generator are read once, when the job is resolved;
# every process gets the text in the job and so runs the same lists. The check of the job decides whether the lists can
# run.

_MOST_BYTES = 16 << 20


def own_schedule(job: Job) -> str | Problem:
    """Returns the schedule of `job` as a built-in name or as CSV text, or the problem with its file or generator."""
    name = job.schedule
    if is_text(name) or not (name.endswith(".csv") or FACTORY.fullmatch(name)):
        return name
    try:
        text = _read(name) if name.endswith(".csv") else _generated(name, job)
    except UnicodeDecodeError:
        return Problem("schedule", "a CSV file with compute lists", repr(name), "it is not UTF-8 text")
    except OSError as error:
        return Problem("schedule", "a file or a generator that can be read", repr(name), error.strerror or str(error))
    except Exception as error:  # a user's generator may raise anything
        reason = f"{type(error).__name__}: {error}"
        return Problem("schedule", "a generator that makes compute lists", repr(name), reason)
    return text if is_text(text) else text + "\n"


def _read(name: str) -> str:
    """Returns the text of a file; raises OSError for a pipe or a device, of which a read may never end."""
    with open(open_to_read(Path(name).resolve()), "rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise OSError(f"it is longer than {_MOST_BYTES} bytes")
    return data.decode()


def _generated(name: str, job: Job) -> str:
    module_name, _, attribute = name.partition(":")
    module = importlib.import_module(module_name)
    if not hasattr(module, attribute):
        raise AttributeError(f"{attribute} in {module_name} {nearest(attribute, dir(module))}")
    lists: Iterable[Iterable[object]] = getattr(module, attribute)(
        job.stages // max(1, job.stages_per_worker), job.stages_per_worker, job.program_microbatches
    )
    return "".join(",".join(str(action) for action in line) + "\n" for line in lists)
