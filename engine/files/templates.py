"""Templates of plain text, such as scripts and YAML; each lies beside the module that fills it in."""

from __future__ import annotations

import shlex
from typing import Any

import yaml


def rendered(package: str, name: str, **values: Any) -> str:
    """Returns a template of a package, filled in; it quotes for itself, by the filters `shell`, `repr` and `yaml`."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(  # noqa: S701 - no HTML
        loader=PackageLoader(package, ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"shell": _shell, "repr": repr, "yaml": _yaml}
    return environment.get_template(name).render(values)


def _shell(words: Any) -> str:
    """Returns words, or one word, as a shell reads them."""
    return shlex.quote(words) if isinstance(words, str) else shlex.join(words)


class _Readable(yaml.SafeDumper):
    """Writes a text of several lines as lines."""


def _as_lines(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Readable.add_representer(str, _as_lines)


def _yaml(value: Any) -> str:
    text = yaml.dump(value, Dumper=_Readable, sort_keys=False, width=120)
    return text.removesuffix("...\n").removesuffix("\n")
