"""Exceptions of the user's code: the place in the job that raised one, and the user's own line.

Rules: the innermost place counts. A line is the user's own if it is not of bamboo, of torch or of Python; the innermost
one outside of installed packages comes first. An exception of bamboo about a result, such as a wrong shape, has no such
line: then the function that returned the result stands for it.
"""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from traceback import FrameSummary

import torch

from engine.core.worker_exception import WorkerException

_MOST_OF_ERROR, _MOST_OF_FRAMES, _MOST_OF_TRACEBACK = 1_000, 2_000, 10_000  # characters; they travel in one message
_PLACE, _CALLED = "_bamboo_place", "_bamboo_called"  # attributes of an exception
_PYTHON = Path(sysconfig.get_path("stdlib"))
_PACKAGES = ("site-packages", "dist-packages")
_FOLDED = (Path(__file__).parents[1], Path(__file__).parents[2] / "bamboo_cli", Path(torch.__file__).parent)


def blame(error: Exception, place: str, called: Callable[..., object] | None = None) -> None:
    """Marks an exception with the place in the job that raised it; an inner place that is known already stays.

    `called` is the user's function whose result is wrong; its first line counts if no frame is the user's.
    """
    if not hasattr(error, _PLACE):
        setattr(error, _PLACE, place)
        setattr(error, _CALLED, called)
        error.add_note(f"in {place}")


def exception_of(error: BaseException) -> WorkerException:
    """Returns an exception as data, without characters that would steer a terminal."""
    frames = traceback.extract_tb(error.__traceback__)
    file, line, function = _own_line(frames, getattr(error, _CALLED, None))
    return WorkerException(
        printable(f"{type(error).__name__}: {error}".removesuffix(": "))[:_MOST_OF_ERROR],
        getattr(error, _PLACE, ""),
        file,
        line,
        function,
        printable("\n".join(_folded(frames)))[:_MOST_OF_FRAMES],
        printable("".join(traceback.format_exception(error)))[-_MOST_OF_TRACEBACK:],
    )


def printable(text: str) -> str:
    """Returns a text without control characters; tabs and ends of lines stay."""
    return "".join(each if each.isprintable() or each in "\n\t" else "?" for each in text)


def _own_line(frames: Sequence[FrameSummary], called: Callable[..., object] | None) -> tuple[str, int, str]:
    """Returns file, line and function of the innermost frame of the user, else the first line of `called`."""
    own = [each for each in frames if _is_own(each.filename)]
    nearest = [each for each in own if not _is_installed(each.filename)] or own
    if nearest:
        return _shown(nearest[-1].filename), nearest[-1].lineno or 0, nearest[-1].name
    code = getattr(inspect.unwrap(getattr(called, "forward", called)), "__code__", None) if called else None
    if code is None or not _is_own(code.co_filename):
        return "", 0, ""
    return _shown(code.co_filename), code.co_firstlineno, code.co_name


def _is_own(filename: str) -> bool:
    path = Path(filename)
    if filename.startswith("<") or any(path.is_relative_to(folder) for folder in _FOLDED):
        return False
    return not path.is_relative_to(_PYTHON) or _is_installed(filename)


def _is_installed(filename: str) -> bool:
    return any(folder in Path(filename).parts for folder in _PACKAGES)


def _shown(filename: str) -> str:
    """Returns a path as short as it can be: relative to the current folder if it lies below."""
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename


def _folded(frames: Sequence[FrameSummary]) -> Iterator[str]:
    """Yields the lines of a traceback, innermost frame first; frames that are not the user's are only counted."""
    for own, group in groupby(reversed(frames), key=lambda each: _is_own(each.filename)):
        some = list(group)
        if not own:
            yield f"... {len(some)} {'frame' if len(some) == 1 else 'frames'} of bamboo and torch"
        for each in some if own else ():
            yield f"{_shown(each.filename)}:{each.lineno}, in {each.name}"
            if each.line:
                yield f"    {each.line}"
