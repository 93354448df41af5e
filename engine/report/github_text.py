"""The results of a matrix for GitHub Actions: the summary of a step, and annotations at lines of the matrix file.

Rules: GitHub accepts a summary of at most a megabyte. A longer one is cut after a row and says so; failed cells come
first. Text from outside is escaped, so that it cannot end a cell of the table or start a command.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.core.checks.cell_result import CellResult, counts_text
from engine.core.texts import printable

MAX_BYTES = 1_000_000
_ORDER = {"failed": 0, "invalid": 1, "passed": 2}


def step_summary(matrix: str, results: Sequence[CellResult], max_bytes: int = MAX_BYTES) -> str:
    """Returns the summary as Markdown, of at most `max_bytes` bytes in UTF-8."""
    head = f"### bamboo matrix {_cell(matrix)}: {counts_text(results)}\n\n"
    head += "| cell | result | why | seconds | run |\n|---|---|---|---:|---|\n"
    rows = sorted(results, key=lambda each: _ORDER[each.result])
    text, size = [head], len(head.encode())
    for number, each in enumerate(rows):
        row = f"| {_cell(each.cell)} | {_cell(each.verdict)} | {_cell(_why(each))} | {each.seconds:.2f} "
        row += f"| {_cell(each.run)} |\n"
        rest = f"\ntruncated: {len(rows) - number} more cells are not shown\n"
        if size + len(row.encode()) + len(rest.encode()) > max_bytes:
            return "".join([*text, rest])
        text.append(row)
        size += len(row.encode())
    return "".join(text)


def error_commands(file: str, results: Sequence[CellResult]) -> Iterator[str]:
    """Yields a command for every cell that did not pass; it annotates the line of its case."""
    for each in results:
        if each.result != "passed":
            title = _property(f"{each.cell} {each.verdict}")
            yield f"::error file={_property(file)},line={max(1, each.line)},title={title}::{_data(each.text)}"


def _why(result: CellResult) -> str:
    return "" if result.result == "passed" else result.text[:500]


def _cell(text: str) -> str:
    plain = printable(text).replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
    return " ".join(plain.split())


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
