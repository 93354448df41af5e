"""gRPC in a process that forks: the handlers of forks that it has are never called."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from engine.core.errors import StorageError
from engine.runtime.agent.scribe_work import scribe_for
from engine.runtime.store.embedded_etcd import EmbeddedEtcd

_FORKS = 150
_HANDLED = "skipping fork() handlers"  # gRPC says it when it would call them while a thread is in a call


def forks(folder: Path, number: int) -> int:
    """Forks a scribe `number` times while another thread calls etcd; returns how many ended before they answered."""
    from engine.runtime.store.etcd_kv import EtcdKV  # imports gRPC, which a test may do first

    aborted, is_over = 0, threading.Event()
    with EmbeddedEtcd(folder) as server:
        store = EtcdKV(server.settings(), "/bamboo/forks/")

        def call() -> None:
            while not is_over.is_set():
                store.put("key", b"")

        caller = threading.Thread(target=call)
        caller.start()
        for _ in range(number):
            with scribe_for(is_in_process=False) as scribe:
                try:
                    scribe.settle()
                except StorageError:
                    aborted += 1
        is_over.set()
        caller.join()
        store.close()
    return aborted


@pytest.mark.parametrize("imports", ["", "import grpc"])
def test_a_fork_beside_a_call_is_not_aborted(tmp_path: Path, imports: str) -> None:
    code = f"""
from pathlib import Path
{imports}
from tests.runtime.test_grpc_import import forks
print(forks(Path({str(tmp_path)!r}), {_FORKS}))
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    if imports:
        assert _HANDLED in done.stderr, "the test can fail: gRPC that is imported as it is has its handlers"
    else:
        assert (done.stdout, done.stderr) == ("0\n", "")
