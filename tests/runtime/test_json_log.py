"""The log of a worker as JSON lines: whatever prints, warns or logs becomes an object with its place in the run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from bamboo_cli.live import WorkerOutput

PLACE = {"host": "h1", "worker": 3, "stage": 2, "epoch": 4, "step": 5}


def told(folder: Path, code: str, *, code_expected: int = 0) -> list[dict[str, Any]]:
    """Returns the lines of a process that runs `code` with such a log."""
    script = f"""
import logging, os, subprocess, sys, threading, traceback, warnings
from engine.runtime.process.json_log import JsonLog
log = JsonLog("h1", 3, lambda: (2, 4, 5))
{code}
log.end()
"""
    path = folder / "worker-3.log"
    with path.open("ab") as file:
        done = subprocess.run([sys.executable, "-c", script], stdout=file, stderr=file, timeout=30, check=False)
    assert done.returncode == code_expected, path.read_text()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        assert line.pop("time").endswith("+00:00")
        assert {name: line.pop(name) for name in PLACE} == PLACE
    return lines


def line(level: str, source: str, message: str) -> dict[str, str]:
    return {"level": level, "source": source, "message": message}


PRINTED = [
    ("print('a', 1)", [line("info", "stdout", "a 1")]),
    ("print('two\\nlines')", [line("info", "stdout", "two\nlines")]),
    ("print('b', file=sys.stderr)", [line("warning", "stderr", "b")]),
    ("print('begun', end='', flush=True)", [line("info", "stdout", "begun")]),
    ("print('\\r1 %', end='', flush=True); print('\\r2 %')", [line("info", "stdout", "2 %")]),
    ("print('\"q\" \\ud800 \\x1b[2J')", [line("info", "stdout", '"q" \ud800 \x1b[2J')]),
    ("logging.getLogger('mine').error('no %s', 'luck')", [line("error", "mine", "no luck")]),
    ("logging.getLogger('mine').info('not asked for')", []),
    ("logging.basicConfig(level='INFO', format='x %(message)s'); logging.info('c')", [line("info", "root", "c")]),
    ("warnings.warn_explicit('old', DeprecationWarning, 'm.py', 7)", []),
    (
        "warnings.warn_explicit('old', UserWarning, 'm.py', 7)",
        [line("warning", "warnings", "m.py:7: UserWarning: old")],
    ),
    ("try:\n 1 / 0\nexcept ZeroDivisionError:\n traceback.print_exc()", [line("error", "stderr", "")]),
    ("os.write(2, b'raw\\n'); log.copy()", [line("info", "output", "raw")]),
    (
        "print('kept', end='')\n"
        "if (pid := os.fork()) == 0:\n print('forked'); os._exit(0)\nos.waitpid(pid, 0)\nprint()",
        [line("info", "stdout", "forked"), line("info", "stdout", "kept")],
    ),
    (
        "subprocess.run(['sh', '-c', 'echo child; printf half']); print('after'); print('no end', end='')",
        [
            line("info", "output", "child"),
            line("info", "stdout", "after"),
            line("info", "stdout", "no end"),
            line("info", "output", "half"),
        ],
    ),
]


def test_what_is_printed_is_a_line_with_its_place(tmp_path: Path) -> None:
    expected = [each for _, lines in PRINTED for each in lines]
    for said, each in zip(lines := told(tmp_path, "\n".join(code for code, _ in PRINTED)), expected, strict=False):
        if not each["message"]:  # a traceback, of one line of the log
            assert said["message"].count("Error: ") == 1
            each["message"] = said["message"]
        assert said == each
    assert len(lines) == len(expected)


def test_what_a_killed_worker_has_printed_is_there(tmp_path: Path) -> None:
    code = "print('last words')\nos.write(1, b'of a library\\n')\nos.kill(os.getpid(), 9)"
    assert told(tmp_path, code, code_expected=-signal.SIGKILL) == [line("info", "stdout", "last words")]
    assert (tmp_path / "worker-3.out").read_text() == "of a library\n"


def test_threads_do_not_mix_their_lines(tmp_path: Path) -> None:
    code = """
def say(number):
    for each in range(200):
        print(f"{number} {each}", "x" * 300)
threads = [threading.Thread(target=say, args=(number,)) for number in range(4)]
[each.start() for each in threads]
[each.join() for each in threads]
"""
    messages = [each["message"] for each in told(tmp_path, code)]
    whole = {f"{number} {each} {'x' * 300}" for number in range(4) for each in range(200)}
    assert len(messages) == len(whole)
    assert set(messages) == whole


def test_the_screen_shows_the_messages(tmp_path: Path) -> None:
    said = json.dumps({"message": "one\ntwo"})
    (tmp_path / "worker-1.log").write_text(f"{said}\nTraceback of a start\n")
    (block,) = WorkerOutput(tmp_path, is_json=True).news()
    assert block.split("\n") == ["[1] one", "[1] two", "[1] Traceback of a start"]
