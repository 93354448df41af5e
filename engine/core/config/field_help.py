"""The help texts of a job's fields, with the names of the built-in schedules."""

from __future__ import annotations

from dataclasses import fields

from engine.core.config.job import Job
from engine.core.schedules.registry import SCHEDULES

_SCHEDULES = ", ".join(sorted(SCHEDULES))
FIELD_HELP = {each.name: str(each.metadata["help"]).replace("{schedules}", _SCHEDULES) for each in fields(Job)}
