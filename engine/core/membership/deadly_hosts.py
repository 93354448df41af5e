"""Deadly hosts: those whose loss loses the state of a slot, because no member on another host holds its stage.

A run on one host has none: what ends its only host ends the run, and that is no matter of placement.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.core.membership.state import State
from engine.core.membership.verdicts import heirs
from engine.core.texts import numbered

NO_MORE = "the run survives the loss of any one host again"


def deadly_hosts(state: State) -> dict[str, tuple[int, ...]]:
    """Returns the deadly hosts by their names, each with the stages that are lost with it."""
    if len({*state.nodes.values()}) < 2:
        return {}
    there: dict[str, list[int]] = {}
    for worker in state.members:
        there.setdefault(state.nodes[worker], []).append(worker)
    stages = {host: {slot % state.options.stages for slot in heirs(state, there[host]).lost} for host in sorted(there)}
    return {host: tuple(sorted(lost)) for host, lost in stages.items() if lost}


def deadly_in_words(hosts: Mapping[str, tuple[int, ...]], noun: str) -> str:
    """Returns a sentence about each deadly host and its stages, which are each a `noun`; empty without one."""
    begin = "the run cannot survive the loss of host"
    return "; ".join(f"{begin} {host}: no other host holds {numbered(noun, of)}" for host, of in hosts.items())
