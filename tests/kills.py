"""Kills as the command line spells them, as concrete faults."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.faults.expansion import expand
from engine.core.faults.fault import Fault, slot_owner
from engine.core.faults.kill_text import kill_moment, kill_scenario
from engine.core.job.job import Job


def parse_kills(texts: Sequence[str], job: Job) -> tuple[Fault, ...]:
    """Returns faults that can all strike; raises UserError with every problem."""
    return expand(kill_scenario(texts, job), job.seed)


def parse_kill(text: str, job: Job) -> Fault:
    """Returns one fault, whether it can strike or not."""
    moment = kill_moment(text, job)
    return Fault(text.strip(), moment, (slot_owner(moment.action),))
