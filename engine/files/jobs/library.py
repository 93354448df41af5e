"""The scenarios and matrices that come with the program, by bare name; a user's own are given by their path."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.core.errors import NothingMatchedError, Problem, UserError, nearest

SUFFIX = ".yaml"
_SUFFIXES = (SUFFIX, ".yml", ".json")
EXTERNAL_FOLDER = "external"  # of what is about jobs of other launchers, here and in a folder of results
_MATRIX_PREFIX = "matrix-"


def library() -> Path:
    """Returns the folder of the scenarios that come with the program: in the package, or beside it in a checkout."""
    package = Path(__file__).parents[2]
    return next((each for each in (package / "scenarios", package.parent / "scenarios") if each.is_dir()), package)


def is_shipped(path: Path) -> bool:
    """Whether a file is one of the library."""
    return path.resolve().parent == library().resolve()


def library_names() -> list[str]:
    """Returns the bare names of the library, in order."""
    return sorted(path.stem for path in library().glob(f"*{SUFFIX}"))


def scenario_names() -> list[str]:
    """Returns the bare names of the library's scenarios, without its matrices."""
    return [name for name in library_names() if not name.startswith(_MATRIX_PREFIX)]


def find_scenario(name_or_path: str) -> Path:
    """Returns the file of a scenario, given by its path or its bare name in the library.

    Raises:
        NothingMatchedError: the library has no scenario of this name.
    """
    return find_external(name_or_path) or find_file(name_or_path, "scenario", scenario_names())


def find_external(name_or_path: str) -> Path | None:
    """Returns the file of a shipped scenario for jobs of other launchers, such as ``external/kill-rank``; else None."""
    path = library() / f"{name_or_path}{SUFFIX}"
    return path if Path(name_or_path).parts[:-1] == (EXTERNAL_FOLDER,) and path.is_file() else None


def find_file(name_or_path: str, what: str, names: Sequence[str]) -> Path:
    """Returns the path that is given, or the file in the library of one of the bare `names`.

    `what` is the noun for the message: a scenario or a matrix.

    Raises:
        NothingMatchedError: a bare name is not among `names`.
        UserError: it is a file, such as a Python module, that has another suffix.
    """
    path = Path(name_or_path)
    is_form = path.suffix in _SUFFIXES
    if not is_form and path.suffix and name_or_path not in names and path.is_file():
        expected = f"a {what} file ({', '.join(_SUFFIXES)})"
        raise UserError([Problem("", expected, f"a file with the suffix {path.suffix}", "", name_or_path)])
    if is_form or len(path.parts) != 1:
        return path
    if name_or_path not in names:
        is_matrix = name_or_path in library_names()
        hint = f"it is a matrix: bamboo matrix {name_or_path}" if is_matrix else nearest(name_or_path, names)
        hint = hint or f"there is {', '.join(names)}"
        raise NothingMatchedError(f"no {what} is called {name_or_path!r} ({hint}); a file is given by its path")
    return library() / f"{name_or_path}{SUFFIX}"


def scenario_text(values: dict[str, Any]) -> str:
    """Returns plain values of a scenario as a YAML file."""
    import yaml

    return str(yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=100, allow_unicode=False))
