"""The diagram of the membership protocol in mermaid, made from its table; docs/protocol.md shows it."""

from __future__ import annotations

from itertools import product

from engine.core.protocol.membership import TABLE
from engine.core.protocol.state import Phase, Rule


def picture() -> str:
    """Returns a state diagram of the phases; its arrows are the events that change the phase."""
    arrows: dict[tuple[Phase, Phase], list[str]] = {}
    for (phase, event), rule in TABLE.items():
        for target in rule.leads_to if isinstance(rule, Rule) else ():
            arrows.setdefault((phase, target), []).append(_words(event.__name__.removesuffix("Message")))
    lines = ["stateDiagram-v2", *(f'    state "{phase}" as {_name(phase)}' for phase in Phase if " " in phase)]
    lines.append(f"    [*] --> {_name(Phase.FORMING)}")
    for phase, target in product(Phase, Phase):
        if (phase, target) in arrows:
            lines.append(f"    {_name(phase)} --> {_name(target)}: {', '.join(arrows[phase, target])}")
    lines += [f"    {phase} --> [*]" for phase in (Phase.FINISHED, Phase.HALTED)]
    return "\n".join(["```mermaid", *lines, "```"])


def _name(phase: Phase) -> str:
    return phase.replace(" ", "_")


def _words(name: str) -> str:
    """Returns ``step committed`` for ``StepCommitted``."""
    return "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in name).strip()
