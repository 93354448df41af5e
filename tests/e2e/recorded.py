"""The events of a run as plain values, the actions of its files of steps among them in the order of time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.codec.records import encoded
from engine.files.events_file import read_events


def events_of(path: Path) -> list[dict[str, Any]]:
    """Returns the events of the run whose events file this is."""
    return [json.loads(encoded(each)) for each in read_events(path)]
