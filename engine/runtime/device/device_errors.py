"""Errors of a device: which exceptions tell that the worker's own GPU has failed, and its trouble in words.

Rule: after such an exception nothing on the device can be trusted, because an error may belong to an earlier call, and
a sticky one fails each later call. So the worker ends, whichever code of it met the exception.
"""

from __future__ import annotations

import re

import torch

from engine.core.texts import printable
from engine.core.worker_exception import GPU_ERROR, GPU_MEMORY

_OF_LIBRARIES = re.compile(
    r"(?:CUDA|CUDA driver|CUDA runtime|cuDNN|cuSOLVER|cuSPARSE|cuFFT) error: ?(.*)", re.IGNORECASE
)
_WANTED = re.compile(r"Tried to allocate ([\d.]+ [KMGT]iB)")
_MOST_LINKED = 20
_MOST_CHARACTERS = 300


def device_trouble(error: BaseException | None) -> str:
    """Returns the trouble of this worker's GPU that an exception, or one that it hangs on, tells; empty for none."""
    for _ in range(_MOST_LINKED):
        if error is None:
            break
        if trouble := _trouble(error):
            return trouble
        error = error.__cause__ or error.__context__
    return ""


def _trouble(error: BaseException) -> str:
    # Exact types: an exception of the user's code may have a text that raises.
    if type(error) is torch.OutOfMemoryError:
        wanted = _WANTED.search(str(error))
        return f"{GPU_MEMORY}: tried to allocate {wanted[1]}" if wanted else f"{GPU_MEMORY}: {_first_line(error)}"
    if type(error) not in (RuntimeError, torch.AcceleratorError, torch.cuda.CudaError):
        return ""
    line = _first_line(error)
    found = _OF_LIBRARIES.match(line)
    if found is None:
        return "" if type(error) is RuntimeError else f"{GPU_ERROR}: {line}"
    return f"{GPU_ERROR}: {found[1] or line}"


def _first_line(error: BaseException) -> str:
    return printable(str(error).partition("\n")[0].strip()[:_MOST_CHARACTERS])
