"""The picture of the membership protocol in docs/protocol.md is the one that the table draws."""

from __future__ import annotations

from pathlib import Path

from engine.core.protocol.membership import TABLE
from engine.core.protocol.state import Rule
from tests.core.membership_diagram import picture

PAGE = Path(__file__).resolve().parents[2] / "docs" / "protocol.md"
OPENING, CLOSING = "<!-- membership -->", "<!-- /membership -->"


def test_the_picture_shows_every_change_of_phase() -> None:
    lines = picture().splitlines()
    pairs = {
        (phase, target) for (phase, _), rule in TABLE.items() if isinstance(rule, Rule) for target in rule.leads_to
    }
    for phase, target in pairs:
        arrow = f"    {phase} --> {target}: ".replace("failing over", "failing_over")
        assert len([line for line in lines if line.startswith(arrow)]) == 1
    assert "    running --> reconfiguring: step committed" in lines
    assert "    failing_over --> failing_over: exit seen, lease expired, tick, takeover" in lines
    assert len([line for line in lines if "-->" in line]) == len(pairs) + 3


def test_the_page_shows_the_picture() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert OPENING in text and CLOSING in text, f"{PAGE.name} lacks {OPENING} or {CLOSING}"
    shown = text.partition(OPENING)[2].partition(CLOSING)[0]
    assert shown.strip() == picture()
