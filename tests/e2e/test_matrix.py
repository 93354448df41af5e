"""`bamboo matrix` end to end: real kills pass, and every way in which a harness could lie fails.

The negative controls: redundancy switched off, a shadow with a flipped bit, a fault that cannot strike, an expectation
that cannot hold, a cell that does not end.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from tests.e2e.launcher import Done, Launcher

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

Launch = Callable[..., Launcher]

HEAD = """\
version: 1
name: controls
about: what the harness is worth
job: {model: mlp, stages: 3, microbatches: 2, steps: 4, validate_every: 0, check_pure: false}
expect: {outcome: recovered, trajectory: identical, culprit: exact}
cases:
"""
KILL = "at: {step: 1, stage: 1, action: B, microbatch: 1}, do: kill"
CASES = {
    "good": f"faults: [{{{KILL}}}]",
    "shadow-too": f"faults: [{{{KILL}}}, {{{KILL.replace('stage: 1', 'stage: 0')}}}]",
    "flipped-shadow": "faults: [{at: {step: 1, stage: 1}, target: {role: shadow}, do: flip-bit}]",
    "cannot-strike": "job: {steps: 3}\n    faults:\n      - {id: pause, at: {step: 1, stage: 1}, do: stop, for: 50ms}\n"
    "      - {after: {fault: pause, phase: replay}, target: {worker: 2}, do: kill}",
    "too-tight": f"expect: {{recovery: {{max: 1us}}}}\n    faults: [{{{KILL}}}]",
    "for-ever": "faults: [{at: {step: 1, stage: 1}, do: stop}]",
}


def run(launch: Launch, tmp_path: Path, cases: list[str], *options: str, **environment: str) -> Done:
    """Runs a matrix of some cases to its end, and checks that it has no leftovers."""
    path = tmp_path / "controls.yaml"
    path.write_text(HEAD + "".join(f"  - name: {name}\n    {CASES[name]}\n" for name in cases))
    launcher = launch("matrix", str(path), *options, **environment)
    done = launcher.wait(280)
    assert launcher.leftovers() == []
    return done


def test_negative_controls_are_red(launch: Launch, tmp_path: Path) -> None:
    names = ["good", "shadow-too", "flipped-shadow", "cannot-strike", "too-tight"]
    junit, summary = tmp_path / "out" / "cells.xml", tmp_path / "summary.md"
    environment = {"GITHUB_STEP_SUMMARY": str(summary), "GITHUB_ACTIONS": "true"}
    done = run(launch, tmp_path, names, "--json", "--junit", str(junit), **environment)
    assert done.code == 1, done.stderr
    found = {each["cell"]: (each["result"], each["failure"]) for each in json.loads(done.stdout)["cells"]}
    assert found == {
        "good": ("passed", ""),
        "shadow-too": ("failed", "no_recovery"),
        "flipped-shadow": ("failed", "no_recovery"),
        "cannot-strike": ("invalid", ""),
        "too-tight": ("failed", "threshold"),
    }
    (page,) = tmp_path.rglob("results/matrices/*/report.html")
    text = page.read_text()
    assert "bamboo matrix controls.yaml --cell too-tight" in text
    assert str(tmp_path) not in text, "a page is read on other machines"
    linked = {page.parent / address for address in re.findall('href="([^"]+)"', text)}
    assert len(linked) == 4 and all("<h1" in each.read_text() for each in linked)
    assert {*page.parent.glob("runs/*-*")} == {each.parent for each in linked}, "what passed is not kept"
    assert [each for each in page.parent.glob("runs/*") if each.is_symlink() and not each.exists()] == []
    (suite,) = ET.parse(junit).getroot()  # noqa: S314 - it is our own
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("5", "3", "1")
    assert "1 passed, 3 failed, 1 invalid" in summary.read_text()
    assert done.stderr.count("::error file=") == 4
    assert f"::error file={tmp_path}/controls.yaml,line=9,title=shadow-too failed (no_recovery)::" in done.stderr


@pytest.mark.soak
def test_a_case_that_proves_nothing_is_invalid(launch: Launch, tmp_path: Path) -> None:
    done = run(launch, tmp_path, ["cannot-strike"])
    assert done.code == 6, done.stderr
    assert "cannot-strike  I" in done.stdout


def test_a_cell_that_does_not_end_has_hung(launch: Launch, tmp_path: Path) -> None:
    done = run(launch, tmp_path, ["for-ever"], "--json", "--limit", "2")
    assert done.code == 1
    (cell,) = json.loads(done.stdout)["cells"]
    assert (cell["result"], cell["failure"], cell["text"]) == ("failed", "hang", "no end within 2 s")


@pytest.mark.soak
def test_what_fails_is_shrunk_and_fails_again(launch: Launch, tmp_path: Path) -> None:
    done = run(launch, tmp_path, ["too-tight"], "--json", "--shrink", "--shrink-tries", "12")
    assert done.code == 1, done.stderr
    shrunk = json.loads(done.stdout)["shrunk"]
    path = next(tmp_path.rglob(Path(shrunk["file"]).name))
    again = launch("matrix", str(path), "--json")
    refused = again.wait(60)
    assert refused.code == 1, refused.stderr
    (cell,) = json.loads(refused.stdout)["cells"]
    assert (cell["result"], cell["failure"]) == ("failed", "threshold")
    text = path.read_text()
    assert "microbatches: 1" in text and "stages: 2" in text


def test_an_interrupted_matrix_tells_what_it_has_leaves_nothing_and_goes_on(launch: Launch, tmp_path: Path) -> None:
    """It printed nothing, with --json too, and wrote neither JUnit nor the page."""
    path, junit = tmp_path / "controls.yaml", tmp_path / "cells.xml"
    path.write_text(HEAD + "".join(f"  - name: {name}\n    {CASES[name]}\n" for name in ("good", "for-ever")))
    results = str(tmp_path / "kept")
    first = launch("matrix", str(path), "--jobs", "1", "--results", results, "--junit", str(junit))
    first.wait_until(lambda: "passed" in (first.folder / "stderr").read_text())
    first.process.send_signal(signal.SIGTERM)
    told = first.wait(30)
    assert told.code == 128 + signal.SIGTERM
    assert first.leftovers() == []
    assert told.stderr.endswith("stopping; Ctrl-C again kills\n")
    assert re.search(r"^good +P$", told.stdout, re.MULTILINE) and re.search(r"^for-ever +-$", told.stdout, re.MULTILINE)
    assert "controls: interrupted after 1 of 2 cells: 1 passed, 0 failed, 0 invalid" in told.stdout
    assert told.stdout.splitlines()[-1].endswith(f"--results {results} --junit {junit} --resume")
    (suite,) = ET.parse(junit).getroot()  # noqa: S314 - it is our own
    assert (suite.get("tests"), suite.get("skipped")) == ("2", "1")
    (page,) = Path(results).rglob("report.html")
    assert "not run" in page.read_text()
    assert list(Path(results).glob("matrices/*/runs/*-*")) == [], "what was interrupted proves nothing"
    second = launch("matrix", str(path), "--resume", "--cell", "good", "--results", results, "--json")
    done = second.wait(60)
    assert done.code == 0, done.stderr
    assert "1 cells have passed before, 0 to run" in done.stderr
    assert [each["cell"] for each in json.loads(done.stdout)["cells"]] == ["good"]
    assert len(list(Path(results, "matrices").iterdir())) == 1
    others = launch("matrix", str(path), "--resume", "--cell", "good", "--results", results, "--set", "seed=1").wait(60)
    assert (others.code, "have passed before" in others.stderr) == (0, False), "other settings are another cell"


@pytest.mark.soak
@pytest.mark.parametrize(("text", "num_cells"), [("kill/LOG", 6), ("during/", 3)])
def test_some_cells_of_the_smoke_matrix(launch: Launch, text: str, num_cells: int) -> None:
    one_lane = ("--jobs", "1")  # each takes seconds of the processor to start
    launcher = launch("matrix", "matrix-smoke", "--cell", text, "--json", *one_lane)
    done = launcher.wait(280)
    assert done.code == 0, done.stdout + done.stderr
    cells: list[dict[str, Any]] = json.loads(done.stdout)["cells"]
    assert len(cells) == num_cells
    assert {each["result"] for each in cells} == {"passed"}
    assert all("precision: 1 fault struck at the planned action" in each["text"] for each in cells)
    runs = launcher.folder / "results" / "matrices"
    assert [*runs.glob("*/runs/*-*")] == [], "run folders of what passed are not kept"
    assert [each for each in runs.glob("*/runs/*") if each.is_symlink()] == [], "nor a link to one that is gone"
    assert launcher.leftovers() == []
