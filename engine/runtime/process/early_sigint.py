"""The answer to Ctrl-C of a program that has just begun, and has nothing to lose yet.

Rule: it imports only modules that load in a millisecond, so that a program can install it first.
"""

import contextlib
import os
import sys

ANSWER = "stopping; Ctrl-C again kills"


def tell() -> None:
    """Tells the user that the signal was heard; a closed stderr is no reason to stay."""
    with contextlib.suppress(OSError):
        os.write(2, f"{ANSWER}\n".encode())


def leave(number: int, frame: object = None) -> None:
    """Ends this process with the exit code of a signal; a program that reads --json gets its object."""
    name = {1: "SIGHUP", 2: "SIGINT", 15: "SIGTERM"}[number]
    if "--json" in sys.argv:
        outcome = f'"outcome": "interrupted", "exit_code": {128 + number}, "error": "interrupted by {name}"'
        os.write(1, f'{{"run_dir": null, {outcome}, "problems": []}}\n'.encode())
    os._exit(128 + number)


def tell_and_leave(number: int, frame: object) -> None:
    """Handles a signal before anything was started."""
    tell()
    leave(number)
