"""The pytest plugin, in a pytest of its own: the test passes or fails with its scenario, and a failure says enough."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from bamboo.testing import ScenarioFailedError, run_scenario

pytest_plugins = ["pytester"]
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
OWN = (ROOT / "scenarios" / "cascade-during-recovery.yaml").read_text()


@pytest.fixture(name="tests")
def _tests(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder of a user with ``tests/test_user.py`` and ``tests/scenarios/own.yaml`` to come."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p bamboo_cli.pytest_plugin")
    folder = pytester.mkdir("tests") / "scenarios"
    folder.mkdir()
    (folder / "own.yaml").write_text(OWN)
    return pytester


def output(pytester: pytest.Pytester, text: str, *, failed: int, passed: int = 0) -> str:
    """Returns the output of a pytest over one file of tests, without frames of bamboo."""
    (pytester.path / "tests" / "test_user.py").write_text(text)
    done = pytester.runpytest_subprocess("tests", "-rf")
    done.assert_outcomes(failed=failed, passed=passed)
    said = done.stdout.str()
    assert "bamboo_cli/" not in said
    assert "engine/" not in said
    assert "Error: " not in said
    return said


@pytest.mark.soak
def test_a_program_of_another_test_framework_runs_a_scenario(tmp_path: Path) -> None:
    result = run_scenario("kill-middle-stage", "steps=6", runs=tmp_path)
    assert (result.result, result.cell) == ("passed", "kill-middle-stage")
    assert {each.name for each in tmp_path.iterdir()} == {"runs", "results.jsonl"}
    with pytest.raises(ScenarioFailedError, match=r"expect\.outcome: expected state-lost, found 'recovered'"):
        run_scenario("kill-middle-stage", "steps=6", "redundancy=none", runs=tmp_path)


def test_scenarios_as_tests(tests: pytest.Pytester) -> None:
    said = output(
        tests,
        "def test_good(bamboo_scenario):\n"
        "    result = bamboo_scenario('kill-middle-stage')\n"
        "    assert (result.result, result.cell, result.do) == ('passed', 'kill-middle-stage', 'kill')\n"
        "def test_bad(bamboo_scenario):\n"
        "    bamboo_scenario('scenarios/own.yaml', 'redundancy_level=1', 'seed=3')\n"
        "def test_other():\n"
        "    pass\n",
        failed=1,
        passed=2,
    )
    assert "cascade-during-recovery: failed (no_recovery): outcome: state-lost" in said
    # With CI in the environment, pytest's short summary repeats the whole message.
    (folder,) = set(re.findall(r"^run folder: (.*)$", said, re.MULTILINE))
    assert (Path(folder) / "events.jsonl").is_file()
    (again,) = set(re.findall(r"^again: (.*)$", said, re.MULTILINE))
    assert again == "bamboo inject tests/scenarios/own.yaml --set redundancy_level=1 --set seed=3"
    done = tests.run(sys.executable, "-m", *shlex.split(again.replace("bamboo", "bamboo_cli", 1)))
    assert (done.ret, "outcome" in done.stdout.str()) == (80, True)


def test_a_wrong_scenario_is_named_without_a_traceback(tests: pytest.Pytester) -> None:
    (tests.path / "tests" / "scenarios" / "bad.yaml").write_text(OWN.replace("do: kill", "doo: kill"))
    words = {
        "kill-midle-stage": "no scenario is called 'kill-midle-stage' (did you mean 'kill-middle-stage'?)",
        "own.yaml": "no file tests/own.yaml: a path is relative to the folder of the test file",
        "scenarios/bad.yaml": "tests/scenarios/bad.yaml:",
    }
    text = "".join(
        f"def test_{number}(bamboo_scenario):\n    bamboo_scenario({scenario!r})\n"
        for number, scenario in enumerate(words)
    )
    said = output(tests, text, failed=len(words))
    assert [each for each in words.values() if each not in said] == []
