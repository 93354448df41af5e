"""A stage against plain autograd: the same bits, however the model is cut and whatever is recomputed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.core.errors import DivergedError, InvariantError, UserError
from engine.core.job.job import Job
from engine.core.random_key import layer_key, weights_key
from engine.models.layers import FunctionLayer, LayerSpec, Model, Tensors, Tie, as_tensors
from engine.runtime.stage.buffers import BufferHistory
from engine.runtime.stage.gradient_log import LogEntry
from engine.runtime.stage.stage import Checkpoint, Stage, build_layer
from engine.runtime.transport.transport import TensorSpec
from tests.e2e.state_models import KINDS
from tests.runtime import small_jobs

M = 3
STEP = 5
WIDTH = 6


Block = partial(small_jobs.Block, WIDTH)


class Split(nn.Module):
    """Gives three tensors: one with a gradient, one of integers, one without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.linear(x), x.argmax(dim=1), x.detach()


class Carry(nn.Module):
    """Works on the first and hands the others on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, place: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return nn.functional.dropout(self.linear(hidden), 0.3, self.training), place, x


class Join(nn.Module):
    """Uses all three."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, place: Tensor, x: Tensor) -> Tensor:
        return hidden * self.embedding(place) + x


class TwoHeads(nn.Module):
    """Gives two tensors, of which the next layer uses the first only."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.used(x), self.unused(x)


class First(nn.Module):
    """Uses its first input only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, ignored: Tensor) -> Tensor:
        return self.linear(x)


class Frozen(nn.Linear):
    """A linear map that is not trained."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.requires_grad_(False)


class Passing(nn.Module):
    """Hands on what it got, beside something made of it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.sin()


class Product(nn.Module):
    """Multiplies its two inputs."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * y


def parametrized_spectral() -> nn.Module:
    """Makes a layer whose every forward improves two buffers, and computes its weight from them."""
    return nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


def hooked_spectral() -> nn.Module:
    """Makes the same in torch's older way: a hook before the forward."""
    return nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))


MODELS: dict[str, list[Callable[[], nn.Module]]] = {
    "blocks": [partial(nn.Linear, WIDTH, WIDTH), Block, Block, Block, partial(nn.Linear, WIDTH, 2)],
    "tuples": [Split, Carry, Carry, Join, partial(nn.Linear, WIDTH, 2)],
    "unused": [TwoHeads, First, TwoHeads, First],
    "frozen": [Frozen, Block, Frozen, Block, Frozen],
    "passing": [Block, Passing, Product, Passing, Product],
    "spectral": [parametrized_spectral, hooked_spectral, parametrized_spectral, hooked_spectral],
    "in place": [partial(nn.ReLU, inplace=True), Block, partial(nn.ReLU, inplace=True), Block],
    "kinds of state": [partial(kind, WIDTH) for kind in KINDS.values()],
}


def loss_of(outputs: Tensors, targets: Tensors) -> Tensor:
    return (outputs[0] - targets[0]).square().mean()


def model_of(layers: Sequence[Callable[[], nn.Module]], ties: tuple[Tie, ...] = ()) -> Model:
    specs = tuple(LayerSpec(f"layer{index}", "Layer", build) for index, build in enumerate(layers))
    return Model(specs, loss_of, ties)


def job_of(**values: Any) -> Job:
    return Job(microbatches=M, **values)


def inputs_of(microbatch: int) -> Tensors:
    return (torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(microbatch)),)


TARGETS = (torch.full((4, 1), 0.5),)


def trained_by(
    stages: Sequence[Stage], parts: str = "whole"
) -> tuple[dict[str, Tensor | None], dict[str, Tensor], list[float]]:
    """Runs all microbatches through a chain of stages; returns gradients, buffers and losses.

    Backwards are `whole`, in two parts whose second ones come `late`, or of either form in turn (`mixed`).
    """
    handed_back: dict[int, Tensors] = {}
    for microbatch in range(M):
        tensors = inputs_of(microbatch)
        for stage in stages:
            entry = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors)
            tensors = stage.forward(STEP, microbatch, entry, TARGETS if stage.is_last else None)
    for microbatch in range(M):
        gradients: Tensors = ()
        for stage in reversed(stages):
            whole = parts == "whole" or (parts == "mixed" and microbatch == 1)
            if whole:
                for late in range(stage.added, microbatch):
                    stage.backward_weights(late)
            gradients = (stage.backward if whole else stage.backward_input)(STEP, microbatch, gradients)
        handed_back[microbatch] = gradients
    assert set(handed_back.values()) == {()}, "the model's input needs no gradient"
    for stage in stages:
        for late in range(stage.added, M):
            stage.backward_weights(late)
        assert stage.pending == {}
    return *tensors_of([layer for stage in stages for layer in stage.layers.values()]), list(stages[-1].losses.values())


def tensors_of(layers: Sequence[nn.Module]) -> tuple[dict[str, Tensor | None], dict[str, Tensor]]:
    """Returns the gradients and the buffers of some layers by name."""
    gradients = {f"{n}.{name}": p.grad for n, layer in enumerate(layers) for name, p in layer.named_parameters()}
    return gradients, {f"{n}.{name}": b for n, layer in enumerate(layers) for name, b in layer.named_buffers()}


@cache
def trained_plainly(name: str, seed: int) -> tuple[dict[str, Tensor | None], dict[str, Tensor], list[float]]:
    """Does the same with one graph over a whole model for each microbatch."""
    model, layers, losses = model_of(MODELS[name]), [], []
    for index, spec in enumerate(model.layers):
        torch.manual_seed(weights_key(seed, index))
        layers.append(spec.build())
    for microbatch in range(M):
        tensors = inputs_of(microbatch)
        for index, layer in enumerate(layers):
            torch.manual_seed(layer_key(seed, STEP, 0, index, microbatch))
            tensors = as_tensors(layer(*tensors), "")
        loss = model.loss(tensors, TARGETS)
        losses.append(loss.item())
        (loss / M).backward()
    return *tensors_of(layers), losses


def chain(job: Job, model: Model, starts: Sequence[int]) -> list[Stage]:
    """Returns a pipeline that is cut before each of `starts`."""
    return [
        Stage(job, model, 0, first, last) for first, last in zip(starts, [*starts[1:], len(model.layers)], strict=True)
    ]


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32)) if one.is_floating_point() else one.equal(other)


CASES = [*product(MODELS, [(0,), (0, 2), (0, 1, 2, 3)], [0, 1, 2, 3], ["whole", "late", "mixed"])]
# Every third case: each model has each pair of the other values.
THIRD = [case for number, case in enumerate(CASES) if (number // 36 + number // 12 + number // 3 + number) % 3 == 0]


@pytest.mark.parametrize(
    ("name", "starts", "checkpoint", "parts"),
    [case if case in THIRD else pytest.param(*case, marks=pytest.mark.soak) for case in CASES],
)
def test_same_bits_as_plain_autograd(name: str, starts: tuple[int, ...], checkpoint: int, parts: str) -> None:
    model = model_of(MODELS[name])
    job = job_of(seed=3, activation_checkpoint=checkpoint)
    gradients, buffers, losses = trained_by(chain(job, model, starts), parts)
    plain_gradients, plain_buffers, plain_losses = trained_plainly(name, 3)
    assert losses == plain_losses
    assert gradients.keys() == plain_gradients.keys()
    for key, gradient in gradients.items():
        plain = plain_gradients[key]
        if gradient is None or plain is None:
            # What nothing depends on has no gradient there, and none or zeros here.
            assert plain is None
            assert gradient is None or not gradient.any()
        else:
            assert same_bits(gradient, plain), key
    assert buffers.keys() == plain_buffers.keys()
    assert all(same_bits(buffer, plain_buffers[key]) for key, buffer in buffers.items())


def test_seed_step_and_pipeline_decide_what_is_dropped() -> None:
    model = model_of([Block])

    def outputs(seed: int, step: int, pipeline: int, microbatch: int) -> Tensor:
        stage = Stage(job_of(seed=seed), model, pipeline, 0, 1)
        stage.layers[0].load_state_dict(reference.layers[0].state_dict())
        stage.counted = microbatch
        return stage.forward(step, microbatch, inputs_of(0), None)[0]

    reference = Stage(job_of(), model, 0, 0, 1)
    same = outputs(0, 0, 0, 0)
    assert torch.equal(outputs(0, 0, 0, 0), same)
    for parts in ((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)):
        assert not torch.equal(outputs(*parts), same), parts


def test_gradients_come_back_for_the_outputs_that_need_one_only() -> None:
    model = model_of(MODELS["tuples"])
    first, second = chain(job_of(), model, (0, 2))
    outputs = first.forward(STEP, 0, inputs_of(0), None)
    assert [tensor.requires_grad for tensor in outputs] == [True, False, False]
    entry = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in outputs)
    second.forward(STEP, 0, entry, TARGETS)
    (gradient,) = second.backward(STEP, 0, ())
    assert gradient.shape == outputs[0].shape
    assert first.backward(STEP, 0, (gradient,)) == ()


def test_an_unused_output_gets_zeros_so_that_what_is_sent_does_not_depend_on_use() -> None:
    model = model_of(MODELS["unused"])
    first, second = chain(job_of(), model, (0, 1))
    entry = first.forward(STEP, 0, inputs_of(0), None)
    second.forward(STEP, 0, entry, TARGETS)
    used, unused = second.backward(STEP, 0, ())
    assert used.any()
    assert unused.shape == used.shape
    assert not unused.any()


def test_a_residual_is_freed_by_its_backward_and_the_peak_is_kept() -> None:
    model = model_of(MODELS["blocks"])
    stage = Stage(job_of(), model, 0, 0, 5)
    for microbatch in range(M):
        stage.forward(STEP, microbatch, inputs_of(microbatch), TARGETS)
    assert sorted(stage.residuals) == [0, 1, 2]
    for microbatch in range(M):
        stage.backward(STEP, microbatch, ())
    assert stage.residuals == {}
    stage.forget_step()
    stage.forward(STEP + 1, 0, inputs_of(0), TARGETS)
    assert stage.peak_stash == 3


@pytest.mark.parametrize("checkpoint", [0, 2])
def test_buffers_count_each_forward_once(checkpoint: int) -> None:
    model = model_of([Block, Block, Block])
    stage = Stage(job_of(activation_checkpoint=checkpoint), model, 0, 0, 3)
    buffers = [dict(layer.named_buffers()) for layer in stage.layers.values()]
    for microbatch in range(M):
        stage.forward(STEP, microbatch, inputs_of(microbatch), TARGETS)
    after = [{name: buffer.clone() for name, buffer in named.items()} for named in buffers]
    for microbatch in range(M):
        stage.backward(STEP, microbatch, ())
    for layer, held, seen in zip(stage.layers.values(), buffers, after, strict=True):
        for name, buffer in layer.named_buffers():
            assert buffer is held[name], "the layer has other tensors now than before"
            assert same_bits(buffer, seen[name])
        assert layer.get_buffer("norm.num_batches_tracked").item() == M


def test_recomputing_holds_less_and_groups_begin_at_multiples_of_k() -> None:
    model = model_of(MODELS["blocks"])
    stage = Stage(job_of(activation_checkpoint=2), model, 0, 1, 5)
    stage.forward(STEP, 0, inputs_of(0), TARGETS)
    groups = stage.residuals[0].groups
    assert len(groups) == 3  # layer 1, layers 2 and 3, layer 4
    assert not any(isinstance(kept, list) for kept in groups)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_recomputing_keeps_no_graph(every: int) -> None:
    """The outputs of a group, which are kept, would keep the whole graph behind them."""
    stage = Stage(job_of(activation_checkpoint=every), model_of([Block, Block, Block, Block]), 0, 0, 3)
    outputs = stage.forward(0, 0, inputs_of(0), None)
    kept = [each for group in stage.residuals[0].groups if isinstance(group, Checkpoint) for each in group.inputs]
    assert all(each.grad_fn is None for each in (*kept, *outputs))


def test_a_probe_learns_the_border_and_leaves_no_trace() -> None:
    model = model_of([Split, Carry, Join, Block])
    stage, untouched = Stage(job_of(), model, 0, 0, 4), Stage(job_of(), model, 0, 0, 4)
    assert Stage(job_of(), model, 0, 0, 2).probe(inputs_of(0)) == (
        TensorSpec((4, WIDTH), torch.float32, True),
        TensorSpec((4,), torch.int64, False),
        TensorSpec((4, WIDTH), torch.float32, False),
    )
    stage.probe(inputs_of(0))
    assert stage.residuals == {}
    for probed, fresh in zip(stage.layers.values(), untouched.layers.values(), strict=True):
        assert all(parameter.grad is None for parameter in probed.parameters())
        assert all(same_bits(*pair) for pair in zip(probed.buffers(), fresh.buffers(), strict=True))


@pytest.mark.parametrize("overwrite", [lambda x: x.add_(1), lambda x: x.detach()[0].zero_().add(x)])
def test_a_layer_that_overwrites_what_others_may_still_need_is_refused(overwrite: Callable[[Tensor], Tensor]) -> None:
    stage = Stage(job_of(), model_of([partial(FunctionLayer, overwrite)]), 0, 0, 1)
    with pytest.raises(TypeError, match=r"layer 0 \(layer0\): a layer must not overwrite what it is called with"):
        stage.forward(STEP, 0, inputs_of(0), TARGETS)


def test_evaluation_is_neither_random_nor_counted() -> None:
    model = model_of([Block, Block])
    stage = Stage(job_of(), model, 0, 0, 2)
    stage.forward(STEP, 0, inputs_of(0), TARGETS)
    before = {name: buffer.clone() for name, buffer in stage.layers[0].named_buffers()}
    (one,), (other,) = stage.evaluate(inputs_of(1)), stage.evaluate(inputs_of(1))
    assert torch.equal(one, other)
    assert not one.requires_grad
    assert all(same_bits(buffer, before[name]) for name, buffer in stage.layers[0].named_buffers())
    assert stage.evaluate_loss((one,), TARGETS) == (loss_of((one,), TARGETS).item(), {})
    assert len(stage.losses) == 1


def test_evaluation_leaves_each_module_in_the_mode_it_was_built_in() -> None:
    def half_frozen() -> nn.Module:
        block = Block()
        block.norm.eval()  # as users freeze the statistics of a batch norm
        return block

    stage = Stage(job_of(), model_of([half_frozen, Block]), 0, 0, 2)
    modes = [module.training for layer in stage.layers.values() for module in layer.modules()]
    assert modes[:2] == [True, False]
    stage.evaluate(inputs_of(0))
    assert [module.training for layer in stage.layers.values() for module in layer.modules()] == modes


class Changing(nn.Module):
    """Returns something else on its second call."""

    def __init__(self, *returned: Callable[[Tensor], Any]):
        super().__init__()
        self.returned = list(returned)

    def forward(self, x: Tensor) -> Any:
        return self.returned.pop(0)(x)


@pytest.mark.parametrize(
    ("second", "found"),
    [
        (lambda x: x[:, :2], "[4, 2] torch.float32 instead of [4, 6] torch.float32"),
        (lambda x: x.double(), "[4, 6] torch.float64 instead of [4, 6] torch.float32"),
        (lambda x: (x, x), "2 tensors instead of 1"),
    ],
)
def test_a_layer_that_returns_another_shape_the_second_time_is_named(
    second: Callable[[Tensor], Any], found: str
) -> None:
    model = model_of([partial(nn.Linear, WIDTH, WIDTH), partial(Changing, lambda x: x, second)])
    stage = Stage(job_of(), model, 0, 0, 2)
    stage.probe(inputs_of(0))
    with pytest.raises(TypeError) as refused:
        stage.forward(0, 0, inputs_of(0), None)
    assert str(refused.value) == f"layer 1 (layer1): a layer must return the same shapes every time, found {found}"


@pytest.mark.parametrize(
    ("returned", "kind"),
    [
        ("text", "str"),
        (None, "NoneType: its forward has no return"),
        ((), "an empty tuple"),
        ([1.0], "a list with a float inside, at position 0"),
        (
            (torch.ones(1), (torch.ones(1), torch.ones(1))),
            "a tuple with a tuple inside, at position 1: return out, not (out, (h, c))",
        ),
    ],
)
def test_a_layer_that_returns_no_tensors_is_named(returned: object, kind: str) -> None:
    stage = Stage(job_of(), model_of([partial(Changing, lambda x: returned)]), 0, 0, 1)
    with pytest.raises(TypeError) as refused:
        stage.probe(inputs_of(0))
    assert str(refused.value) == f"layer 0 (layer0): expected a tensor or a tuple of tensors, found {kind}"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_no_finite_number_is_named(bad: float) -> None:
    stage = Stage(job_of(), model_of([partial(nn.Linear, WIDTH, 2)]), 1, 0, 1)
    with pytest.raises(DivergedError) as diverged:
        stage.forward(4, 0, inputs_of(0), (torch.tensor(bad),))
    assert str(diverged.value).startswith(f"the loss is {bad} at step 4, pipeline 1, microbatch 0; ")


class Wild(nn.Linear):
    """Gives values that are not finite."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 0


def test_where_a_value_that_is_not_finite_began_is_named() -> None:
    """The message named the step and the microbatch, and no layer."""
    targets = (torch.zeros(2),)
    layers: list[Callable[[], nn.Module]] = [
        partial(nn.Linear, WIDTH, WIDTH),
        partial(Wild, WIDTH, WIDTH),
        partial(nn.Linear, WIDTH, 2),
    ]
    stage = Stage(job_of(), model_of(layers), 0, 0, 3)
    with pytest.raises(DivergedError, match=r"it began in layer 1 \("):
        stage.forward(0, 0, inputs_of(0), targets)
    last = Stage(job_of(), model_of(layers), 0, 2, 3)
    with pytest.raises(DivergedError, match="it began before layer 2, whose input is not finite"):
        last.forward(0, 0, (inputs_of(0)[0] / 0,), targets)
    stage = Stage(job_of(), model_of(layers[2:]), 0, 0, 1)
    with pytest.raises(DivergedError, match="it began in the data"):
        stage.forward(0, 0, (inputs_of(0)[0] / 0,), targets)
    with pytest.raises(DivergedError, match="it began in the loss"):
        Stage(job_of(), model_of(layers[2:]), 0, 0, 1).forward(0, 0, inputs_of(0), (torch.tensor(math.nan),))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_in_float16_such_a_loss_gives_gradients_that_skip_the_step(bad: float) -> None:
    stage = Stage(job_of(dtype="float16"), model_of([partial(nn.Linear, WIDTH, 2)]), 1, 0, 1)
    stage.forward(4, 0, inputs_of(0), (torch.tensor(bad),))
    stage.backward(4, 0, ())
    assert repr(stage.losses[0]) == repr(bad)
    assert not all(each.isfinite().all() for each in stage.gradients()[0].values())


def test_a_layers_weights_are_the_same_wherever_it_is_built() -> None:
    model = model_of([Block, Block, Block])
    whole, tail = Stage(job_of(seed=9), model, 0, 0, 3), Stage(job_of(seed=9), model, 1, 2, 3)
    assert list(tail.layers) == [2]
    assert torch.equal(whole.layers[2].linear.weight, tail.layers[2].linear.weight)  # type: ignore[union-attr, arg-type]
    torch.manual_seed(weights_key(9, 2))
    assert torch.equal(Block().linear.weight, tail.layers[2].get_parameter("linear.weight"))
    assert not torch.equal(
        whole.layers[1].get_parameter("linear.weight"), tail.layers[2].get_parameter("linear.weight")
    )


def test_every_use_of_a_tie_starts_as_the_first_and_the_rest_of_the_layer_as_its_own() -> None:
    tie = Tie(((1, "weight"), (3, "weight"), (4, "weight")))
    layers = [partial(nn.Linear, WIDTH, WIDTH)] * 5
    tied, untied = model_of(layers, (tie,)), model_of(layers)
    job = job_of(seed=2)
    first = build_layer(job, untied, 1).get_parameter("weight")
    for index in range(5):
        built, alone = build_layer(job, tied, index), build_layer(job, untied, index)
        assert torch.equal(built.get_parameter("bias"), alone.get_parameter("bias"))
        expected = first if index in (1, 3, 4) else alone.get_parameter("weight")
        assert torch.equal(built.get_parameter("weight"), expected)


def test_frozen_parameters_get_no_gradient_and_no_state() -> None:
    model = model_of(MODELS["frozen"])
    (stage,) = chain(job_of(), model, (0,))
    trained_by([stage])
    for index in (0, 2, 4):
        assert all(parameter.grad is None for parameter in stage.layers[index].parameters())
        assert stage.optimizers[index].state == {}


def test_a_model_that_is_all_frozen_runs() -> None:
    stage = Stage(job_of(), model_of([Frozen, Frozen]), 0, 0, 2)
    stage.forward(0, 0, inputs_of(0), TARGETS)
    assert stage.backward(0, 0, ()) == ()


def test_autocast_runs_layers_in_bfloat16_and_the_loss_in_float32() -> None:
    seen: list[torch.dtype] = []

    def loss(outputs: Tensors, targets: Tensors) -> Tensor:
        seen.append(outputs[0].dtype)
        return loss_of(outputs, targets)

    specs = model_of([partial(nn.Linear, WIDTH, WIDTH), partial(nn.Linear, WIDTH, 2)]).layers
    first, second = chain(job_of(dtype="bfloat16"), Model(specs, loss), (0, 1))
    (entry,) = first.forward(0, 0, inputs_of(0), None)
    assert entry.dtype is torch.bfloat16
    second.forward(0, 0, (entry.detach().requires_grad_(),), TARGETS)
    (gradient,) = second.backward(0, 0, ())
    assert gradient.dtype is torch.bfloat16
    first.backward(0, 0, (gradient,))
    assert seen == [torch.float32]
    assert all(parameter.grad is not None and parameter.grad.dtype is torch.float32 for parameter in parameters(first))


def parameters(stage: Stage) -> list[nn.Parameter]:
    return [parameter for layer in stage.layers.values() for parameter in layer.parameters()]


def test_arguments_of_the_optimizer_are_checked_when_the_stage_is_made() -> None:
    with pytest.raises(UserError, match="momentun"):
        Stage(job_of(optimizer="sgd", optimizer_args={"momentun": 0.9}), model_of([Block]), 0, 0, 1)


def test_the_norm_of_a_layer_is_in_float64_and_in_the_given_order() -> None:
    gradients = [torch.full((1,), value) for value in (1e10, 1.0, 1.0)]

    def norms(*given: torch.Tensor) -> list[tuple[int, float]]:
        return LogEntry({3: {str(place): each for place, each in enumerate(given)}}, (), ()).norms(())

    assert norms(*gradients) == [(3, (1e10**2 + 1.0) + 1.0)]
    assert norms(*gradients[::-1]) == [(3, (1.0 + 1.0) + float(torch.tensor(1e10).double()) ** 2)]
    assert norms() == [(3, 0.0)]


class Conv(nn.Module):
    """Convolutions and a norm over channels on the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 3, 3, padding=1)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x.unsqueeze(1)).mean(1))


REDONE: dict[str, list[Callable[[], nn.Module]]] = {**MODELS, "conv": [Conv, Block, Conv, Conv]}


def stage_and_twin(name: str, checkpoint: int, first: int) -> tuple[Stage, Stage, list[Tensors]]:
    """Returns the layers from `first` on twice, and the inputs of each microbatch."""
    model, job = model_of(REDONE[name]), job_of(seed=3, activation_checkpoint=checkpoint)
    entries = []
    front = Stage(job, model, 0, 0, first) if first else None
    for microbatch in range(M):
        entry = front.forward(STEP, microbatch, inputs_of(microbatch), None) if front else inputs_of(microbatch)
        entries.append(tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in entry))
    one, other = (Stage(job, model, 0, first, len(model.layers)) for _ in range(2))
    return one, other, entries


def state_bits(stage: Stage) -> list[list[int]]:
    tensors = [gradient for named in stage.gradients().values() for gradient in named.values()]
    return [each.detach().contiguous().reshape(-1).view(torch.uint8).tolist() for each in [*tensors, *stage.buffers()]]


@pytest.mark.parametrize("checkpoint", [0, 2])
@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("name", REDONE)
def test_what_is_redone_has_the_same_bits_and_leaves_no_trace(name: str, first: int, checkpoint: int) -> None:
    disturbed, plain, entries = stage_and_twin(name, checkpoint, first)
    for stage in (disturbed, plain):
        outputs = [stage.forward(STEP, each, entries[each], TARGETS) for each in range(M)]
        gradients = [stage.backward(STEP, each, ()) for each in range(M)]
    before, losses = state_bits(disturbed), dict(disturbed.losses)
    for microbatch in (2, 0, 0, 1):
        (again,) = disturbed.redo_forward(STEP, microbatch, entries[microbatch], TARGETS)
        assert same_bits(again, outputs[microbatch][0])
        made = disturbed.backward_input(STEP, microbatch, ())
        assert len(made) == len(gradients[microbatch])
        assert all(same_bits(*pair) for pair in zip(made, gradients[microbatch], strict=True))
        assert disturbed.residuals == {}
    assert disturbed.losses == losses
    assert (disturbed.counted, disturbed.added) == (M, M)
    assert state_bits(disturbed) == before == state_bits(plain)


@pytest.mark.parametrize("name", REDONE)
def test_a_forward_redone_in_between_does_not_shift_what_comes_after(name: str) -> None:
    disturbed, plain, entries = stage_and_twin(name, 0, 1)
    for microbatch in range(M):
        for stage in (disturbed, plain):
            stage.forward(STEP, microbatch, entries[microbatch], TARGETS)
        disturbed.redo_forward(STEP, 0, entries[0], TARGETS)
        disturbed.backward_input(STEP, 0, ())
    disturbed.redo_forward(STEP, 0, entries[0], TARGETS)
    for microbatch in range(M):
        assert all(
            same_bits(*pair)
            for pair in zip(disturbed.backward(STEP, microbatch, ()), plain.backward(STEP, microbatch, ()), strict=True)
        )
    assert state_bits(disturbed) == state_bits(plain)


def test_a_counter_takes_the_next_microbatch_only() -> None:
    stage = Stage(job_of(), model_of([Block, Block]), 0, 0, 2)
    stage.forward(STEP, 0, inputs_of(0), TARGETS)
    for microbatch in (0, 2):
        with pytest.raises(InvariantError, match=f"forward {microbatch} where 1 are in"):
            stage.forward(STEP, microbatch, inputs_of(microbatch), TARGETS)
    stage.forward(STEP, 1, inputs_of(1), TARGETS)
    with pytest.raises(InvariantError, match="backward 1 where 0 are in"):
        stage.backward(STEP, 1, ())
    stage.backward(STEP, 0, ())
    assert (stage.counted, stage.added) == (2, 1)
    stage.forget_step()
    assert (stage.counted, stage.added, stage.losses, stage.residuals) == (0, 0, {}, {})
    assert all(parameter.grad is None for parameter in parameters(stage))


class Shifted(nn.Module):
    """Is a parameter, moved: autograd hands the incoming gradient on to it, as a view of the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x.detach().reshape(-1) + self.shift).view(4, WIDTH)


def test_what_was_handed_in_or_out_never_changes() -> None:
    model = model_of([partial(nn.Linear, WIDTH, WIDTH), Shifted, Shifted, partial(nn.Linear, WIDTH, 2)])
    stage = Stage(job_of(), model, 0, 1, 3)
    handed: list[Tensor] = []
    before: list[Tensor] = []
    for microbatch in range(M):
        entry = (inputs_of(microbatch)[0].requires_grad_(),)
        handed += [*entry, *stage.forward(STEP, microbatch, entry, None)]
        gradient = torch.full((4, WIDTH), 1.0 + microbatch)
        handed += [gradient, *stage.backward(STEP, microbatch, (gradient,))]
        before += [each.detach().clone() for each in handed[len(before) :]]
    assert all(same_bits(now.detach(), then) for now, then in zip(handed, before, strict=True))
    assert stage.gradients()[2]["shift"].unique().tolist() == [6.0]


def test_nobody_who_could_take_over_costs_no_copies() -> None:
    stage = Stage(job_of(redundancy="none"), model_of([Block, Block]), 0, 0, 2)
    stage.forward(STEP, 0, inputs_of(0), TARGETS)
    assert stage.boundary == ()
    assert stage.history == BufferHistory(stage.history.modules)
    assert all(one is other for one, other in zip(stage.copy_buffers(), stage.buffers(), strict=True))
