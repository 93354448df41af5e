"""A file of data as a tensor that is mapped into memory: workers of one host share its pages."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from engine.core.errors import Problem, UserError


def map_file(path: str) -> Tensor:
    """Returns the bytes of a file as a tensor that is mapped into memory; raises UserError if it cannot be read."""
    # Every worker opens the file, which a pipe does not allow.
    if os.path.exists(path) and not os.path.isfile(path):
        raise UserError([Problem("data", "a regular file", repr(path))])
    try:
        with open(path, "rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
        # Private: a write would not reach the file.
        return torch.from_file(path, shared=False, size=num_bytes, dtype=torch.uint8)
    except OSError as error:
        raise UserError([Problem("data", "a file that can be read", repr(path), str(error.strerror))]) from error
    except RuntimeError as error:
        raise UserError([Problem("data", "a file that can be mapped into memory", repr(path), str(error))]) from error
