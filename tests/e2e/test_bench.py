"""The benchmarks run, with the fewest measurements: well-formed rows and no leftovers; figures are not judged."""

from __future__ import annotations

import csv
import json
import math
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.bench import referee
from engine.core.checks.recoveries import PHASES
from engine.harness.host_checks import hosts_error
from engine.runtime.process.interrupts import holding
from tests.e2e.launcher import ROOT, Launcher

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

Launch = Callable[..., Launcher]

CASE = "1f1b timed P=4 M=8"
COLUMNS = ["case", "metric", "ours", "peer", "ratio", "goal", "met", "n"]


def rows_of(launch: Launch, name: str, *arguments: str, positive: bool = True) -> list[dict[str, Any]]:
    """Runs a benchmark with --quick and --json, checks the rules for all of them, and returns its rows.

    A figure is `positive` unless it is a difference, or a time that may be 0.
    """
    launcher = launch("bench", name, "--quick", "--json", *arguments)
    done = launcher.wait(280)
    assert done.code == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    for row in rows:
        assert list(row) == COLUMNS
        assert all(math.isfinite(row[name]) for name in ("ours", "peer", "ratio"))
        assert not positive or all(row[name] > 0 for name in ("ours", "peer", "ratio"))
        assert (row["goal"] is None) == (row["met"] is None)
    (path,) = (launcher.folder / "results" / "bench").iterdir()
    with path.open(newline="") as file:
        on_disk = list(csv.DictReader(file))
    assert path.name.startswith(f"{name}-")
    assert [(line["case"], line["metric"]) for line in on_disk] == [(row["case"], row["metric"]) for row in rows]
    assert launcher.leftovers() == []
    return rows


@pytest.mark.soak
def test_pipeline(launch: Launch) -> None:
    case = f"eager-{CASE}"
    rows = rows_of(launch, "pipeline", "--case", case)
    assert {row["case"] for row in rows} == {case}
    assert [row["metric"] for row in rows][:2] == ["time / ideal", "iteration s, torch's is 1F1B"]
    assert [row["goal"] for row in rows] == [1.02, 0.97, 1.0, None]
    assert {row["n"] for row in rows} == {3}


@pytest.mark.soak
def test_pipeline_with_real_compute(launch: Launch) -> None:
    rows = rows_of(launch, "pipeline", "--case", "gpipe gpt P=2")
    assert "time / ideal" not in [row["metric"] for row in rows]


@pytest.mark.soak
def test_pipeline_of_other_schedules(launch: Launch) -> None:
    rows = rows_of(launch, "pipeline", "--case", "overlapped")
    assert rows[0]["metric"] == "iteration s, torch's with pairs one after the other"
    assert [row["goal"] for row in rows] == [None, 1.0, None]


@pytest.mark.soak
def test_links(launch: Launch) -> None:
    rows = rows_of(launch, "links", "--case", "quiet")
    by_peer = {row["metric"].rpartition("beside ")[2]: row["goal"] for row in rows if "beside" in row["metric"]}
    floor = by_peer.pop("a bare socket")
    assert floor is None and None not in by_peer.values()
    assert by_peer.keys() == {"Gloo", "torch's batch_isend_irecv", "its median"}


@pytest.mark.soak
def test_scale(launch: Launch) -> None:
    rows = rows_of(launch, "scale", positive=False)
    cases = {row["case"] for row in rows}
    assert {"P=8 M=128", "P=8 to 16, M=128", "timed P=4 M=32", "timed D=2 P=2 M=32", "timed P=2, 2 waiting"} <= cases
    figures = {(row["case"], row["metric"].partition(";")[0]): row["ours"] for row in rows}
    cpu_ms = [figures["timed P=4 M=32", f"{phase}, CPU ms of all processes"] for phase in PHASES]
    assert min(cpu_ms) >= 0 < sum(cpu_ms)
    assert figures["timed P=2, 2 waiting", "launcher % of a core"] > 0
    assert figures["P=8 to 16, M=128", "inventories and plans kB: exponent in P"] < 1.3


@pytest.mark.soak
@pytest.mark.parametrize(("case", "goal"), [("gpt, 2 workers", 0.333333), ("--hf, GPT-2 of 4 M, 2 workers", 1.5)])
def test_launch(launch: Launch, case: str, goal: float) -> None:
    if "--hf" in case:
        pytest.importorskip("transformers")
    (row,) = rows_of(launch, "launch", "--case", case)
    assert (row["goal"], row["n"]) == (goal, 1)


@pytest.mark.soak
def test_loggers(launch: Launch) -> None:
    rows = rows_of(launch, "loggers", "--case", "100 ms")
    assert len(rows) >= 4 and {row["goal"] for row in rows} == {0.005}


@pytest.mark.soak
def test_audit(launch: Launch) -> None:
    (row,) = rows_of(launch, "audit")
    assert (row["goal"], row["n"]) == (1.02, 1)


@pytest.mark.soak
def test_redundancy_in_time(launch: Launch) -> None:
    rows = rows_of(launch, "redundancy", "--case", "timed P=4")
    beside_the_floor = [row for row in rows if row["metric"] == "time / none, beside the floor"]
    assert [(row["case"], row["peer"], row["goal"]) for row in beside_the_floor] == [
        ("lazy timed P=4 M=8", 1.0, 1.01),
        ("lazy, log_every 1 timed P=4 M=8", 1.0, None),
        ("eager timed P=4 M=8", 1.0303, 1.0503),
    ]


@pytest.mark.soak
def test_redundancy_in_memory(launch: Launch) -> None:
    rows = rows_of(launch, "redundancy", "--case", "memory")
    for lazy, eager in (rows[:2], rows[2:]):  # with the default allocator, and with one that returns memory
        assert lazy["peer"] == eager["peer"]  # the same runs without redundancy
        assert (lazy["goal"], lazy["metric"]) == (None, "peak memory of all MiB, beside none")


@pytest.mark.soak
def test_blocks(launch: Launch) -> None:
    step, pause, *phases = rows_of(launch, "blocks")
    assert (step["goal"], step["n"]) == (1.02, 1)
    assert 0.5 < step["ratio"] < 2
    assert pause["goal"] == pytest.approx(pause["peer"] + 25, rel=1e-4)
    assert [row["metric"].split()[0] for row in phases] == ["inventory", "plan", "replay"]


@pytest.mark.soak
def test_buffers(launch: Launch) -> None:
    rows = rows_of(launch, "buffers", "--case", "changed 4 KiB")
    assert [row["metric"] for row in rows] == [
        f"{metric}, {peer}"
        for metric in ("step s", "peak memory of all MiB")
        for peer in ("beside none", "beside lazy without the buffer")
    ]


def test_kv(launch: Launch) -> None:
    rows = rows_of(launch, "kv")
    assert {(row["case"], row["goal"], row["n"]) for row in rows} == {
        (case, 1.2, 50) for case in ("put", "get", "transaction")
    }


@pytest.mark.soak
def test_recovery(launch: Launch) -> None:
    rows = rows_of(launch, "recovery", "--case", "gpt P=2", positive=False)
    pauses = [row for row in rows if row["metric"].startswith("pause ms")]
    assert [row["case"] for row in pauses] == [
        f"gpt P=2 M=8 {mode}, killed at 50%"
        for mode in ("lazy", "lazy, log_every 1", "eager", "eager")
        for _ in range(2)
    ]
    assert [row["metric"].partition("peer: ")[2] for row in pauses[-4:]] == [
        floor for floor in ("redo floor", "what was really redone") for _ in range(2)
    ]
    shares = [row for row in rows if row["metric"].startswith("pause less detect and regroup")]
    assert [row["goal"] for row in shares] == [None, 0.2, None]
    assert all(row["ours"] > 0 and row["peer"] > 0 and row["goal"] > 1.1 * row["peer"] for row in pauses)
    assert {row["metric"].split()[0] for row in rows} >= set(PHASES)


def test_an_unknown_case_is_told_from_a_failure(launch: Launch) -> None:
    done = launch("bench", "pipeline", "--case", "timed P=5").wait()
    assert done.code == 5
    assert "no case 'timed P=5'" in done.stderr


def test_an_interrupted_benchmark_leaves_nothing(launch: Launch) -> None:
    launcher = launch("bench", "pipeline", "--quick", "--case", CASE)
    launcher.wait_until(lambda: "bamboo-3" in launcher.processes())
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.wait().code == 130
    assert launcher.leftovers() == []
    assert list((launcher.folder / "results" / "bench").iterdir()) == []


def test_an_interrupted_benchmark_of_the_store_leaves_nothing(launch: Launch) -> None:
    launcher = launch("bench", "kv")
    launcher.wait_until(lambda: any(name.startswith("etcd") for name in launcher.processes()))
    time.sleep(0.5)  # at any moment of the benchmark
    launcher.process.send_signal(signal.SIGTERM)
    done = launcher.wait()
    assert (done.code, done.stdout) == (143, "")
    assert "Traceback" not in done.stderr
    assert launcher.leftovers() == []
    assert list((launcher.folder / "results" / "bench").iterdir()) == []


@pytest.mark.soak
def test_notice(launch: Launch) -> None:
    rows = rows_of(launch, "notice", positive=False)
    names = ["backwards redone", "forwards redone", "pause ms", "least useful notice s"]
    assert [row["metric"].partition(";")[0] for row in rows] == names
    assert rows[0]["ours"] == 0 and rows[0]["peer"] > 0


@pytest.mark.soak
def test_handover(launch: Launch) -> None:
    rows = rows_of(launch, "handover", positive=False)
    stalls = ["stall ms, median", "stall ms, 9 of 10 within", "stall ms, most", "the same sum ms, median"]
    steady = "steady step ms"
    assert [row["metric"].partition(";")[0] for row in rows] == [*stalls, steady, steady, *stalls, steady]
    assert rows[-1]["goal"] == 1.02
    assert all(0.5 < row["ratio"] < 2 for row in rows if row["metric"].startswith("steady"))  # two stages in one worker


@pytest.mark.soak
@pytest.mark.parametrize(
    ("case", "goals"),
    [("workers", [None, 1.0, ..., None]), ("agents", [0.6, 0.6, 1.0, 1.0]), ("steps", [1.03]), ("clocks", [1.0, 0.0])],
)
def test_hosts(launch: Launch, case: str, goals: list[Any]) -> None:
    if why := hosts_error():
        pytest.skip(why)
    rows = rows_of(launch, "hosts", "--case", case, positive=False)
    assert [row["goal"] if goal is not ... else goal for row, goal in zip(rows, goals, strict=True)] == goals
    if case == "clocks":
        assert rows[1]["ours"] == 0, "each bound has the offset of the clocks"


def test_referee_on_a_toy_and_on_what_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = referee.System("bamboo-train", "torchrun", (sys.executable,), str(ROOT / "tests/e2e/toy_launcher.py"))
    monkeypatch.setattr(referee, "SYSTEMS", {"toy": toy, "absent": replace(toy, package="no-such-package")})
    with holding() as interrupts:
        rows = [*referee.referee_rows(["toy", "absent"], "terminate", 1, tmp_path, interrupts, str)]
    done, absent = rows
    assert (done.outcome, done.struck, done.blamed, done.bits) == ("recovered", (1,), (1,), "not compared")
    assert done.lost == 0 and done.stall_ms is not None and done.command.endswith("{folder}")
    assert (absent.outcome, absent.why, absent.stall_ms) == (
        "not run",
        "not installed: pip install no-such-package",
        None,
    )


def test_an_unknown_system_is_refused(launch: Launch) -> None:
    assert launch("bench", "referee", "--only", "torchrum").wait().code == 5
