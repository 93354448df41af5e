"""The program `bamboo`, also as ``python -m bamboo_cli``.

Rule: before it loads anything, it lets Ctrl-C end it without a word, as the shell expects (130); a run takes the signal
itself.
"""

import signal
from typing import NoReturn


def main() -> NoReturn:
    """Runs the program and exits with its code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from bamboo_cli.app import main as run_program

    run_program()


if __name__ == "__main__":
    main()
