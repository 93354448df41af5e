"""The program `bamboo`, also as ``python -m bamboo_cli``.

Rule: before it imports anything else, it says how Ctrl-C ends the program. A command that starts processes answers the
signal, and from then on `engine/runtime/process/interrupts.py` decides. Any other command ends silently, with code 130
in the shell.
"""

import signal
import sys

from engine.runtime.process.early_sigint import tell_and_leave

_STARTS_PROCESSES = ("run", "inject", "matrix", "bench")


def main() -> None:
    """Runs the program and exits with its code."""
    if sys.argv[1:2] and sys.argv[1] in _STARTS_PROCESSES:
        signal.signal(signal.SIGINT, tell_and_leave)
        from engine.runtime.process.interrupts import answer_signals

        answer_signals()
    else:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from bamboo_cli.app import main as run_program

    run_program()


if __name__ == "__main__":
    main()
