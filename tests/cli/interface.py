"""The interface of the program as text: commands with their options, exit codes, kinds of records with their fields.

`python -m tests.cli.interface > tests/cli/interface.txt` writes the text again, when a change of it is wanted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any

from bamboo_cli.app import COMMANDS, load
from engine.codec.records import RECORDS
from engine.core.errors import ExitCode


def interface() -> str:
    """Returns the text."""
    lines = [line for name in sorted(COMMANDS) for line in _of_command(f"bamboo {name}", load(name))]
    lines += [f"exit code {code.value}: {code.name}" for code in ExitCode]
    for kind in sorted(RECORDS):
        made = RECORDS[kind]
        given = [f"{each.name}: {each.type}{_default(each)}" for each in fields(made)]
        lines += [f"record {kind}", *(f"  {each}" for each in given)]
    return "\n".join(lines) + "\n"


def _default(field: Any) -> str:
    return "" if field.default is MISSING else f" = {field.default!r}"


def _type_of(option: Any) -> str:
    return getattr(getattr(option, "type", None), "name", "") or "value"


def _of_command(line: str, command: Any) -> Iterator[str]:
    yield line
    for each in command.params:
        names = " ".join([*each.opts, *each.secondary_opts])
        kinds = [_type_of(each), *(["needed"] if each.required else []), *(["many"] if each.multiple else [])]
        if each.nargs != 1:
            kinds.append(f"{each.nargs} values")
        if getattr(each, "hidden", False):
            kinds.append("hidden")
        yield f"  {names} ({', '.join(kinds)}): {getattr(each, 'help', '') or ''}".rstrip()
    for name, sub in sorted(getattr(command, "commands", {}).items()):
        yield from _of_command(f"{line} {name}", sub)


if __name__ == "__main__":
    print(interface(), end="")
