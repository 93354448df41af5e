"""Buffers that are lent and remembered: as they were, also those made late, and those that two modules share."""

from __future__ import annotations

import torch
from torch import nn

from engine.runtime.buffers import BufferHistory, copy_buffers, lending, modules_of
from tests.runtime.impure_layers import Lazy, Shared
from tests.runtime.small_run import WIDTH


def test_a_buffer_that_is_made_while_others_are_lent_goes_with_them() -> None:
    layer, x = Lazy(), torch.ones(2, WIDTH)
    modules = modules_of([layer])
    with lending(modules, copy_buffers(modules)):
        layer(x)
    assert dict(layer.named_buffers()) == {}
    layer(x)
    with lending(modules, [{} for _ in modules]):
        assert dict(layer.named_buffers()) == {}
    assert list(dict(layer.named_buffers())) == ["mean"]


def test_a_buffer_that_two_modules_share_is_one_in_copies_too() -> None:
    layer, x = Shared(), torch.ones(2, WIDTH)
    modules = modules_of([layer])
    history = BufferHistory(modules)
    history.note(0)
    first = layer(x)
    history.note(1)
    for buffers in (history.before(0), history.copy_before(0), copy_buffers(modules)):
        (one,), (other,) = (named.values() for named in buffers if named)
        assert one is other
    with lending(modules, history.copy_before(0)):
        assert torch.equal(layer(x), first)


def test_what_did_not_change_is_copied_once() -> None:
    layer = nn.BatchNorm1d(WIDTH)
    history = BufferHistory(modules_of([layer]))
    history.note(0)
    history.note(1)
    layer(torch.ones(2, WIDTH))
    history.note(2)
    (before,), (same,), (after,) = (history.before(microbatch) for microbatch in range(3))
    assert before["running_mean"] is same["running_mean"]
    assert before["running_mean"] is not after["running_mean"]
