"""The reduction over pipelines, between real processes: added in pipeline order, whoever has which rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.core.ownership import Grid, Ownership
from engine.runtime.transport.transfers import ReduceGroup, gather_over_pipelines, mean_over_pipelines
from tests.runtime.peers import PeerServer, plane_of

STAGE = 1


def gradients_of(pipeline: int, shapes: list[list[int]]) -> list[Tensor]:
    """Returns gradients, some of which are not contiguous."""
    generator = torch.Generator().manual_seed(pipeline)
    made = [torch.randn(shape, generator=generator) for shape in shapes]
    return [
        each.transpose(0, -1).contiguous().transpose(0, -1) if number % 2 and each.dim() > 1 else each
        for number, each in enumerate(made)
    ]


def bits(tensors: list[Tensor]) -> list[list[int]]:
    return [tensor.contiguous().view(torch.int32).flatten().tolist() for tensor in tensors]


def expected(num_pipelines: int, shapes: list[list[int]], order: list[int] | None = None) -> list[list[int]]:
    """Returns the bits of the mean, added in pipeline order or in another."""
    means = []
    for parts in zip(*(gradients_of(each, shapes) for each in order or range(num_pipelines)), strict=True):
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        means.append(total / num_pipelines)
    return bits(means)


def reduces(prefix: str, worker: int, owners: list[int], ranks: list[int], shapes: list[list[int]]) -> Any:
    """Reduces twice over one plane; returns shapes, bits, what was gathered, and whether the local parts are intact."""
    num_pipelines = len(owners) // 2
    ownership = Ownership(Grid(2, 1, num_pipelines), tuple(owners))
    plane = plane_of(prefix, worker, ranks)
    group = ReduceGroup(plane.in_order, ownership, worker, STAGE)
    local = {each: gradients_of(each, shapes) for each in group.pipelines(worker)}
    answers = []
    for _ in range(2):
        endings = {each: (torch.tensor(each), torch.full((3,), 0.5 + each)) for each in local}
        gathered = gather_over_pipelines(group, endings)
        reduced = mean_over_pipelines(group, local)
        answers.append(
            [
                [list(each.shape) for each in reduced],
                bits(reduced),
                [[one.tolist(), other.tolist()] for one, other in gathered],
            ]
        )
        for each in reduced:
            each.zero_()  # the local ones must not be what was handed out
    assert answers[0] == answers[1]
    intact = all(bits(part) == bits(gradients_of(each, shapes)) for each, part in local.items())
    # A plane is closed when everybody has what they need.
    plane.release_sent()
    mean_over_pipelines(group, {each: [torch.zeros(1)] for each in local})
    plane.release_sent()
    plane.close()
    return [*answers[0], intact]


def reduced(peers: PeerServer, owners: list[int], ranks: list[int], shapes: list[list[int]]) -> list[list[int]]:
    """Reduces over one process for each owner of the stage; they must agree. Returns the bits."""
    num_pipelines = len(owners) // 2
    prefix = f"reduce/{owners}/{ranks}/{shapes}"
    workers = sorted(set(owners[STAGE::2]))
    started = [peers.start(reduces, prefix, each, owners, ranks, shapes) for each in workers]
    answers = [peer.result() for peer in started]
    for found_shapes, found_bits, gathered, intact in answers:
        assert found_shapes == shapes
        assert found_bits == answers[0][1]
        assert gathered == [[each, [0.5 + each] * 3] for each in range(num_pipelines)]
        assert intact, "a local gradient has changed"
    bits_found: list[list[int]] = answers[0][1]
    return bits_found


SHAPES = [[5, 7], [3], [], [2, 3, 4], [1]]


@pytest.mark.parametrize("ranks", [[1, 3, 5], [5, 3, 1], [3, 5, 1]])
def test_three_pipelines_add_in_pipeline_order_whatever_the_ranks(peers: PeerServer, ranks: list[int]) -> None:
    assert expected(3, SHAPES) != expected(3, SHAPES, order=[2, 1, 0]), "the order of adding does not show"
    assert expected(3, SHAPES) != expected(3, SHAPES, order=[1, 2, 0]), "the order of adding does not show"
    assert reduced(peers, [0, 1, 2, 3, 4, 5], ranks, SHAPES) == expected(3, SHAPES)


def test_it_does_not_matter_which_worker_owns_which_pipeline(peers: PeerServer) -> None:
    assert reduced(peers, [0, 5, 2, 1, 4, 3], [1, 3, 5], SHAPES) == expected(3, SHAPES)


@pytest.mark.parametrize("shapes", [[[1]], [[2]], [[4]], [[3], [0], [2, 0]]])
def test_gradients_smaller_than_the_number_of_pipelines_or_empty(peers: PeerServer, shapes: list[list[int]]) -> None:
    assert reduced(peers, [0, 1, 2, 3, 4, 5], [1, 3, 5], shapes) == expected(3, shapes)


def test_two_pipelines(peers: PeerServer) -> None:
    assert reduced(peers, [3, 2, 1, 0], [0, 2], SHAPES) == expected(2, SHAPES)


@pytest.mark.parametrize("owners", [[0, 1, 2, 1, 3, 4], [0, 4, 2, 1, 3, 4], [0, 4, 2, 1, 3, 1], [0, 4, 2, 4, 3, 1]])
def test_a_worker_that_owns_several_pipelines_changes_no_bit(peers: PeerServer, owners: list[int]) -> None:
    assert reduced(peers, owners, [4, 1], SHAPES) == expected(3, SHAPES)


class NoPlane:
    """Fails whoever uses it."""

    def __getattr__(self, name: str) -> None:
        raise AssertionError(f"used {name}")


def group_of(owners: tuple[int, ...], num_pipelines: int) -> ReduceGroup:
    plane: Any = NoPlane()
    return ReduceGroup(plane, Ownership(Grid(2, 1, num_pipelines), owners), owners[STAGE], STAGE)


def test_a_worker_that_owns_all_pipelines_sends_nothing() -> None:
    parts = {each: gradients_of(each, SHAPES) for each in range(3)}
    assert bits(mean_over_pipelines(group_of((0, 1, 2, 1, 3, 1), 3), parts)) == expected(3, SHAPES)


def test_one_pipeline_sends_nothing_and_copies_nothing() -> None:
    gradients = gradients_of(0, SHAPES)
    means = mean_over_pipelines(group_of((0, 1), 1), {0: gradients})
    assert all(mean is gradient for mean, gradient in zip(means, gradients, strict=True))


def test_a_stage_without_parameters_or_buffers_sends_nothing() -> None:
    group = group_of((0, 1, 2, 3), 2)
    assert mean_over_pipelines(group, {0: []}) == []
