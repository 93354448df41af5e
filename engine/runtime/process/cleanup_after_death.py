"""``python .../cleanup_after_death.py FD FOLDER`` deletes FOLDER when the last writer of the pipe FD has ended.

The launcher and the store that writes to the folder hold the pipe open. After SIGKILL of the launcher only a process
that outlives it can delete files; and a launcher that ends by itself waits for no disk.

Rule: this file imports nothing, and is run as a file, because it starts beside every run: an import costs a launch more
than the rest of this process. Ctrl-C is blocked, as its parent has left it.
"""

import os
import sys


def main(fd: int, folder: str) -> None:
    """Waits for the end of the pipe, then deletes the folder; does not follow links."""
    os.read(fd, 1)
    for path, folders, files in os.walk(folder, topdown=False):
        for remove, names in ((os.unlink, files), (os.unlink, folders), (os.rmdir, folders)):
            for name in names:
                _try(remove, f"{path}/{name}")
    _try(os.rmdir, folder)


def _try(remove, path):  # type: ignore[no-untyped-def]  # types need an import
    try:
        remove(path)
    except OSError:  # a link to a folder is removed as a file, and a folder is none
        return


if __name__ == "__main__":
    with open("/proc/self/comm", "w", encoding="ascii") as name:  # as `name_process` does, but without ctypes
        name.write("bamboo-remover")
    main(int(sys.argv[1]), sys.argv[2])
