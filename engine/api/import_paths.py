"""Import paths of objects that a program passes as parts of a job: ``package.module:attribute``, for workers.

Rules: nothing is pickled. A function, class or object is passed by the name under which a worker can import it. An
object that no worker could import is refused, with the reason and a way out.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from engine.core.errors import Problem, UserError
from engine.core.job.job import FACTORY

_WAY_OUT = "put it into a module, such as mine.py (in a notebook: %%writefile mine.py), and import it from there"


def import_path(field: str, thing: object) -> str:
    """Returns the name of a function, a class or an object, ``package.module:attribute``; a text stands for itself.

    Raises UserError if no worker could import it.
    """
    if isinstance(thing, str):
        return thing
    if isinstance(thing, ModuleType):
        _refuse(field, thing, f"it is a module; pass one of its functions, such as {thing.__name__}.make")
    name = getattr(thing, "__qualname__", None)
    module, attribute = _of_function(field, thing, name) if isinstance(name, str) else _of_object(field, thing)
    path = f"{_importable(field, thing, module)}:{attribute}"
    if not FACTORY.fullmatch(path):
        _refuse(field, thing, f"{path!r} is no name that bamboo takes")
    return path


def _of_function(field: str, thing: object, name: str) -> tuple[str, str]:
    module = str(getattr(thing, "__module__", ""))
    if "<lambda>" in name:
        _refuse(field, thing, f"a lambda has no name that a worker could import; write a function: {_WAY_OUT}")
    if "<locals>" in name:
        _refuse(field, thing, f"it was made inside of another function; {_WAY_OUT}")
    if "." in name:
        _refuse(field, thing, "it belongs to a class; write a function of a module that calls it")
    if getattr(sys.modules.get(module), name, None) is not thing:
        _refuse(field, thing, f"{module}.{name} is another object; pass that one, or give this one a name of its own")
    return module, name


def _of_object(field: str, thing: object) -> tuple[str, str]:
    own = [sys.modules[name] for name in (type(thing).__module__, "__main__") if name in sys.modules]
    for module in (*own, *list(sys.modules.values())):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is thing and name.isidentifier() and not name.startswith("_"):
                return module.__name__, name
    kind = type(thing).__name__
    way_out = "pass its class or a function that makes it, or assign it at the top of a module and import it from there"
    _refuse(field, thing, f"a worker imports it by name, and this {kind} has none: {way_out}")


def _importable(field: str, thing: object, module: str) -> str:
    """Returns the name under which a worker imports a module, which is not ``__main__`` for the program itself."""
    if module != "__main__":
        return module
    main = sys.modules["__main__"]
    if (spec := getattr(main, "__spec__", None)) is not None:  # python -m package.module
        return str(spec.name)
    file = getattr(main, "__file__", None)
    if file is None or not str(file).endswith(".py"):
        _refuse(field, thing, f"it has no file that a worker could import; {_WAY_OUT}")
    if not Path(file).stem.isidentifier():
        _refuse(field, thing, f"{Path(file).name!r} is no name of a module; {_WAY_OUT}")
    return Path(file).stem


def folders_of(paths: Iterable[str]) -> Iterator[str]:
    """Yields the folders in which this process, but not a new one, finds the modules of some names."""
    places = {*map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")), str(Path.cwd())}
    for path in paths:
        if not FACTORY.fullmatch(path):
            continue
        folder = _folder_of(path.partition(":")[0].partition(".")[0])
        if folder and folder not in places:
            places.add(folder)
            yield folder


def _folder_of(module: str) -> str:
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    if module not in sys.modules and file is not None and Path(file).stem == module:
        return str(Path(file).resolve().parent)
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return ""
    places = spec.submodule_search_locations if spec is not None else None
    if places:
        return str(Path(next(iter(places))).resolve().parent)
    return str(Path(spec.origin).resolve().parent) if spec is not None and spec.has_location and spec.origin else ""


def _refuse(field: str, thing: object, why: str) -> NoReturn:
    name = getattr(thing, "__qualname__", type(thing).__name__)
    raise UserError([Problem(field, "a part that workers can import", str(name), why, "train()")])
