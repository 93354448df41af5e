"""Runs the program as ``python -m bamboo_cli``."""

from bamboo_cli.app import main

if __name__ == "__main__":
    main()
