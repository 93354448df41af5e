"""Colours on a terminal: written without NO_COLOR, and by no command with NO_COLOR or on a dumb terminal."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from bamboo_cli.run_result import with_cost
from bamboo_cli.tables import BAD, STRONG, say
from tests.cli.pseudo_terminal import shown_by
from tests.report.made_up import MadeUpRun, make_run

# Runs commands one after another, and calls the functions that print in commands that take longer. The checks of doctor
# are made up for the same reason.
PROGRAM = """
import json, sys
from pathlib import Path
from bamboo_cli.__main__ import main
from bamboo_cli.bench import _print_table
from bamboo_cli.matrix import _tell
from bamboo_cli.live import LivePicture
from engine.bench.figures import BenchRow
from engine.core.checks.cell_result import CellResult
from engine.core.job.job import Job
from engine.runtime.agent.run_state import RunState
from engine.runtime.agent.run_state import RunView, WorkerView
from engine.harness import host_checks
from engine.runtime.process.progress_board import Progress

found = [host_checks.HostCheck("a", each, "b", "c") for each in ("ok", "warn", "missing")]
host_checks.check_host = lambda results: found

def call(words):
    sys.argv = ["bamboo", *words]
    try:
        main()
    except SystemExit:
        sys.stdout.flush()

job = Job(stages=2, steps=9)
workers = [WorkerView(each, 100, ((0, each),), ("running", "dead")[each], Progress(1, 0, ""), 0, 0) for each in (0, 1)]
for words in json.loads(sys.argv[1]):
    print("\\n$", *words, flush=True)
    call(words)
print("\\n$ live", flush=True)
with LivePicture(job, Path("no events")) as picture:
    picture.show(RunView(RunState(job, losses=[0.5]), tuple(workers)))
print("\\n$ matrix", flush=True)
for result in ("passed", "failed", "invalid"):
    _tell(1, 3, CellResult("cell", result, "", "why", "kill", 1.0, 0, "run"), 2.0)
print("\\n$ bench", flush=True)
_print_table([BenchRow("case", "ms", 1.0, 2.0, 0.5, 1.0, met, 3) for met in (True, False)])
"""


COLOURS = re.compile(r"\x1b\[(?:\d+;)*[349][0-7][\d;]*m")  # bold and dim are no colours


def shown(results: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns for each command its output on a terminal."""
    make_run(results, MadeUpRun(dead=((5, 2),)).events())
    place = ["--results", str(results)]
    commands = [
        *(["report", *place], ["compare", "latest", "latest", *place], ["status", *place], ["doctor", *place]),
        *(["run", "--stages", "0"], ["run", "--stagse", "0"]),
    ]
    text = shown_by([sys.executable, "-c", PROGRAM, json.dumps(commands)], environment=environment)
    _, *parts = re.split(r"^\$ ", text, flags=re.MULTILINE)
    assert len(parts) == len(commands) + 3, text
    return {part.partition("\n")[0].removesuffix(f" --results {results}"): part.partition("\n")[2] for part in parts}


def test_commands_colour_a_terminal(tmp_path: Path) -> None:
    plain = {command for command, text in shown(tmp_path, {}).items() if not COLOURS.search(text)}
    assert plain == {"run --stages 0", "compare latest latest"}


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=["NO_COLOR", "dumb"])
def test_no_command_colours_when_it_must_not(tmp_path: Path, environment: dict[str, str]) -> None:
    """Before, report, doctor, compare, bench and the progress of a matrix were green with NO_COLOR."""
    found = {command: COLOURS.findall(text) for command, text in shown(tmp_path, environment).items()}
    assert {command: codes for command, codes in found.items() if codes} == {}


def test_a_pipe_has_colours_only_if_they_are_forced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for forced, text in (("", "red"), ("1", "\x1b[31mred\x1b[0m")):
        monkeypatch.setenv("FORCE_COLOR", forced)
        monkeypatch.setenv("TERM", "xterm")
        say(("red", BAD), " " + "word " * 60)
        shown = capsys.readouterr().out
        assert shown.startswith(f"{text} word")
        assert shown.count("\n") == 1


def test_a_sentence_wraps_between_words_on_a_terminal() -> None:
    """Before, the sentence of a report broke in the middle of a number."""
    text = "Worker 1 was lost; training stalled for 1234.5 ms. " * 9
    program = f"from bamboo_cli.tables import say; say({text!r})"
    lines = shown_by([sys.executable, "-c", program], columns=60).splitlines()
    assert all(len(line) <= 60 for line in lines)
    assert " ".join(lines).split() == text.split()


def test_the_cost_of_a_recovery_is_in_bold() -> None:
    line = "worker 2 died; training stalled for at least 120 ms, 0 steps lost"
    assert with_cost(line) == ("worker 2 died; training stalled for ", ("at least 120 ms", STRONG), ", 0 steps lost")
    assert "".join(part if isinstance(part, str) else part[0] for part in with_cost("worker 2 died")) == "worker 2 died"
