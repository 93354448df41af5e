"""The options that ask for notices: what they take, and every problem at once."""

from __future__ import annotations

import pytest

from bamboo_cli.options.notices import notices_from
from engine.core.agent.notice_answer import NoticeFrom
from engine.core.errors import UserError


def test_a_command_or_a_url_or_none() -> None:
    assert notices_from("", "", "5s") is None
    assert notices_from("sh -c 'echo 1'", "", "200ms") == NoticeFrom(("sh", "-c", "echo 1"), "", 0.2)
    assert notices_from("", "http://127.0.0.1/x", "5s") == NoticeFrom((), "http://127.0.0.1/x", 5.0)


def test_all_problems_come_at_once() -> None:
    with pytest.raises(UserError) as caught:
        notices_from("no-such-program-of-mine -x", "file:///etc/passwd", "0s")
    wrong = [(each.field, each.expected) for each in caught.value.problems]
    assert [what for what, _ in wrong] == ["--notice-url", "--notice-command", "--notice-url", "--notice-every"]
    assert "http://" in wrong[2][1]


@pytest.mark.parametrize("command", ["'", " "])
def test_a_command_that_is_none(command: str) -> None:
    with pytest.raises(UserError, match="--notice-command"):
        notices_from(command, "", "5s")
