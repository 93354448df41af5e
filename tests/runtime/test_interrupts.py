"""The signals to a launcher: which waits they break off, and the ends by force; each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAD = """
import os, signal, sys, time
from engine.runtime.process.interrupts import RunInterruptedError, answer_signals, breakable, holding, raising
def strike(number=signal.SIGINT):
    os.kill(os.getpid(), number)
"""
CASES = {
    "outside of a block the first one ends the process": ("answer_signals(); strike(); print('on')", 130, ""),
    "a block notes it": (
        "with holding() as found:\n    strike(); print(found.first.name, found.take().name)",
        0,
        "SIGINT SIGINT\n",
    ),
    "a wait is broken off": (
        "with holding():\n    try:\n        with breakable():\n            strike(signal.SIGTERM); time.sleep(60)\n"
        "    except RunInterruptedError as error:\n        sys.exit(error.exit_code)",
        143,
        "",
    ),
    "a wait after it is broken off too": (
        "with holding():\n    strike()\n    try:\n        with breakable():\n            print('waits')\n"
        "    except RunInterruptedError as error:\n        print(error)",
        0,
        "interrupted by SIGINT\n",
    ),
    "a wait has the time it is given": (
        "with holding() as found:\n    found.patience_s = 0.2\n    try:\n        with breakable():\n"
        "            strike(); print('waits', flush=True); time.sleep(60)\n"
        "    except RunInterruptedError as error:\n        print(error)",
        0,
        "waits\ninterrupted by SIGINT\n",
    ),
    "a wait of another thread is none of the main one": (
        "import threading\ndef other():\n    with breakable():\n        time.sleep(60)\n"
        "with holding():\n    try:\n        with breakable():\n            threading.Thread(target=other).start()\n"
        "            time.sleep(0.1); strike(signal.SIGTERM); time.sleep(60)\n"
        "    except RunInterruptedError as error:\n        print(error, flush=True); os._exit(error.exit_code)",
        143,
        "interrupted by SIGTERM\n",
    ),
    "a block that raises": (
        "with raising():\n    try:\n        strike(signal.SIGHUP)\n    finally:\n        print('ends')",
        129,
        "ends\n",
    ),
    "the third one ends by force after the last rites": (
        "with holding() as found, found.forcing(lambda number: print('rites', int(number), flush=True)):\n"
        "    strike(); strike(); strike(); time.sleep(60)",
        130,
        "rites 2\n",
    ),
    "a process that does not come back has a limit": (
        "with holding() as found:\n    found.limit_s = 0.2\n    strike()\n    while True:\n        pass",
        130,
        "",
    ),
    "a limit that is lifted after the signal counts": (
        "with holding() as found:\n    found.limit_s = 0.2\n    strike(); found.limit_s = 60.0\n"
        "    until = time.monotonic() + 0.5\n    while time.monotonic() < until:\n        pass\n    print('on')",
        0,
        "on\n",
    ),
    "nohup": (
        "signal.signal(signal.SIGHUP, signal.SIG_IGN); answer_signals(); strike(signal.SIGHUP); print('on')",
        0,
        "on\n",
    ),
    "a process that handles them itself gets its handlers back": (
        "with holding():\n    pass\nprint(signal.getsignal(signal.SIGINT) is signal.default_int_handler)",
        0,
        "True\n",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_signals(name: str) -> None:
    code, exit_code, told = CASES[name]
    begun_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", f"{HEAD}signal.signal(signal.SIGINT, signal.default_int_handler)\n{code}"],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (done.returncode, done.stdout) == (exit_code, told), done.stderr
    assert done.stderr in ("stopping; Ctrl-C again kills\n", "")
    assert time.monotonic() - begun_s < 40, "a sleep of 60 s went on"
