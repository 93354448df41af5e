"""Buffers that are copied, lent and remembered: the same bits, laid out the same, sharing what they share."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from engine.core.errors import UserError
from engine.core.job.job import Job
from engine.models.layers import LayerSpec, Model
from engine.models.losses import default_loss
from engine.runtime.stage.buffers import BufferHistory, in_use, lending, modules_of, overwrite, snapshot_of
from engine.runtime.stage.stage import Stage
from tests.e2e.state_models import KINDS, Aliased, Counting, Large
from tests.looped import looped

WIDTH = 8


class Holder(nn.Module):
    """Has buffers, and does nothing."""

    def __init__(self, **buffers: Tensor | None) -> None:
        super().__init__()
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_a_copy_shares_memory_where_the_buffers_do_and_nowhere_else() -> None:
    layer = Aliased(WIDTH)
    inner = snapshot_of(modules_of([layer])).copy().buffers()
    whole = snapshot_of(modules_of([layer])).copy().buffers()[0]
    assert {address(whole[name]) for name in ("whole", "head", "turned")} == {address(whole["whole"])}  # type: ignore[arg-type]
    own, _, holder = inner  # the layer, its linear map, the module that has one of its buffers
    assert holder["same"] is own["whole"], "one tensor has become two"
    assert address(own["whole"]) != address(layer.whole)  # type: ignore[arg-type]
    assert address(own["ones"]) != address(own["whole"])  # type: ignore[arg-type]


@looped(
    "buffer",
    [
        torch.arange(12.0).view(3, 4),
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(40.0)[3:20:5],
        torch.arange(40, dtype=torch.int8)[7:9],
        torch.arange(3).expand(4, 3),
        torch.zeros(0, 3),
        torch.tensor(5, dtype=torch.int16),
        torch.arange(200, dtype=torch.bfloat16)[101:].view(3, 33),
        torch.ones(2, 2, dtype=torch.complex128),
    ],
)
def test_a_copy_is_laid_out_as_the_buffer_and_begins_as_far_from_where_memory_is_aligned(buffer: Tensor) -> None:
    ((copied,),) = (named.values() for named in snapshot_of([Holder(one=buffer)]).copy().buffers())
    assert copied is not None
    assert copied.equal(buffer)
    assert (copied.dtype, copied.stride()) == (buffer.dtype, buffer.stride())
    if buffer.numel():
        assert address(copied) != address(buffer)
        assert copied.data_ptr() % 64 == buffer.data_ptr() % 64
    values = torch.zeros_like(buffer)
    overwrite(copied, values)
    assert copied.equal(values)


def test_a_small_part_of_much_memory_is_copied_alone() -> None:
    (piece,) = snapshot_of([Holder(one=torch.zeros(1000)[500:510])]).copy().memory
    assert len(piece) < 128


def test_what_is_lent_goes_back_and_what_was_made_meanwhile_is_gone() -> None:
    layer = Holder(one=torch.zeros(2), none=None)
    one = layer.get_buffer("one")
    with lending([layer], snapshot_of([layer]).copy().buffers()):
        layer.get_buffer("one").add_(1)
        layer.none = torch.ones(1)
        layer.register_buffer("more", torch.ones(1))
    assert dict(layer._buffers) == {"one": one, "none": None}
    assert one.tolist() == [0, 0]


def test_what_has_not_changed_is_kept_once_and_what_has_is_seen_whoever_changed_it() -> None:
    norm, large = nn.BatchNorm1d(WIDTH), Large(WIDTH)
    history = BufferHistory(modules_of([norm, large]))
    running_mean = norm.get_buffer("running_mean")
    version = running_mean._version
    for microbatch in range(3):
        history.note(microbatch)
        norm(torch.randn(4, WIDTH))
    assert running_mean._version == version, "BatchNorm counts its changes: the comparison need not read all"
    means, tables = ({address(history.before(m).tensors()[at]) for m in range(3)} for at in (0, 3))
    assert (len(means), len(tables)) == (3, 1)
    history.forget_step()
    history.note(0)
    assert address(history.before(0).tensors()[3]) in tables
    large.sums[-1] += 1
    history.note(1)
    assert address(history.before(1).tensors()[4]) != address(history.before(0).tensors()[4])


@pytest.mark.parametrize("size", [1, 4095, 4096, 4103, 8192])
def test_the_last_byte_counts(size: int) -> None:
    layer = Holder(one=torch.zeros(size, dtype=torch.uint8))
    history = BufferHistory([layer])
    first = history.keep()
    assert history.keep().memory[0] is first.memory[0]
    layer.get_buffer("one")[-1] = 1
    assert history.keep().memory[0] is not first.memory[0]


def test_a_history_that_is_taken_over_leaves_names_and_views_of_one_buffer() -> None:
    layer, other = Aliased(WIDTH), Aliased(WIDTH)
    layer(torch.ones(4, WIDTH))
    told = snapshot_of(modules_of([layer])).copy()
    BufferHistory(modules_of([other])).take_over({1: told})
    other.whole.fill_(7.0)
    assert other.head[0, 0] == other.inner.same[0, 0] == other.turned[0, 0] == 7.0
    assert layer.whole[0, 0] != 7.0
    assert told.tensors()[0][0, 0] != 7.0
    assert len(list(other.buffers())) == len(list(layer.buffers()))


def test_in_use_a_module_that_changes_buffers_leaves_them_as_they_were() -> None:
    layer = Counting(WIDTH)
    layer(torch.ones(4, WIDTH))
    with in_use(modules_of([layer])):
        layer(torch.ones(4, WIDTH))
        assert not layer.training
    assert layer.training
    assert layer.calls == 1


class Sees(nn.Module):
    """Has what it is told to have, and does to itself what it is told to do."""

    def __init__(self, change: str, seen: Tensor | None, more: Tensor | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.change = change
        self.register_buffer("seen", seen)
        self.more = more

    def forward(self, x: Tensor) -> Tensor:
        if self.change == "in place":
            self.get_buffer("seen").add_(1)
        elif self.change == "by another name":
            assert self.more is not None
            self.more.add_(1)
        elif self.change == "made":
            self.seen = torch.zeros(WIDTH)
        elif self.change == "new":
            self.register_buffer("more_seen", torch.zeros(WIDTH))
        elif self.change == "longer":
            self.seen = torch.cat([self.get_buffer("seen"), torch.zeros(1)])
        return self.linear(x)


class Rebinds(Aliased):
    """Puts a new tensor in the place of one that has several names."""

    def forward(self, x: Tensor) -> Tensor:
        self.whole = self.whole * 2
        return super().forward(x)


def probed(*layers: object, name: str = "seen") -> None:
    """Runs the first forward of a stage of these layers."""
    specs = tuple(LayerSpec(str(index), "Layer", build) for index, build in enumerate(layers))  # type: ignore[arg-type]
    model = Model(specs, default_loss, shared_buffers=(((0, name), (5, name)),))
    Stage(Job(), model, 0, 0, len(specs)).probe((torch.ones(2, WIDTH),))


KEPT = torch.zeros(2, WIDTH)
FORM = "each layer to have all its buffers when it is built, and to keep their shapes, types and shared memory"
OWN = "a forward to change only buffers, and only those of its own layer"


def viewed(change: str) -> Sees:
    memory = torch.zeros(2, WIDTH)
    return Sees(change, memory[0], memory)


@looped(
    ("build", "expected", "found"),
    [
        (lambda: Sees("made", None), FORM, "otherwise: 'seen' of layer 1"),
        (lambda: Sees("new", None), FORM, "otherwise: 'more_seen' of layer 1"),
        (lambda: Sees("longer", torch.zeros(1)), FORM, "otherwise: 'seen' of layer 1"),
        (lambda: Rebinds(WIDTH), FORM, "otherwise: 'head' of layer 1"),
        (lambda: Sees("in place", KEPT), OWN, "'seen' of layer 1, whose builder returns it again"),
        (lambda: viewed("by another name"), OWN, "'seen' of layer 1, changed in another way than by its name"),
        (
            lambda: viewed("in place"),
            OWN,
            "'more' of layer 1, which is not registered as the buffer that it lies in",
        ),
    ],
)
def test_a_buffer_that_cannot_be_kept_is_refused_by_name(build: object, expected: str, found: str) -> None:
    with pytest.raises(UserError) as refused:
        probed(lambda: nn.Linear(WIDTH, WIDTH), build)
    assert [(each.expected, each.found) for each in refused.value.problems] == [(expected, found)]


def test_a_buffer_of_several_layers_is_refused_if_one_changes_it() -> None:
    with pytest.raises(UserError, match=r"'seen' of layer 0, which layer 5 has too \(read it in"):
        probed(lambda: Sees("in place", torch.zeros(1)))
    probed(lambda: Sees("", torch.zeros(1)), lambda: Sees("", KEPT), lambda: viewed(""))


class Around(nn.Module):
    """Has a layer inside."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_a_buffer_of_an_inner_module_is_told_and_known_by_its_path() -> None:
    with pytest.raises(UserError, match=r"'inner\.seen' of layer 0, whose builder returns it again"):
        probed(lambda: Around(Sees("in place", KEPT)))
    with pytest.raises(UserError, match=r"'inner\.seen' of layer 0, which layer 5 has too"):
        probed(lambda: Around(Sees("in place", torch.zeros(1))), name="inner.seen")
    probed(lambda: Around(Sees("in place", torch.zeros(1))))


def test_each_kind_of_layer_can_be_kept() -> None:
    probed(*(lambda make=make: make(WIDTH) for make in KINDS.values()))


def test_a_buffer_that_takes_another_form_later_is_refused_with_the_step() -> None:
    model = Model((LayerSpec("only", "Sees", lambda: Sees("", torch.zeros(1))),), default_loss)
    stage = Stage(Job(), model, 0, 0, 1)
    assert len(stage.copy_buffers()) == 1
    stage.layers[0].change = "longer"  # type: ignore[assignment]
    stage.forward(0, 0, (torch.ones(2, WIDTH),), (torch.zeros(2, WIDTH),))
    with pytest.raises(UserError, match="'seen' of layer 0"):
        stage.copy_buffers()
