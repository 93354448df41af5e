"""The reference pages (docs/reference), generated from the program: jobs, scenarios, commands, records, Python.

`python -m tests.documents.reference` writes every generated text of the repository again: these pages, the ones for
coding agents (AGENTS.md, llms.txt), the schemas in `scenarios/` and `tests/cli/interface.txt`.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from typer.testing import CliRunner

import bamboo
from bamboo_cli.app import COMMANDS, app, load
from bamboo_cli.job_options import FLAG_FIELDS
from engine.codec.records import RECORDS
from engine.core.history.run_records import StampedRecord
from engine.core.job import job as jobs
from engine.core.units import duration_text
from engine.files.jobs.job_value import FIELD_HELP, FIELD_TYPES
from engine.report.load import TABLES
from engine.runtime.faults.registry import kinds
from tests.cli.interface import interface
from tests.report.made_up import MadeUpRun
from tests.report.made_up import load as load_run

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "reference"
AT_ROOT = ("AGENTS.md", "llms.txt")
_TEMPLATES = Path(__file__).with_name("templates")
_TYPES = {int: "whole number", float: "number", str: "text", bool: "true or false", dict: "mapping"}
_FORMS = {
    "count": "whole number",
    "worker": "number of a worker",
    "number": "number",
    "duration": "duration",
    "text": "text",
}
_STAMPS = {field.name for field in fields(StampedRecord)}


def cell(text: object) -> str:
    """Returns a text that can stand in a cell of a table: one line, without a bar that would end the cell."""
    return re.sub(r"\s+", " ", str(text)).strip().replace("|", "\\|")


def paragraph(thing: Any) -> str:
    """Returns the first paragraph of a docstring, on one line."""
    return cell((inspect.getdoc(thing) or "").partition("\n\n")[0])


def job_fields() -> Iterator[dict[str, str]]:
    """Yields each field of a job: name, flag, type, default, bounds, meaning."""
    for field in fields(jobs.Job):
        kind = FIELD_TYPES[field.name]
        choices = "/".join(get_args(kind)) if get_origin(kind) is Literal else ""
        is_args = field.name in jobs.ARGS_FIELDS
        default = "{}" if is_args else json.dumps(field.default)
        flag = f"--{'no-' * (field.default is True)}{field.name.replace('_', '-')}"
        yield {
            "name": field.name,
            "flag": f"--set {field.name}.NAME=VALUE" if is_args else flag,
            "type": f"one of {choices}" if choices else _TYPES[get_origin(kind) or kind],
            "default": "" if default == '""' else default,
            "bounds": _bounds(field.name),
            "meaning": cell(FIELD_HELP[field.name]),
        }


def _bounds(name: str) -> str:
    least, most = jobs._AT_LEAST.get(name), jobs.AT_MOST.get(name)
    if least is None:
        return "" if most is None else f"at most {most:,}"
    return f"{least} or more" if most is None else f"{least} to {most:,}"


def schema_of(kind: str) -> Mapping[str, Any]:
    """Returns the JSON schema of a kind of file, as `bamboo schema` prints it."""
    found: Mapping[str, Any] = json.loads(CliRunner().invoke(app, ["schema", kind]).stdout)
    return found


def keys_of(schema: Mapping[str, Any], without: frozenset[str] = frozenset()) -> Iterator[dict[str, str]]:
    """Yields each key of a form, nested ones as ``faults[].at.step``: path, type, whether it is required, meaning."""
    yield from _keys(schema, schema.get("$defs", {}), "", without)


def _keys(part: Mapping[str, Any], shared: Mapping[str, Any], path: str, without: frozenset[str]) -> Iterator[Any]:
    for name, given in part.get("properties", {}).items():
        value = _resolved(given, shared)
        here, items = f"{path}{name}", _resolved(value.get("items", {}), shared)
        if here in without:
            continue
        needed = "yes" if name in part.get("required", ()) else ""
        yield {"key": here, "type": _type_of(value), "required": needed, "meaning": cell(value.get("description", ""))}
        yield from _keys(value, shared, f"{here}.", without)
        yield from _keys(items, shared, f"{here}[].", without)


def _resolved(value: Mapping[str, Any], shared: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a part of a schema without references, and without the null of a value that may be missing."""
    while True:
        if "$ref" in value:
            value = {**shared[value["$ref"].rpartition("/")[2]], **{k: v for k, v in value.items() if k != "$ref"}}
            continue
        either = [each for each in value.get("anyOf", ()) if each.get("type") != "null" and each.keys() != {"required"}]
        if len(either) > 1 and all("$ref" in each for each in either):  # the first of several forms tells a shared key
            forms = [_resolved(each, shared) for each in either]
            keys = {key: part for form in reversed(forms) for key, part in form["properties"].items()}
            in_order = dict.fromkeys(key for form in forms for key in form["properties"])
            needed = set.intersection(*({*form.get("required", ())} for form in forms))
            return {"type": "object", "properties": {key: keys[key] for key in in_order}, "required": needed}
        if len(either) != 1:
            return value
        value = {**{k: v for k, v in value.items() if k != "anyOf"}, **either[0]}


def _type_of(value: Mapping[str, Any]) -> str:
    if "const" in value:
        return cell(f"`{value['const']}`")
    if "enum" in value:
        return ", ".join(f"`{choice}`" for choice in value["enum"])
    names = value.get("type", [each.get("type", "text") for each in value.get("anyOf", ())] or "text")
    words = {"integer": "whole number", "string": "text", "array": "list", "object": "mapping", "boolean": "true/false"}
    return " or ".join(dict.fromkeys(words.get(name, name) for name in ([names] if isinstance(names, str) else names)))


def fault_kinds() -> Iterator[dict[str, str]]:
    """Yields each kind of fault with its parameters: form, default, meaning."""
    for kind in kinds().values():
        shown = []
        for each in kind.parameters:
            form = " or ".join(f"`{choice}`" for choice in each.choices) or _FORMS[each.form]
            default = "required" if each.required else "" if each.default is None else f"default `{_plain(each)}`"
            shown.append(f"`{each.name}` ({', '.join(filter(None, (form, default)))}): {each.about}")
        if kind.by == "bed":
            named = {"host": "`target: {host: ...}`", "worker": "`target: {worker: N}`"}
            shown.append(f"on hosts to break, `at: {{step, delay}}`; {named.get(kind.target, 'no target')}")
        yield {"name": kind.name, "about": cell(kind.about), "parameters": cell(". ".join(shown))}


def _plain(parameter: Any) -> str:
    is_time = parameter.form == "duration"
    return duration_text(parameter.default) if is_time else str(parameter.default)


def commands() -> Iterator[dict[str, Any]]:
    """Yields each command with its description, its examples and its own options: not those that are job fields."""
    for name in COMMANDS:
        yield from _commands(f"bamboo {name}", load(name))


def _commands(line: str, command: Any) -> Iterator[dict[str, Any]]:
    if not hasattr(command, "commands"):
        own = [each for each in command.params if getattr(each, "rich_help_panel", None) != "Job"]
        yield {
            "line": line,
            "help": re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(command.help or "")),
            "examples": re.sub(r"^Examples:", "", command.epilog or "").split("  |  ") if command.epilog else [],
            "takes_job": len(own) < len(command.params),
            "hidden": [each.name for each in own if each.name in FLAG_FIELDS],  # by flags of the command's own
            "options": [_option(each) for each in own if not getattr(each, "hidden", False)],
        }
    for name, sub in getattr(command, "commands", {}).items():
        yield from _commands(f"{line} {name}", sub)


def _option(each: Any) -> dict[str, str]:
    is_flag = each.opts[0].startswith("-")
    names = ", ".join([*each.opts, *each.secondary_opts]) if is_flag else ""
    shown = each.metavar or ("" if getattr(each, "is_flag", False) else "VALUE" if is_flag else each.name.upper())
    default = each.default if isinstance(each.default, (str, int, float, Path)) else ""
    default = "" if default in (False, "") or isinstance(default, bool) else str(getattr(default, "value", default))
    return {"names": cell(f"{names} {shown}"), "default": cell(default), "help": cell(getattr(each, "help", "") or "")}


def records() -> Iterator[dict[str, str]]:
    """Yields each kind of record of a run's events: kind, fields, meaning."""
    for kind, record in sorted(RECORDS.items()):
        own = [f"`{field.name}`" for field in fields(record) if field.name not in _STAMPS]
        yield {"kind": kind, "fields": ", ".join(own), "meaning": paragraph(record)}


def tables() -> Iterator[dict[str, str]]:
    """Yields each table of a run with its columns."""
    run = load_run(MadeUpRun(dead=((3, 1),)).events())
    for name in TABLES:
        yield {"name": name, "columns": ", ".join(f"`{column}`" for column in getattr(run, name).columns)}


def names() -> Iterator[dict[str, Any]]:
    """Yields each public name of `bamboo` with its signature, its docstring and its public methods."""
    for module in (bamboo, bamboo.testing):
        for name in sorted(module.__all__):
            thing = getattr(module, name)
            if not inspect.ismodule(thing):
                full = f"{module.__name__}.{name}"
                yield {"name": full, "signature": _signature(thing), "doc": _text(thing), "members": _members(thing)}


def _signature(thing: Any) -> str:
    if inspect.isclass(thing) and (is_dataclass(thing) or issubclass(thing, BaseException) or not _has_init(thing)):
        return ""
    shown: list[str] = []
    stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    for name, each in inspect.signature(thing).parameters.items():
        if name == "self":
            continue
        if each.kind is each.KEYWORD_ONLY and not any(part.startswith("*") for part in shown):
            shown.append("*")
        kind = "" if each.annotation is each.empty else f": {each.annotation}"
        default = "" if each.default is each.empty else f" = {each.default!r}"
        shown.append(stars.get(each.kind, "") + name + kind + default)
    return f"({', '.join(shown)})"


def _has_init(thing: Any) -> bool:
    return "__init__" in vars(thing) and not getattr(thing, "_is_protocol", False) and thing.__name__ != "TrainingRun"


def _text(thing: Any) -> str:
    return re.sub(r"(?<!\n)\n(?!\n)", " ", (inspect.getdoc(thing) or "").partition("\n\nRaises:")[0])


def _members(thing: Any) -> list[dict[str, str]]:
    if not inspect.isclass(thing) or issubclass(thing, int):
        return []
    own = {name: value for name, value in vars(thing).items() if not name.startswith("_") and inspect.getdoc(value)}
    return [
        {"name": name, "signature": cell(_signature(value) if callable(value) else ""), "doc": paragraph(value)}
        for name, value in own.items()
        if callable(value) or isinstance(value, property)
    ]


_EXIT_CODE = re.compile(r"^\| (?P<code>\d+) \| (?P<name>[A-Z_]+) \| .* \| (?P<do>[^|]*) \|$", re.MULTILINE)


def exit_codes() -> Iterator[dict[str, str]]:
    """Yields each exit code for which there is something to do, with links from the root of the repository."""
    table = (FOLDER / "exit-codes.md").read_text(encoding="utf-8")
    for row in _EXIT_CODE.finditer(table):
        if row["do"] != "-":
            yield row.groupdict() | {"do": row["do"].replace("](../", "](docs/")}


def documents(folder: str) -> Iterator[dict[str, str]]:
    """Yields the title, the path and the first sentence of each page in a folder of the repository."""
    for path in sorted({*(ROOT / folder).glob("*.md")} - {ROOT / each for each in AT_ROOT}):
        title, _, rest = path.read_text(encoding="utf-8").partition("\n")
        prose = re.sub(r"```[\s\S]*?```|^    .*$|^<!--.*$|^[|#!].*$", "", rest, flags=re.MULTILINE)
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cell(re.split(r"\n\s*\n", prose.strip())[0]))
        about = re.split(r"(?<=\.)\s", text)[0].strip("- .")
        yield {"title": title.lstrip("# "), "path": path.relative_to(ROOT).as_posix(), "about": about}


def pages() -> dict[str, str]:
    """Returns the text of each generated page by its name."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - Markdown of our own
    )
    environment.filters["cell"] = cell
    facts = {
        "job_fields": list(job_fields()),
        "scenario_keys": list(keys_of(schema_of("scenario"), _kind_keys())),
        "matrix_keys": list(keys_of(schema_of("matrix"))),
        "external_keys": list(keys_of(schema_of("external"), frozenset({"faults[].grace", "faults[].factor"}))),
        "kinds": list(fault_kinds()),
        "commands": list(commands()),
        "records": list(records()),
        "tables": list(tables()),
        "names": list(names()),
        "exit_codes": list(exit_codes()),
        "guides": [*documents("docs"), *documents("docs/how-to")],
        "references": list(documents("docs/reference")),
        "others": list(documents(".")),
    }
    found = {each.removesuffix(".j2"): environment.get_template(each) for each in environment.list_templates()}
    return {name: template.render(facts) for name, template in found.items()}


def place(name: str) -> Path:
    """Returns the place of a generated page."""
    return (ROOT if name in AT_ROOT else FOLDER) / name


def _kind_keys() -> frozenset[str]:
    """Returns the keys that the section of kinds explains: the job, and the parameters of a fault."""
    return frozenset({"job", *(f"faults[].{each.name}" for kind in kinds().values() for each in kind.parameters)})


def main() -> None:
    """Writes all generated texts."""
    for name, text in pages().items():
        place(name).write_text(text, encoding="utf-8")
    for kind in ("scenario", "matrix"):
        text = CliRunner().invoke(app, ["schema", kind]).stdout
        (ROOT / "scenarios" / f"{kind}.schema.json").write_text(text, encoding="utf-8")
    text = CliRunner().invoke(app, ["schema", "external"]).stdout
    (ROOT / "scenarios" / "external" / "scenario.schema.json").write_text(text, encoding="utf-8")
    (ROOT / "tests" / "cli" / "interface.txt").write_text(interface(), encoding="utf-8")


if __name__ == "__main__":
    main()
