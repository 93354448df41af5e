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
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from engine.core.config.bit_fields import own_code
from engine.core.config.job import Job
from engine.files.file_hash import file_hash
from engine.files.jobs.data_files import DataFile


def code_files(job: Job) -> tuple[DataFile, ...]:
    """Returns the Python files of the modules that a job names; each name begins at the folder of the import."""
    named = [top_level(name) for name in own_code(job)]
    modules, found = list(named), dict[str, Path]()
    for module in modules:
        sources = dict(_sources(module, anywhere=module in named))
        found |= sources
        for path in filter(_is_own, sources.values()):
            modules += (each for each in sorted(_imported(path)) if each not in modules)
    described: list[DataFile] = []
    for name, path in sorted(found.items()):
        with contextlib.suppress(OSError):
            described.append((name, *file_hash(path)))
    return tuple(described)


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


def _is_own(path: Path) -> bool:
    return not {"site-packages", "dist-packages"} & set(path.parts)  # what is installed imports nothing from here


def _imported(path: Path) -> frozenset[str]:
    """Returns the top-level modules that a file imports by name."""
    with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError):
        return _imports_in(path.read_bytes())
    return frozenset()


@functools.cache  # a matrix, and a test of many runs, looks at the same files for each run
def _imports_in(code: bytes) -> frozenset[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {top_level(each.name) for each in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(top_level(node.module or ""))
    return frozenset(found)
