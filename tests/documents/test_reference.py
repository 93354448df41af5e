"""The reference pages are those that the program yields: a new field, key, command or record needs no hand."""

from __future__ import annotations

import re
from dataclasses import fields
from functools import cache
from typing import Any

import pytest

from bamboo_cli.app import COMMANDS
from engine.codec.records import RECORDS
from engine.core.errors import ExitCode
from engine.core.job import job as jobs
from engine.core.job.job import Job
from engine.files.jobs.job_value import FIELD_HELP
from engine.runtime.faults.registry import kinds
from tests.documents import reference
from tests.looped import looped

pages = cache(reference.pages)


@looped("name", lambda: sorted(pages()))
def test_a_page_is_the_generated_one(name: str) -> None:
    written = reference.place(name).read_text(encoding="utf-8")
    assert written.splitlines() == pages()[name].splitlines(), "make reference"


def test_no_page_is_left_over() -> None:
    written = {path.name for path in reference.FOLDER.glob("*.md")}
    assert written == {*pages(), "exit-codes.md"} - {*reference.AT_ROOT}


def test_pages_have_every_part() -> None:
    texts = pages()
    assert [each.name for each in fields(Job) if f"| `{each.name}` |" not in texts["job.md"]] == []
    assert [kind for kind in kinds() if f"| `{kind}` |" not in texts["scenarios.md"]] == []
    assert [kind for kind in RECORDS if f"| `{kind}` |" not in texts["records.md"]] == []
    assert "| `cases[].only` |" in texts["scenarios.md"] and "| `expect.recovery.max` |" in texts["scenarios.md"]
    assert "## `bamboo.train`" in texts["python.md"] and "`--kill STEP" in texts["commands.md"]
    assert len(ExitCode) == 20


def test_agents_get_every_command_every_code_and_every_page() -> None:
    agents, index = pages()["AGENTS.md"], pages()["llms.txt"]
    assert [each for each in COMMANDS if f"| `bamboo {each}" not in agents] == ["bench"]
    assert {f"{int(each)} {each.name}" for each in ExitCode if each.name in ("USAGE", "STATE_LOST", "INTERNAL")} <= {
        *re.findall(r"^\| (\d+ [A-Z_]+) \|", agents, re.MULTILINE)
    }
    assert len(agents.splitlines()) < 100, "it is read as a whole, with each task"
    docs = {path.relative_to(reference.ROOT).as_posix() for path in reference.ROOT.glob("docs/*.md")}
    assert docs <= {*re.findall(r"\]\(([^)]+)\)", index)}
    assert [
        line for line in index.splitlines() if line.startswith("- ") and not re.fullmatch(r"- \[.+\]\(.+\): .+", line)
    ] == []


def test_a_new_field_gets_a_row_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FIELD_HELP, "stages", "another | meaning")
    monkeypatch.setitem(jobs.AT_MOST, "stages", 7)
    (row,) = [each for each in reference.job_fields() if each["name"] == "stages"]
    assert (row["flag"], row["default"], row["bounds"]) == ("--stages", "4", "1 to 7")
    assert row["meaning"] == "another \\| meaning"


@pytest.mark.parametrize(
    "shape",
    [
        {"properties": {"at": {"type": "object", "properties": {"step": {"type": "integer"}}, "required": ["step"]}}},
        {
            "$defs": {"At": {"type": "object", "properties": {"step": {"type": "integer"}}, "required": ["step"]}},
            "properties": {"at": {"anyOf": [{"$ref": "#/$defs/At"}, {"type": "null"}]}},
        },
    ],
)
def test_keys_are_found_in_both_shapes_of_a_schema(shape: dict[str, Any]) -> None:
    rows = [(each["key"], each["type"], each["required"]) for each in reference.keys_of(shape)]
    assert rows == [("at", "mapping", ""), ("at.step", "whole number", "yes")]
