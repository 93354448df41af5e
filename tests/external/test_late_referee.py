"""A referee that comes late, as on a busy machine: what it does lasts as long, and it sees what it has done."""

from __future__ import annotations

import signal
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from engine.core.checks.external_report import EffectSeen
from engine.external.kinds import external_kinds
from engine.external.processes import JobProcess
from engine.external.referee import Referee
from engine.files.jobs.external_file import load_external
from engine.files.strict_yaml import read_yaml
from engine.runtime.faults.registry import kinds
from engine.runtime.process.clock import now_ns
from engine.runtime.process.interrupts import holding

pytestmark = pytest.mark.e2e
TOY = (sys.executable, str(Path(__file__).parents[1] / "e2e/toy_launcher.py"), "{folder}", "60", "0")
STOPPED_NS = 14_000_000  # of 15 ms in each 20
LATE_S = 0.3  # more than the fault lasts: all its signals are due at once
SLOW = """
version: 1
name: late
about: a slow process, and a referee that comes late
launcher: torchrun
steps: 60
faults: [{at: {step: 5, rank: 1}, do: slow, factor: 4, for: 200ms}]
expect: {steps_lost: 0}
"""


def test_a_slow_process_is_slow_and_seen_to_stand_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    act, send, sent = Referee._act, JobProcess.send, list[tuple[int, int]]()

    def late(referee: Referee, now: int) -> None:
        time.sleep(LATE_S)
        act(referee, now_ns())

    def noted(process: JobProcess, number: int) -> bool:
        sent.append((number, now_ns()))
        return send(process, number)

    monkeypatch.setattr(Referee, "_act", late)
    monkeypatch.setattr(JobProcess, "send", noted)
    (tmp_path / "late.yaml").write_text(SLOW)
    loaded = load_external(tmp_path / "late.yaml", read_yaml(tmp_path / "late.yaml"), external_kinds(kinds()), TOY)
    (tmp_path / "run/logs").mkdir(parents=True)
    with holding() as interrupts:
        run = Referee(loaded.scenario, external_kinds(kinds()), tmp_path / "run", str).run(interrupts)
    assert [each.how for each in run.of(EffectSeen)] == ["the process stands still"]
    stops = [pair for pair in pairwise(sent) if pair[0][0] == signal.SIGSTOP]
    assert len(stops) > 1 and all(later - earlier > STOPPED_NS for (_, earlier), (_, later) in stops)
