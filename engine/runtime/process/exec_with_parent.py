"""A program that runs ``-m ...exec_with_parent PID COMMAND...`` becomes COMMAND, and dies with PID.

The kernel ends it when the thread that started it ends, however that comes about: PID must be the parent, and the
thread its main one. A step of its own, because nothing may run between fork and exec in a process that has threads.
"""

from __future__ import annotations

import os
import sys

from engine.runtime.process.interrupts import ignore_ctrl_c
from engine.runtime.process.kernel import die_with_parent

if __name__ == "__main__":
    ignore_ctrl_c()
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606 that is the purpose
