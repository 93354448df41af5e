"""Writes scenarios as YAML."""

from __future__ import annotations

from typing import Any

import yaml


def scenario_text(values: dict[str, Any]) -> str:
    """Returns plain values of a scenario as a YAML file."""
    return str(yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=100, allow_unicode=False))
