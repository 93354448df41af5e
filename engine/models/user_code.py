"""Exceptions of the user's code: the place in the job that raised one, and the user's own line.

Rules: the innermost place counts. A line is the user's own if it is not of bamboo, of torch or of Python; the innermost
one outside of installed packages comes first. An exception of bamboo about a result, such as a wrong shape, has no such
line: then the function that returned the result stands for it.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from traceback import FrameSummary

import torch

from engine.core.texts import counted, printable
from engine.core.worker_exception import WorkerException

_MOST_OF_ERROR, _MOST_OF_FRAMES, _MOST_OF_TRACEBACK = 1_000, 2_000, 10_000  # characters; they travel in one message
_PLACE, _CALLED, _HINT = "_bamboo_place", "_bamboo_called", "_bamboo_hint"  # attributes of an exception
_RAISES = re.compile(r"\b(raise|assert)\b")
_PYTHON = Path(sysconfig.get_path("stdlib"))
_PACKAGES = ("site-packages", "dist-packages")
_FOLDED = (Path(__file__).parents[1], Path(__file__).parents[2] / "bamboo_cli", Path(torch.__file__).parent)


# Code of the user may raise the last two as well: they end one worker, as any exception does.
RAISED = (Exception, SystemExit, KeyboardInterrupt)


class CodeEnded(Exception):
    """The user's code called `sys.exit`; the text is the whole message."""


def blame(error: BaseException, place: str, called: Callable[..., object] | None = None, hint: str = "") -> None:
    """Marks an exception with the place in the job that raised it; an inner place that is known already stays.

    `called` is the user's function whose result is wrong; its first line counts if no frame is the user's. `hint`
    explains an exception that no `raise` statement of Python made: torch's own words lack the values of the job.
    """
    if not hasattr(error, _PLACE):
        setattr(error, _PLACE, place)
        setattr(error, _CALLED, called)
        setattr(error, _HINT, hint)
        error.add_note(f"in {place}")


@contextlib.contextmanager
def running(place: str, called: Callable[..., object] | None = None) -> Iterator[None]:
    """Marks an exception in the user's code with its place; an attempt to end the process becomes an exception."""
    try:
        yield
    except SystemExit as end:
        error = CodeEnded(f"SystemExit: {end}").with_traceback(end.__traceback__)
        blame(error, place, called)
        raise error from None
    except (Exception, KeyboardInterrupt) as error:
        blame(error, place, called)
        raise


def exception_of(error: BaseException) -> WorkerException:
    """Returns an exception as data, without characters that would steer a terminal."""
    frames = traceback.extract_tb(error.__traceback__)
    file, line, function = _own_line(frames, getattr(error, _CALLED, None))
    text = _text(error)
    if isinstance(error, SyntaxError) and error.filename and _is_own(error.filename):
        file, line, function = _shown(error.filename), error.lineno or 0, ""
        text = f"{type(error).__name__}: {error.msg}"
    is_of_torch = isinstance(error, Exception) and not _has_raise_statement(frames)  # or of another part in C
    if (hint := getattr(error, _HINT, "")) and is_of_torch:
        text = f"{text.rstrip('.')}: {hint}"
    return WorkerException(
        printable(text)[:_MOST_OF_ERROR],
        getattr(error, _PLACE, ""),
        file,
        line,
        function,
        printable("\n".join(_folded(frames)))[:_MOST_OF_FRAMES],
        printable("".join(traceback.format_exception(error)))[-_MOST_OF_TRACEBACK:],
    )


def _text(error: BaseException) -> str:
    """Returns type and text of an exception, whose own `__str__` may raise too."""
    try:
        return str(error) if isinstance(error, CodeEnded) else f"{type(error).__name__}: {error}".removesuffix(": ")
    except Exception as other:
        return f"{type(error).__name__}: its text cannot be had: {type(other).__name__}"


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


def _has_raise_statement(frames: Sequence[FrameSummary]) -> bool:
    """Returns whether Python code raised the exception on purpose, outside of torch: its words say enough."""
    last = frames[-1] if frames else None
    return last is not None and bool(_RAISES.search(last.line or "")) and not _is_of_torch(last.filename)


def _is_of_torch(filename: str) -> bool:
    return Path(filename).is_relative_to(Path(torch.__file__).parent)


def _is_own(filename: str) -> bool:
    path = Path(filename)
    if filename.startswith("<") or any(path.is_relative_to(folder) for folder in _FOLDED):
        return False
    return not path.is_relative_to(_PYTHON) or _is_installed(filename)


def _is_installed(filename: str) -> bool:
    return any(folder in Path(filename).parts for folder in _PACKAGES)


def _shown(filename: str) -> str:
    """Returns a path as short as it can be: relative to the current folder if it lies below."""
    try:
        return str(Path(filename).relative_to(Path.cwd()))
    except (ValueError, OSError):  # it lies elsewhere, or the current folder is gone
        return filename


def _folded(frames: Sequence[FrameSummary]) -> Iterator[str]:
    """Yields the lines of the user's frames with their source, innermost first, and the number of the other frames."""
    own = [each for each in reversed(frames) if _is_own(each.filename)]
    for each in own:
        yield f"{_shown(each.filename)}:{each.lineno}, in {each.name}"
        if each.line:
            yield f"    {each.line}"
    if folded := len(frames) - len(own):
        yield f"... {counted(folded, 'frame')} of bamboo and torch"
