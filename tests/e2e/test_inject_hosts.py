"""`bamboo inject --hosts`: real hosts of namespaces, struck from outside; nothing stays, whatever ends the command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.core.checks.recoveries import recoveries
from engine.core.history.run_records import ConfirmedRecord, EpochRecord, FaultRecord
from engine.files.events_file import read_history
from engine.files.run_folder import RUN, own_files
from engine.harness.host_checks import hosts_error
from tests.e2e.test_library import OF_HOSTS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]
BAMBOO = str(Path(sys.executable).with_name("bamboo"))


@pytest.fixture(name="allowed", autouse=True)
def _allowed() -> None:
    if why := hosts_error():
        pytest.skip(why)


def links() -> list[str]:
    return sorted(os.listdir("/sys/class/net"))


def inject(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    command = [BAMBOO, "inject", *arguments, "--json", "--results", str(folder / "results")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.soak
def test_a_strike_is_in_the_history_of_all_hosts_and_the_folder_has_no_unknown_file(tmp_path: Path) -> None:
    before = links()
    code, told = inject(tmp_path, "host-agent-killed", "--hosts", "3")
    (run,) = told["runs"]
    assert (code, run["verdict"]) == (0, "passed"), run["checks"]
    assert links() == before
    folder = Path(run["run_dir"])
    assert set(folder.rglob("*")) == set(own_files(folder, RUN))  # `bamboo clean` knows every file of a run
    history = read_history(folder / "events.jsonl")
    struck = history.of(FaultRecord)
    (verdict,) = [each for each in history.of(EpochRecord) if each.verdict]
    assert {each.of for each in struck} == {each.worker for each in verdict.verdict}
    (confirmed,) = history.of(ConfirmedRecord)
    (seen,) = recoveries(history.records_of_recoveries)
    assert seen.begin_ns == struck[0].at_ns < confirmed.at_ns
    assert 0 < verdict.at_ns - struck[0].at_ns < 5_000_000_000  # on one clock, though those of hosts are hours apart
    for command in (["report", folder.name], ["status", folder.name], ["compare", folder.name, folder.name]):
        line = [BAMBOO, *command, "--results", str(tmp_path / "results")]
        assert subprocess.run(line, capture_output=True, check=False).returncode in (0, 1), command


@pytest.mark.soak
@pytest.mark.parametrize("name", OF_HOSTS)
def test_a_scenario_of_the_library_passes(tmp_path: Path, name: str) -> None:
    code, told = inject(tmp_path, name, "--hosts", "4" if name == "two-hosts-at-once" else "3")
    (run,) = told["runs"]
    assert [each for each in run["checks"] if each["result"] != "passed"] == []
    assert code == 0


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_stays_of_a_command_that_is_ended_in_the_middle(tmp_path: Path, number: signal.Signals) -> None:
    before = links()
    command = [BAMBOO, "inject", "host-loss", "--hosts", "3", "--set", "steps=100000", "--set", "results=r"]
    mark = {**os.environ, "BED_MARK": str(tmp_path)}
    with (tmp_path / "log").open("wb") as log:
        made = subprocess.Popen(command, cwd=tmp_path, env=mark, stdout=log, stderr=log)
    until_s = time.monotonic() + 200
    while "power-off" not in (tmp_path / "log").read_text():
        assert made.poll() is None and time.monotonic() < until_s, (tmp_path / "log").read_text()
        time.sleep(0.1)
    made.send_signal(number)
    code = made.wait(60)
    assert code == (130 if number == signal.SIGINT else -signal.SIGKILL)
    until_s = time.monotonic() + 20
    while (left := marked(str(tmp_path))) and time.monotonic() < until_s:
        time.sleep(0.05)
    assert left == []
    assert links() == before
    (run,) = (each for each in (tmp_path / "r").iterdir() if not each.is_symlink())
    os.utime(run, (0, 0))  # a younger folder without events may be one of a run that starts
    told = subprocess.run(
        [BAMBOO, "clean", "--dry-run", "--results", "r"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ("store of a killed run" in told.stdout) == (number == signal.SIGKILL), told.stdout


def marked(text: str) -> list[str]:
    """Returns the processes that inherited the mark of a command."""
    found = []
    for each in psutil.process_iter(["name", "environ"]):
        if (each.info["environ"] or {}).get("BED_MARK") == text:
            found.append(each.info["name"])
    return found
