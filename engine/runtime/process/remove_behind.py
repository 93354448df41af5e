"""``python -m ...remove_behind FD FOLDER`` deletes FOLDER when the last writer of the pipe FD has ended.

The launcher and the store that writes to the folder hold the pipe open. A launcher that ends by itself deletes the
folder and then kills this process. After SIGKILL of the launcher only a process that outlives it can delete files.
"""

from __future__ import annotations

import os
import sys

from engine.runtime.process.interrupts import ignore_ctrl_c


def main(fd: int, folder: str) -> None:
    """Waits for the end of the pipe, then deletes the folder; does not follow links."""
    os.read(fd, 1)
    if os.path.isdir(folder):
        import shutil  # it takes longer to import than this process to start

        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    ignore_ctrl_c()
    with open("/proc/self/comm", "w", encoding="ascii") as name:  # as `name_process` does, but without ctypes
        name.write("bamboo-remover")
    main(int(sys.argv[1]), sys.argv[2])
