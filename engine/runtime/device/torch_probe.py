"""Prints facts about torch on this machine as one JSON object.

The host checks run it as a program of its own: importing torch takes seconds, may fail, and may end the process. It
imports no module of bamboo, so that it works even if those cannot be loaded.
"""

from __future__ import annotations

import importlib.util
import json
import platform

import torch
from torch import distributed


def reconfigurable() -> list[str]:
    """Returns the ways in which this machine's torch could form a group of NCCL anew: none is taken yet."""
    nccl2 = hasattr(distributed.ProcessGroup, "reconfigure") and "nccl2" in distributed.Backend.backend_list
    return ["nccl2"] * nccl2 + ["torchcomms"] * (importlib.util.find_spec("torchcomms") is not None)


def facts() -> dict[str, object]:
    """Returns the facts for the host checks."""
    return {
        "version": torch.__version__,
        "num_gpus": torch.cuda.device_count(),
        "nccl": list(torch.cuda.nccl.version()) if distributed.is_nccl_available() else [],
        "reconfigures": reconfigurable(),
        "machine": platform.machine(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "blas": "MKL" if torch.backends.mkl.is_available() else "no MKL",
        "onednn": torch.backends.mkldnn.is_available(),
    }


if __name__ == "__main__":
    print(json.dumps(facts()))
