"""The error of a run that a child process has made, as the exception that the same mistake raises in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.core.errors import (
    BambooError,
    CoordinatorUnavailableError,
    EnvironmentLacksError,
    ExitCode,
    NothingMatchedError,
    Problem,
    StorageError,
    UserCodeError,
    UserError,
    WorkerFailedError,
)

_CLASSES: Mapping[int, type[BambooError]] = {
    ExitCode.USAGE: UserCodeError,
    ExitCode.NOT_RECOVERED: WorkerFailedError,
    ExitCode.ENVIRONMENT: EnvironmentLacksError,
    ExitCode.NOTHING_MATCHED: NothingMatchedError,
    ExitCode.COORDINATOR_UNAVAILABLE: CoordinatorUnavailableError,
    ExitCode.STORAGE: StorageError,
}


def error_of(word: Mapping[str, Any]) -> BambooError:
    """Returns the error that the last object on the output of a command tells, with its exit code."""
    problems = word.get("problems") or ()
    if problems:
        return UserError(Problem(**each) for each in problems)
    code, text = int(word["exit_code"]), str(word["error"] or f"{word['outcome']}, exit code {word['exit_code']}")
    found = _CLASSES.get(code, BambooError)(text)
    found.exit_code = ExitCode(code) if code in set(ExitCode) else ExitCode.INTERNAL
    return found
