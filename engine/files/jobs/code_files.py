"""The code of the user's that decides the bits of a job: its files and their hashes, so that a resumed job runs it.

Rules: files are found by their paths and never imported, because the launcher runs no code of the user's. Of a package
each Python file counts, of a module its file, and the modules and packages of the current folder that they import.
Code that changes no bit, as of a schedule or a metric, does not count. A file that cannot be read cannot run either.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import re
import sys
import unicodedata
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from engine.core.config.bit_fields import own_code
from engine.core.config.job import Job
from engine.files.file_hash import file_hash
from engine.files.jobs.data_files import DataFile

# ``from a.b import c``, or ``import a.b, c`` with all behind it; in comments and strings too.
_MAYBE = re.compile(r"\bfrom\s+([^\W\d]\w*)(?:[ \t\f.\w]*?\bimport\b)?|\bimport\b([^\n;]*)")


def code_files(job: Job) -> tuple[DataFile, ...]:
    """Returns the Python files of the modules that a job names; each name begins at the folder of the import."""
    named = [top_level(name) for name in own_code(job)]
    modules, found = list(named), dict[str, DataFile]()
    is_here = functools.cache(lambda module: any(_sources(module, anywhere=False)))
    for module in modules:
        for name, path in _sources(module, anywhere=module in named):
            with contextlib.suppress(OSError):
                size, sha256 = file_hash(path)
                found[name] = (name, size, sha256)
                if any(each not in modules and is_here(each) for each in _maybe_imported(path, sha256)):
                    modules += (each for each in dict.fromkeys(_imported(path)) if each not in modules)
    return tuple(found[name] for name in sorted(found))


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
        found = _MAYBE.findall(text.replace("\\\n", " "))
        _maybes[sha256] = frozenset(each for one, more in found for each in (one, *re.findall(r"\w+", more)) if each)
    return _maybes[sha256]


def _imported(path: Path) -> Iterator[str]:
    """Yields the top-level modules that a file imports by name."""
    with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                yield from (top_level(each.name) for each in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                yield top_level(node.module or "")
