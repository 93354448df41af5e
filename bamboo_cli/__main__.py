"""The program `bamboo`, also as ``python -m bamboo_cli``.

Rule: before it imports anything, it gives Ctrl-C its default effect: the program ends silently, with code 130 in the
shell. A run handles the signal itself.
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
