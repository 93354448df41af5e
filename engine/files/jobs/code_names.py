"""The names that a file of the user's can have as a module, read off its text: a typo need not cost a start.

Rule: no code runs, and a doubt counts as yes. A file that makes names in a way that its text does not show has every
name.
"""

from __future__ import annotations

import ast
from pathlib import Path

from engine.core.errors import Problem, nearest
from engine.files.jobs.code_files import module_spec

_MOST_BYTES = 1 << 20
_MAKERS = frozenset({"globals", "locals", "vars", "setattr", "exec", "eval", "modules", "__dict__", "__getattr__"})


def missing_name(field: str, factory: str) -> Problem | None:
    """Returns the problem of ``module:name`` whose file has no such name; None for one that has it, or is no file.

    A package decides while it is imported where its modules are, so only a module without a dot is looked at.
    """
    module, _, name = factory.partition(":")
    file = _file_of(module)
    try:
        if file is None or file.stat().st_size > _MOST_BYTES:
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
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                found.add(name)
            case ast.Import(names) | ast.ImportFrom(names=names):
                found |= {(each.asname or each.name).partition(".")[0] for each in names}
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
                found.add(name)
        if found & {"*", "__getattr__"} or _name_of(node) in _MAKERS:
            return None
    return frozenset(found)


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
