"""JUnit XML of a matrix for CI servers: one suite, one test case per cell that ran.

Rules: a failed cell is a failure with its type; an invalid cell, which proved nothing, is an error; a cell that an
interrupted matrix did not run is skipped. No character of a text steers a terminal, and XML can hold each.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree as ET

from engine.core.checks.cell_result import CellResult
from engine.core.texts import printable


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
