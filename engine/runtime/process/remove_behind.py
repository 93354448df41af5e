"""``python .../remove_behind.py FD FOLDER`` deletes FOLDER when the last writer of the pipe FD has ended.

The launcher and the store that writes to the folder hold the pipe open. A launcher that ends by itself deletes the
folder and then kills this process. After SIGKILL of the launcher only a process that outlives it can delete files.

Rule: this file imports nothing until then, and is run as a file, because it starts beside every run: an import costs a
launch more than the rest of this process. Ctrl-C is blocked, as its parent has left it.
"""

import os
import sys


def main(fd: int, folder: str) -> None:
    """Waits for the end of the pipe, then deletes the folder; does not follow links."""
    os.read(fd, 1)
    if os.path.isdir(folder):
        import shutil

        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    with open("/proc/self/comm", "w", encoding="ascii") as name:  # as `name_process` does, but without ctypes
        name.write("bamboo-remover")
    main(int(sys.argv[1]), sys.argv[2])
