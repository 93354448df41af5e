"""``python -m tests.gpu.stock_pair``: two ranks of plain torch.distributed, and when one notices that the other stops.

    sleep    the rank sleeps before a send       stop    its process stands still (SIGSTOP)
    kernel   a kernel of its GPU does not end    kill    it is killed: what a hang is compared with

The other rank waits for what it receives. It notices when its wait raises, or its process ends; after `--cut` seconds
nobody waits any longer. Prints one JSON object: the seconds from the stop, or null, and how. With `--backend gloo` the
ranks compute on the CPU, which tries this program without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

STOPS = ("sleep", "stop", "kernel", "kill")
NUM_MESSAGES = 8  # before the stop
JOINED_WITHIN_S = 120.0
_POLL_S = 0.01
_SPIN_CYCLES = 1 << 60


def main() -> None:
    """Runs the pair, or one rank of it."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.stock_pair")
    parser.add_argument("--stop", choices=STOPS, default="sleep")
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--timeout", type=float, default=0.0, metavar="SECONDS", help="of the group; 0: torch's own")
    parser.add_argument("--cut", type=float, default=30.0, metavar="SECONDS")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    if given.rank is None:
        print(json.dumps(pair(given)))
    else:
        rank(given, given.folder)


def pair(given: argparse.Namespace) -> dict[str, object]:
    """Returns what the rank that waits noticed."""
    with tempfile.TemporaryDirectory(prefix="stock-pair-") as name:
        folder = Path(name)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        options = [f"--{each}={getattr(given, each)}" for each in ("stop", "backend", "timeout", "cut")]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.gpu.stock_pair", *options, f"--rank={each}", f"--folder={folder}"],
                env={**os.environ, **_environment(each, port)},
                stdout=subprocess.DEVNULL,
                stderr=(folder / f"stderr-{each}").open("wb"),
            )
            for each in range(2)
        ]
        try:
            return _noticed(folder, ranks[1], given.cut)
        finally:
            for each in ranks:
                each.kill()
                each.wait()


def _environment(number: int, port: int) -> dict[str, str]:
    group = {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return group | {"NCCL_HOSTID": f"stock-{number}", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}


def _noticed(folder: Path, waiting: subprocess.Popen[bytes], cut_s: float) -> dict[str, object]:
    begun_s = time.monotonic()
    while not (folder / "stops").exists():
        if waiting.poll() is not None or time.monotonic() > begun_s + JOINED_WITHIN_S:
            return {"noticed_s": None, "how": f"the ranks did not come to the stop: {_last_line(folder)}"}
        time.sleep(_POLL_S)
    stopped_s = time.monotonic()
    while time.monotonic() < stopped_s + cut_s:
        if (code := waiting.poll()) is not None:
            how = (folder / "raised").read_text() if (folder / "raised").exists() else f"its process ended with {code}"
            return {"noticed_s": time.monotonic() - stopped_s, "how": how}
        time.sleep(_POLL_S)
    return {"noticed_s": None, "how": f"not within {cut_s:g} s"}


def _last_line(folder: Path) -> str:
    lines = [line for each in sorted(folder.glob("stderr-*")) for line in each.read_text(errors="replace").splitlines()]
    return lines[-1] if lines else "they wrote nothing"


def rank(given: argparse.Namespace, folder: Path) -> None:
    """Sends as rank 0, which stops; receives as rank 1."""
    is_gpu = given.backend == "nccl"
    place = torch.device("cuda", 0) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(place)
    timeout = timedelta(seconds=given.timeout) if given.timeout else None
    distributed.init_process_group(given.backend, timeout=timeout)
    tensor = torch.ones(1 << 16, device=place)
    if distributed.get_rank() == 0:
        for _ in range(NUM_MESSAGES):
            distributed.send(tensor, 1)
        if is_gpu:
            torch.cuda.synchronize()
        _stop(given.stop, folder, tensor)
        return
    try:
        while True:
            distributed.recv(tensor, 0)
            float(tensor[0])  # the host waits
    except RuntimeError as error:
        (folder / "raised").write_text(f"raised {str(error).splitlines()[0][:200]}")
        os._exit(1)


def _stop(how: str, folder: Path, tensor: torch.Tensor) -> None:
    time.sleep(0.2)  # the other rank waits by then
    (folder / "stops").touch()
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "kernel" and tensor.device.type == "cuda":
        torch.cuda._sleep(_SPIN_CYCLES)
        distributed.send(tensor, 1)
    time.sleep(1_000_000)


if __name__ == "__main__":
    main()
