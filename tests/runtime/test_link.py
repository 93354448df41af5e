"""Links: whole messages with their descriptors, and what each end learns of the other's end."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterator

import pytest

from engine.core.errors import InvariantError
from engine.core.job.partition import MOST_LAYERS, partition
from engine.core.messages import CutMessage, ForkMessage, PingMessage, SuspicionMessage
from engine.runtime.process.link import Link, packet
from tests.runtime.peer_messages import Result, Word


@pytest.fixture
def pair() -> Iterator[tuple[Link, Link]]:
    near, far = Link.pair()
    yield near, far
    near.close()
    far.close()


@pytest.fixture
def unblocked() -> Iterator[tuple[Link, Link]]:
    near, far = Link.pair(blocking=False)
    yield near, far
    near.close()
    far.close()


def test_the_longest_partition_of_a_built_in_model_fits() -> None:
    names = [f"hidden{index}" for index in range(MOST_LAYERS)]
    assert packet(CutMessage(partition("uniform", 4096, names, ()), tuple(names)))


def test_messages_arrive_whole_and_in_order_both_ways(pair: tuple[Link, Link]) -> None:
    near, far = pair
    assert near.send(SuspicionMessage(1, "a\nb \u00e9", 2))
    assert near.send(PingMessage())
    assert far.send(Result({"a": [1, 2]}))
    assert far.receive() == SuspicionMessage(1, "a\nb \u00e9", 2)
    assert far.receive() == PingMessage()
    assert near.receive() == Result({"a": [1, 2]})


def test_bytes_that_are_no_message_are_refused(pair: tuple[Link, Link]) -> None:
    near, far = pair
    near.send_packet(b'{"kind":"gossip"}')
    with pytest.raises(InvariantError, match="gossip"):
        far.receive()


def test_a_large_message_is_one_message(pair: tuple[Link, Link]) -> None:
    near, far = pair
    text = "x" * 150_000
    near.send(Word(text))
    assert far.receive() == Word(text)


def test_a_message_that_fits_no_packet_is_a_bug(pair: tuple[Link, Link]) -> None:
    with pytest.raises(InvariantError, match=r"a message Word of \d+ bytes does not fit a packet"):
        pair[0].send(Word(secrets.token_hex(200_000)))


def test_descriptors_arrive_as_copies(pair: tuple[Link, Link]) -> None:
    near, far = pair
    pipes = [os.pipe() for _ in range(4)]
    near.send(ForkMessage("worker", "name"), [write_fd for _, write_fd in pipes])
    message, copies = far.receive_with_fds()
    assert message == ForkMessage("worker", "name")
    for number, ((read_fd, write_fd), copy) in enumerate(zip(pipes, copies, strict=True)):
        os.close(write_fd)
        os.write(copy, b"%d" % number)
        os.close(copy)
        assert os.read(read_fd, 9) == b"%d" % number
        assert os.read(read_fd, 9) == b"", "somebody still holds the other end"
        os.close(read_fd)


def test_the_end_of_the_other_is_none_after_what_it_said(pair: tuple[Link, Link]) -> None:
    near, far = pair
    near.send(Word("last"))
    near.close()
    assert far.receive() == Word("last")
    assert far.receive() is None
    assert far.send(Word("too late")) is False


def test_a_blocked_receive_ends_with_the_other_end(pair: tuple[Link, Link]) -> None:
    near, far = pair
    threading.Timer(0.05, near.close).start()
    assert far.receive() is None


def test_unread_messages_do_not_hide_the_end(pair: tuple[Link, Link]) -> None:
    near, far = pair
    far.send(Word("never read"))
    near.close()  # the kernel reports this as a reset
    assert far.receive() is None


def test_an_end_that_must_not_block_says_that_nothing_is_there(unblocked: tuple[Link, Link]) -> None:
    near, far = unblocked
    with pytest.raises(BlockingIOError):
        near.receive()
    far.send(Word("now"))
    assert near.receive() == Word("now")


def test_an_end_that_must_not_block_takes_one_that_never_reads_for_gone(unblocked: tuple[Link, Link]) -> None:
    near, far = unblocked
    sent = 0
    while near.send(Word("x" * 100_000)):
        sent += 1
        assert sent < 1000
    received = 0
    while received < sent:
        assert far.receive() == Word("x" * 100_000)
        received += 1


def test_a_link_from_a_descriptor_owns_it() -> None:
    near, far = Link.pair()
    fd = os.dup(far.fileno())
    far.close()
    with_fd = Link.from_fd(fd)
    assert with_fd.fileno() == fd
    near.send(Word("hello"))
    assert with_fd.receive() == Word("hello")
    with_fd.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert near.receive() is None
    near.close()


def test_descriptors_that_the_kernel_dropped_are_an_error(pair: tuple[Link, Link]) -> None:
    """The ninth descriptor of a worker, the network of its run, was lost without a word."""
    near, far = pair
    fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
    near.send(PingMessage(), fds[:16])
    assert len(far.receive_with_fds()[1]) == 16
    near.send(PingMessage(), fds)
    with pytest.raises(InvariantError, match="at most 16 descriptors"):
        far.receive_with_fds()
