"""Records the two pictures of README.md from one real run with a kill: `python docs/pictures/record.py`.

`live-table.svg` is the terminal of that run a few steps after the kill. A headless chromium takes `timeline.png`, the
top of the report. The run, its twin and its report lie in a temporary folder, which is deleted.
"""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURES = Path(__file__).resolve().parent
COMMAND = ("run", "--steps", "60", "--kill", "30:2:B:3", "--name", "demo")
COLUMNS, ROWS = 120, 30
IS_TO_BE_SEEN = re.compile(r"step 3[6-9]/.*now worker 1.*^ +3 ", re.DOTALL | re.MULTILINE)
TOKEN = re.compile(r"\x1b\[\??([0-9;]*)([A-Za-z])|(\r)|(\n)|([^\x1b\r\n]+)")
STYLE = re.compile(r"\x1b\[[0-9;]*m")
FONT_FACE = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)  # a page on the network, which a picture does not need


class Screen:
    """The lines of a terminal; knows the few sequences that a live table writes."""

    def __init__(self) -> None:
        self.lines = [""]
        self._row = 0

    def write(self, text: str) -> None:
        """Takes what a program has written."""
        for numbers, letter, home, newline, plain in TOKEN.findall(text):
            if letter == "A":
                self._row = max(self._row - int(numbers or 1), 0)
            elif letter == "K":
                self.lines[self._row] = ""
            elif letter == "m":
                self.lines[self._row] += f"\x1b[{numbers}m"
            elif newline:
                self._row += 1
                self.lines += [""] * (self._row == len(self.lines))
            elif plain and not home:
                self.lines[self._row] += plain


def terminal_of(command: list[str], folder: Path) -> list[str]:
    """Runs a command in a terminal of its own; returns its lines once the table shows the heir."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
        os.execv(command[0], command)  # noqa: S606
    screen, shown = Screen(), []
    while True:
        try:
            text = os.read(terminal, 1 << 16).decode()
        except OSError:  # the command has ended
            break
        screen.write(text)
        if not shown and IS_TO_BE_SEEN.search(STYLE.sub("", "\n".join(screen.lines))):
            shown = list(screen.lines)
    os.waitpid(child, 0)
    return shown


def screenshot(page: Path, picture: Path, size: tuple[int, int]) -> None:
    """Has a headless chromium write a picture of a page, in pixels of width and height; exits if there is none."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit(f"found no chromium: {picture.name} stays as it is")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={size[0]},{size[1]}"]
    options += ["--virtual-time-budget=8000", f"--screenshot={picture}"]
    subprocess.run([chromium, *options, page.as_uri()], check=True, stderr=subprocess.DEVNULL)


def main() -> None:
    """Writes both pictures."""
    bamboo = str(Path(sys.executable).parent / "bamboo")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = terminal_of([bamboo, *COMMAND], folder)
        console = Console(record=True, width=COLUMNS, file=(folder / "seen").open("w"), force_terminal=True)
        console.print(f"$ bamboo {' '.join(COMMAND[:-2])}", highlight=False)
        for line in lines:
            console.print(Text.from_ansi(line), highlight=False)
        svg = FONT_FACE.sub("", console.export_svg(title="bamboo run"))
        (PICTURES / "live-table.svg").write_text(svg, encoding="utf-8")
        subprocess.run([bamboo, "report"], cwd=folder, check=True)
        page = (folder / "results" / "latest").resolve() / "report.html"
        screenshot(page, PICTURES / "timeline.png", (1200, 860))


if __name__ == "__main__":
    main()
