"""Prints facts about torch on this machine as one JSON object.

The host checks run it as a program of its own: importing torch takes seconds, may fail, and may end the process. It
imports no module of bamboo, so that it works even if those cannot be loaded.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta

import torch
from torch import distributed

_TIMEOUT_S = 10.0
_LOOPBACK = "127.0.0.1"


def gloo_exchange_ms() -> float:
    """Returns the ms that two ranks take to connect over loopback and to pass one tensor; raises RuntimeError."""
    store = distributed.HashStore()
    failures: list[RuntimeError] = []
    values = [torch.full((1,), float(rank)) for rank in range(2)]

    def take_part(rank: int) -> None:
        try:
            options = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [distributed.ProcessGroupGloo.create_device(hostname=_LOOPBACK, lazy_init=False)]
            options._timeout = timedelta(seconds=_TIMEOUT_S)
            group = distributed.ProcessGroupGloo(store, rank, 2, options)
            transfer = group.send if rank == 0 else group.recv  # type: ignore[attr-defined]
            transfer([values[rank]], 1 - rank, 0).wait()
        except RuntimeError as error:
            failures.append(error)

    started = time.monotonic()
    ranks = [threading.Thread(target=take_part, args=(rank,)) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    if failures:
        raise failures[0]
    if values[1].item() != 0.0:
        raise RuntimeError("another value arrived than was sent")
    return (time.monotonic() - started) * 1e3


def tls_error(environment: Mapping[str, str]) -> str:
    """Returns why the two ranks pass no tensor over TLS, or an empty string.

    Gloo reads its variables once in a process, so this is tried in a fork, before the first device of this one.
    """
    told, tell = os.pipe()
    if (pid := os.fork()) == 0:
        os.environ.update(environment)
        words = ""
        try:
            gloo_exchange_ms()
        except RuntimeError as error:
            words = str(error).strip().partition("\n")[0]
        os.write(tell, words.encode())
        os._exit(0)
    os.close(tell)
    with os.fdopen(told) as answer:
        found = answer.read()
    _, status = os.waitpid(pid, 0)
    return found if status == 0 else f"its process has ended with {os.waitstatus_to_exitcode(status)}"


def reconfigurable() -> list[str]:
    """Returns the ways in which this machine's torch could form a group of NCCL anew: none is taken yet."""
    nccl2 = hasattr(distributed.ProcessGroup, "reconfigure") and "nccl2" in distributed.Backend.backend_list
    return ["nccl2"] * nccl2 + ["torchcomms"] * (importlib.util.find_spec("torchcomms") is not None)


def facts(environment: Mapping[str, str]) -> dict[str, object]:
    """Returns the facts for the host checks; `gloo_error` is empty if two ranks could exchange a tensor.

    `environment` are the variables with which Gloo uses TLS.
    """
    gloo_ms, gloo_error, without_tls = 0.0, "", "no Gloo"
    if distributed.is_gloo_available():
        without_tls = tls_error(environment)
        try:
            gloo_ms = gloo_exchange_ms()
        except RuntimeError as error:
            gloo_error = str(error).strip().splitlines()[0]
    else:
        gloo_error = "this build of torch has no Gloo"
    return {
        "version": torch.__version__,
        "gloo_ms": gloo_ms,
        "gloo_error": gloo_error,
        "tls_error": without_tls,
        "num_gpus": torch.cuda.device_count(),
        "nccl": list(torch.cuda.nccl.version()) if distributed.is_nccl_available() else [],
        "reconfigures": reconfigurable(),
        "machine": platform.machine(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "blas": "MKL" if torch.backends.mkl.is_available() else "no MKL",
        "onednn": torch.backends.mkldnn.is_available(),
    }


if __name__ == "__main__":
    print(json.dumps(facts(json.loads(sys.argv[1]))))
