"""The options that ask for notices: what they take, and every problem at once."""

from __future__ import annotations

import pytest

from bamboo_cli.run_options import DEFAULT_GRACE, SpotCloud, asking, grace_on
from engine.core.errors import UserError
from engine.core.hosts.notice_answer import CLOUDS, NoticeFrom


def test_a_command_or_a_url_or_none() -> None:
    assert asking(None, None, None) is None
    assert asking("sh -c 'echo 1'", None, "200ms") == NoticeFrom(("sh", "-c", "echo 1"), "", 0.2)
    assert asking(None, "http://127.0.0.1:80/x", None) == NoticeFrom((), "http://127.0.0.1:80/x", 5.0)
    assert asking(None, "http://[fd00:ec2::254]/x", None) == NoticeFrom((), "http://[fd00:ec2::254]/x", 5.0)


def test_a_cloud_sets_the_address_the_interval_and_the_grace() -> None:
    assert [*CLOUDS] == [*SpotCloud]
    for name, cloud in CLOUDS.items():
        assert asking(None, None, None, spot=name) == cloud.source
        assert cloud.source.name == "--spot"
        assert grace_on(name, DEFAULT_GRACE) == cloud.grace
    assert grace_on("gcp", "45s") == "45s" and grace_on(None, DEFAULT_GRACE) == DEFAULT_GRACE
    assert asking(None, None, "2s", spot="azure") == CLOUDS["azure"].source._replace(every_s=2.0)
    with pytest.raises(UserError, match="--spot: expected no other source of notices with it"):
        asking(None, "http://host/x", None, spot="aws")
    with pytest.raises(UserError, match="--spot: expected workers that are processes"):
        asking(None, None, None, in_process=True, spot="aws")


def test_all_problems_come_at_once() -> None:
    with pytest.raises(UserError) as caught:
        asking("no-such-program-of-mine -x", "file:///etc/passwd", "0s")
    wrong = [(each.field, each.expected) for each in caught.value.problems]
    assert [what for what, _ in wrong] == ["--notice-url", "--notice-command", "--notice-url", "--notice-every"]
    assert "http://" in wrong[2][1]


@pytest.mark.parametrize("command", ["'", " ", ""])
def test_a_command_that_is_none(command: str) -> None:
    """An empty one is a variable that was not set; the run went on without notices."""
    with pytest.raises(UserError, match="--notice-command"):
        asking(command, None, None)


@pytest.mark.parametrize("url", ["", "http://", "http:///path", "http://host:99999/", "http://a b/", "http://host:x/"])
def test_a_url_without_a_host(url: str) -> None:
    with pytest.raises(UserError, match="--notice-url: expected an address"):
        asking(None, url, None)


def test_a_url_with_a_password_is_refused_without_it() -> None:
    with pytest.raises(UserError, match="without a user and a password") as caught:
        asking(None, "http://me:secret@host/x", None)
    assert "secret" not in str(caught.value) and "http://host/x" in str(caught.value)


def test_what_would_have_no_effect_is_refused() -> None:
    with pytest.raises(UserError, match=r"--notice-every: expected --notice-command or --notice-url with it"):
        asking(None, None, "3s")
    with pytest.raises(UserError, match=r"--notice-url: expected workers that are processes, found --in-process"):
        asking(None, "http://host/x", None, in_process=True)
