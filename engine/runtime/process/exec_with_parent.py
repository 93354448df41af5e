"""``python -m ...exec_with_parent PID COMMAND...`` executes COMMAND, which the kernel kills when PID ends.

PID must be the parent, and its main thread must have started this process: the kernel watches that thread. This is a
program of its own because a process with threads must run no code between fork and exec.
"""

from __future__ import annotations

import os
import sys

from engine.runtime.process.interrupts import ignore_ctrl_c
from engine.runtime.process.prctl import die_with_parent

if __name__ == "__main__":
    ignore_ctrl_c()
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606 that is the purpose
