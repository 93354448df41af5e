"""The links of a real run cost a worker few threads and descriptors, and no more after recoveries."""

from __future__ import annotations

import psutil
import pytest

from tests.e2e.conftest import Launch
from tests.e2e.launcher import Launcher

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
MOST_THREADS = 6
MOST_FDS, FDS_OF_A_PEER = 12, 2  # the descriptors of a worker: a number, and some for each peer


def counts(launcher: Launcher) -> dict[str, tuple[int, int]]:
    """Returns descriptors and threads of each worker that lives."""
    found = {}
    for name, pid in launcher.processes().items():
        if name.startswith("bamboo-") and name.removeprefix("bamboo-").isdecimal():
            process = psutil.Process(pid)
            found[name] = (process.num_fds(), process.num_threads())
    return found


def test_a_worker_has_few_threads_and_descriptors_before_and_after_a_recovery(launch: Launch) -> None:
    layout = ("--stages", "4", "--microbatches", "4", "--steps", "100000", "--validate-every", "0")
    launcher = launch("run", "--model", "timed", *layout, "--kill", "3:3:B:1")
    launcher.wait_until(lambda: len(launcher.events("commit")) >= 8)
    after = counts(launcher)
    assert len(after) == 3
    for name, (fds, threads) in after.items():
        assert threads <= MOST_THREADS, (name, after)
        assert fds <= MOST_FDS + FDS_OF_A_PEER * 3, (name, after)
    launcher.kill_all()
