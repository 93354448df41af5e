"""The schema of scenario files allows the same files as the reader; the library's scenarios are valid."""

from __future__ import annotations

import json
import tomllib
from dataclasses import fields
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from engine.core.errors import UserError
from engine.core.job.job import Job
from engine.files.jobs.forms import job_schema, scenario_schema
from engine.files.jobs.library import library, library_names, scenario_names
from engine.files.jobs.scenario_file import load_scenario
from engine.files.strict_yaml import read_text
from tests.core.scenario_cases import KINDS
from tests.files.test_scenario_file import WHOLE


def test_the_schema_knows_every_field_and_allows_no_other() -> None:
    schema = scenario_schema(KINDS)
    assert schema["required"] == ["version", "name", "about"]
    assert schema["anyOf"] == [{"required": ["faults"]}, {"required": ["host_faults"]}]
    assert schema["additionalProperties"] is False
    by_kind = {name: schema["$defs"][name] for name in KINDS}
    listed = schema["properties"]["faults"]["items"]["anyOf"]
    assert [each["$ref"] for each in listed] == [f"#/$defs/{name}" for name in by_kind]
    common = by_kind["kill"]["properties"].keys()
    for name, item in by_kind.items():
        assert item["oneOf"] == [{"required": [each]} for each in ("at", "after", "every")]
        assert item["additionalProperties"] is False
        assert item["properties"]["do"]["const"] == name
        parameters = KINDS[name].parameters
        assert item["properties"].keys() - common == {each.name for each in parameters}
        assert item["required"] == ["do", *(each.name for each in parameters if each.required)]
    assert schema["$defs"]["Job"]["properties"]["redundancy"]["enum"] == ["none", "lazy", "eager", "reroute"]
    assert job_schema()["properties"]["version"]["const"] == 1
    assert job_schema()["properties"].keys() - {"version"} == {each.name for each in fields(Job)}
    assert json.loads(json.dumps(schema)) == schema


PLAIN_TYPES = {"string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,)}


def accepts(schema: dict[str, Any], value: Any, defs: dict[str, Any]) -> bool:
    """Says whether a JSON schema allows a value; knows the keywords of our schemas only."""
    if "$ref" in schema:
        return accepts(defs[schema["$ref"].removeprefix("#/$defs/")], value, defs)
    if "enum" in schema or "const" in schema:
        return value in schema.get("enum", [schema.get("const")])
    if not isinstance(schema.get("type"), str):
        choices = schema.get("anyOf") or [schema | {"type": each} for each in schema["type"]]
        return any(accepts(each, value, defs) for each in choices)
    if schema["type"] == "object":
        return isinstance(value, dict) and accepts_mapping(schema, value, defs)
    if schema["type"] == "array":
        good = isinstance(value, list) and len(value) >= schema.get("minItems", 0)
        return good and all(accepts(schema["items"], each, defs) for each in value)
    return type(value) in PLAIN_TYPES[schema["type"]] and value >= schema.get("minimum", value)


def accepts_mapping(schema: dict[str, Any], value: dict[str, Any], defs: dict[str, Any]) -> bool:
    known, rules = schema.get("properties"), {"oneOf": {1}, "anyOf": {1, 2}}
    if known is None:
        return True
    there = {rule: sum(each["required"][0] in value for each in schema.get(rule, ())) for rule in rules}
    return (
        all(name in value for name in schema.get("required", ()))
        and all(name in known and accepts(known[name], each, defs) for name, each in value.items())
        and all(there[rule] in good for rule, good in rules.items() if rule in schema)
    )


def test_file_and_schema_agree(tmp_path: Path) -> None:
    """The schema allows every value that the reader accepts, and the reader refuses every value that it forbids."""
    schema = scenario_schema(KINDS)
    defs = schema["$defs"]
    assert accepts(schema, read_text(WHOLE, "").value, defs)
    for job in ("job.yaml", {"from": "job.yaml", "steps": 3}):
        assert accepts(schema["properties"]["job"], job, defs)
    for old, new in (
        ("name: kill-middle-stage", "nmae: x"),
        ("version: 1", "version: 2"),
        ("action: B", "action: X"),
        ("for: 100ms", "grace: 100ms"),
        ("do: stop", "do: stpo"),
        ("count: 5", "count: 0"),
        ("about: one sentence\n", ""),
        ("seed: 7", "sed: 7"),
        ("outcome: recovered", "outcome: fine"),
        ("{fault: first, phase: replay}", "{fault: first}"),
    ):
        text = WHOLE.replace(old, new)
        assert text != WHOLE
        assert not accepts(schema, read_text(text, "").value, defs), new
        path = tmp_path / "case.yaml"
        path.write_text(text)
        with pytest.raises(UserError):
            load_scenario(str(path), KINDS)


def test_the_library_is_not_empty_and_says_why() -> None:
    for name in library_names():
        lines = (library() / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
        schema = "matrix" if name.startswith("matrix-") else "scenario"
        assert lines[0] == f"# yaml-language-server: $schema={schema}.schema.json"
        assert len([line for line in lines[1:8] if line.startswith("# ")]) >= 2, name
        assert f"name: {name}" in lines
    assert len(scenario_names()) >= 25


def test_a_wheel_has_the_whole_library() -> None:
    setuptools = tomllib.loads((library().parent / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert setuptools["package-dir"] == {"engine.scenarios": library().name}
    patterns = setuptools["package-data"]["engine.scenarios"]
    names = [path.relative_to(library()).as_posix() for path in library().rglob("*") if path.is_file()]
    left_out = [
        name
        for name in names
        if not any(fnmatch(name, each) and name.count("/") == each.count("/") for each in patterns)
    ]
    assert left_out == []
