"""Answers to the question for a notice: nothing, worker numbers, or a notice for the host."""

from __future__ import annotations

from engine.core.hosts.notice_answer import MOST_BYTES, NoticeAnswer, answer_of
from tests.looped import looped


@looped("said", [b"", b" \n", b"FALSE", b"none", b"null", b"[]", b"{}", b"no\n"])
def test_nothing_and_a_word_for_no_are_no_notice(said: bytes) -> None:
    assert answer_of(said) is None


@looped(
    ("said", "workers"),
    [
        (b"[2, 0, 2]", (2, 0)),
        (b"2", (2,)),
        (b"0", (0,)),
        (b"worker 2\n", (2,)),
        (b"workers 1, 3 and 4", (1, 3, 4)),
        (b"1 2", (1, 2)),
        (b"TRUE", None),
        (b"true", None),
        (b"[true]", None),
        (b"[-1]", None),
        (b"[1.5]", None),
        (b'{"action": "stop", "time": "2026-11-23T10:00:00Z"}', None),
        (b"the machine ends at 10", None),
        (b"\xff\xfe", None),
        (b"[" * MOST_BYTES, None),
        (b"9" * 5000, None),
    ],
)
def test_numbers_name_workers_and_anything_else_concerns_the_host(said: bytes, workers: tuple[int, ...] | None) -> None:
    answer = answer_of(said)
    assert answer is not None and answer.workers == workers


@looped(
    ("event", "machine", "is_notice"),
    [
        ("", "mine", False),
        ('{"EventType": "Preempt", "Resources": ["mine"]}', "mine", True),
        ('{"EventType": "Preempt", "Resources": ["another"]}', "mine", False),
        ('{"EventType": "Preempt", "Resources": ["another"]}', "", True),
        ('{"EventType": "Freeze", "Resources": ["mine"]}', "mine", False),
        ('{"EventType": "Freeze", "Resources": ["mine"]}, {"EventType": "Terminate"}', "mine", True),
    ],
)
def test_only_an_event_that_ends_this_machine_is_a_notice(event: str, machine: str, is_notice: bool) -> None:
    """An empty list of scheduled events is no end of the run, nor is the end of another machine of the group."""
    answer = answer_of(f'{{"DocumentIncarnation": 1, "Events": [{event}]}}'.encode(), machine)
    assert (answer is not None) is is_notice and (answer is None or answer.workers is None)


def test_what_is_beyond_the_limit_does_not_count() -> None:
    assert answer_of(b" " * MOST_BYTES + b"1") is None
    assert answer_of(b"1" + b" " * MOST_BYTES + b"2") == NoticeAnswer((1,), "1")
