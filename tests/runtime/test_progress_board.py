"""The progress board: lines written in one process are read in another, and nothing has a name."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from engine.core.action import WHOLE_STAGE, Action, Op
from engine.runtime.process.progress_board import Progress, ProgressBoard
from tests.runtime.peers import PeerServer


@pytest.fixture
def board() -> Iterator[ProgressBoard]:
    made = ProgressBoard.create(3)
    yield made
    made.close()


def test_a_new_board_is_empty(board: ProgressBoard) -> None:
    assert [board.read(line) for line in range(3)] == [Progress(0, 0, "")] * 3


def test_lines_do_not_touch_each_other(board: ProgressBoard) -> None:
    for line in (1, 0, 2):
        board.begin(line, 2**40 + line, f"{line}F7", (0, 10 + line, 0, False, 0, 0))
    board.begin(1, 5, "1B3", (0, 12, 0, False, 0, 0))
    assert [board.read(line) for line in range(3)] == [
        Progress(10, 2**40, "0F7"),
        Progress(12, 5, "1B3"),
        Progress(12, 2**40 + 2, "2F7"),
    ]


def test_a_shorter_action_leaves_nothing_of_a_longer_one(board: ProgressBoard) -> None:
    board.begin(0, 1, "12REDUCE_GRAD@10", (0, 1, 0, False, 0, 0))
    board.begin(0, 2, "1F0", (0, 1, 0, False, 0, 0))
    assert board.read(0).action == "1F0"


@pytest.mark.parametrize("op", Op)
def test_an_action_of_a_job_of_a_usual_size_fits(board: ProgressBoard, op: Op) -> None:
    is_whole_stage = op in (Op.REDUCE_GRAD, Op.COMMIT, Op.STEP, Op.CHECKPOINT)
    text = str(Action(63, op, WHOLE_STAGE if is_whole_stage else 511, pipeline=7))
    board.begin(0, 1, text, (0, 1, 0, False, 0, 0))
    assert board.read(0).action == text


def writes(fd: int) -> int:
    board = ProgressBoard(fd, 3)
    board.begin(2, 42, "3SEND_B1", (0, 41, 0, False, 0, 0))
    board.close()
    return os.getpid()


def test_another_process_writes_what_this_one_reads(peers: PeerServer, board: ProgressBoard) -> None:
    assert peers.start(writes, fds=[board.fd]).result() != os.getpid()
    assert board.read(2) == Progress(41, 42, "3SEND_B1")
    assert board.read(1) == Progress(0, 0, "")


def test_the_memory_has_no_name_and_is_gone_with_its_descriptor() -> None:
    board = ProgressBoard.create(2)
    inode = f" {os.fstat(board.fd).st_ino} "  # a job of threads may have left another board to the garbage collector
    assert os.readlink(f"/proc/self/fd/{board.fd}") == "/memfd:bamboo-progress (deleted)"
    with open("/proc/self/maps") as maps:
        assert inode in maps.read()
    board.close()
    with open("/proc/self/maps") as maps:
        assert inode not in maps.read()
