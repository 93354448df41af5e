"""The results of a matrix for CI: JUnit, and the text of a GitHub summary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.etree import ElementTree as ET

from engine.core.checks.cell_result import CellResult, counts_text
from engine.core.texts import printable

# JUnit XML of a matrix for CI servers: one suite, one test case per cell that ran.
#
# Rules: a failed cell is a failure with its type; an invalid cell, which proved nothing, is an error; a cell that an
# interrupted matrix did not run is skipped. No character of a text steers a terminal, and XML can hold each.


def junit_xml(matrix: str, results: Sequence[CellResult], not_run: Sequence[str] = ()) -> str:
    """Returns the results of a matrix as a JUnit XML document; `not_run` names the cells without a result."""
    failed = sum(each.result == "failed" for each in results)
    invalid = sum(each.result == "invalid" for each in results)
    num_tests, num_skipped = len(results) + len(not_run), len(not_run)
    counts = {"tests": num_tests, "failures": failed, "errors": invalid, "skipped": num_skipped}
    counted = {name: str(count) for name, count in counts.items()}
    time = f"{sum(each.seconds for each in results):.3f}"
    suites = ET.Element("testsuites", {"name": "bamboo", **counted, "time": time})
    suite = ET.SubElement(suites, "testsuite", {"name": printable(matrix), **counted, "time": time})
    for each in results:
        _case(suite, each)
    for name in not_run:
        case = ET.SubElement(suite, "testcase", {"classname": "bamboo", "name": printable(name)})
        ET.SubElement(case, "skipped", {"message": "not run: the matrix was interrupted"})
    ET.indent(suites)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(suites, encoding="unicode") + "\n"


def _case(suite: ET.Element, result: CellResult) -> None:
    attributes = {"classname": f"bamboo.{printable(result.do)}", "name": printable(result.cell)}
    case = ET.SubElement(suite, "testcase", attributes | {"time": f"{result.seconds:.3f}"})
    properties = ET.SubElement(case, "properties")
    for name, value in (("seed", str(result.seed)), ("run", result.run)):
        ET.SubElement(properties, "property", {"name": name, "value": printable(value)})
    if result.result != "passed":
        tag = "failure" if result.result == "failed" else "error"
        kind = result.failure if result.result == "failed" else "invalid"
        text = printable(result.text)
        ET.SubElement(case, tag, {"type": kind, "message": text.partition("\n")[0]}).text = text


# The results of a matrix for GitHub Actions: the summary of a step, and annotations at lines of the matrix file.
#
# Rules: GitHub accepts a summary of at most a megabyte. A longer one is cut after a row and says so; failed cells come
# first. Text from outside is escaped, so that it cannot end a cell of the table or start a command.

MAX_BYTES = 1_000_000
_ORDER = {"failed": 0, "invalid": 1, "passed": 2}


def step_summary(matrix: str, results: Sequence[CellResult], max_bytes: int = MAX_BYTES) -> str:
    """Returns the summary as Markdown, of at most `max_bytes` bytes in UTF-8."""
    head = f"### bamboo matrix {_cell(matrix)}: {counts_text(results)}\n\n"
    head += "| cell | result | why | seconds | run |\n|---|---|---|---:|---|\n"
    rows = sorted(results, key=lambda result: _ORDER[result.result])
    text, size = [head], len(head.encode())
    for number, result in enumerate(rows):
        why = "" if result.result == "passed" else result.text[:500]
        row = f"| {_cell(result.cell)} | {_cell(result.verdict)} | {_cell(why)} | {result.seconds:.2f} "
        row += f"| {_cell(result.run)} |\n"
        rest = f"\ntruncated: {len(rows) - number} more cells are not shown\n"
        if size + len(row.encode()) + len(rest.encode()) > max_bytes:
            return "".join([*text, rest])
        text.append(row)
        size += len(row.encode())
    return "".join(text)


def error_commands(file: str, results: Sequence[CellResult]) -> Iterator[str]:
    """Yields a command for every cell that did not pass; it annotates the line of its case."""
    for result in results:
        if result.result != "passed":
            title = _property(f"{result.cell} {result.verdict}")
            yield f"::error file={_property(file)},line={max(1, result.line)},title={title}::{_data(result.text)}"


def _cell(text: str) -> str:
    plain = printable(text).replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
    return " ".join(plain.split())


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
