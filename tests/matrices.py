"""Matrices, each read and checked once however often a command asks for it: to list a thousand cells takes seconds."""

from __future__ import annotations

from typing import Any

import pytest

from engine.files.jobs import matrix_file


def read_each_once(patch: pytest.MonkeyPatch) -> None:
    """Gives the commands of a test the same matrix for the same name and settings."""
    read, known = matrix_file.read_matrix, dict[Any, matrix_file.Matrix]()

    def read_once(name: str, kinds: Any, settings: Any = (), *rest: Any) -> matrix_file.Matrix:
        key = (name, tuple(settings))
        if key not in known:
            known[key] = read(name, kinds, settings, *rest)
        return known[key]

    patch.setattr(matrix_file, "read_matrix", read_once)
