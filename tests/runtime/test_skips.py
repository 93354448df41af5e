"""Skip connections: what travels with what, how gradients come back, and which names do not fit together."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from engine.core.errors import UserError
from engine.core.job.job import Job
from engine.models.layers import LayerSpec, Model, with_skips
from engine.models.losses import default_loss
from engine.runtime.stage.stage import Stage
from tests.looped import looped


class Layer(nn.Module):
    """Adds all that it is called with to a multiple of it; hands its input, once for each name."""

    def __init__(self, factor: float, num_handed: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))
        self.num_handed = num_handed

    def forward(self, x: Tensor, *taken: Tensor) -> tuple[Tensor, ...]:
        out = x * self.factor
        for number, each in enumerate(taken, start=2):
            out = out + number * each.square()
        return (out, *[x + number for number in range(self.num_handed)])


def model_of(*skips: tuple[str, str]) -> Model:
    """Makes a model of a layer per pair: the names that it hands and those that it takes."""
    layers = []
    for index, (hands, takes) in enumerate(skips):
        build = lambda index=index, hands=hands: Layer(index + 2.0, len(hands.split()))  # noqa: E731
        layers.append(LayerSpec(f"l{index}", "Layer", build, tuple(hands.split()), tuple(takes.split())))
    return Model(tuple(layers), default_loss)


def num_between(model: Model) -> list[int]:
    """Returns how many tensors each layer returns."""
    tensors: tuple[Tensor, ...] = (torch.ones(2),)
    numbers = []
    for spec in with_skips(model).layers:
        tensors = spec.build()(*tensors)
        numbers.append(len(tensors))
    return numbers


def test_a_tensor_travels_from_who_hands_it_to_its_last_taker() -> None:
    assert num_between(model_of(("a b", ""), ("", ""), ("", "a"), ("c", "a"), ("", "c b"))) == [3, 3, 3, 3, 1]


def test_a_model_without_skips_is_left_alone() -> None:
    model = model_of(("", ""), ("", ""))
    assert with_skips(model) == model


def test_layers_compute_and_learn_as_if_called_one_by_one_by_hand() -> None:
    model = with_skips(model_of(("a b", ""), ("", "a"), ("", "b a")))
    stage = Stage(Job(stages=1, microbatches=1), model, 0, 0, 3)
    stage.is_last = False
    x = torch.tensor([1.0, -2.0, 3.0])
    (out,) = stage.forward(0, 0, (x,), None)
    first, second, third = (nn.Parameter(torch.tensor(each)) for each in (2.0, 3.0, 4.0))
    a, b = x, x + 1
    middle = x * first * second + 2 * a.square()
    expected = middle * third + 2 * b.square() + 3 * a.square()
    assert torch.equal(out, expected)
    gradient = torch.tensor([1.0, 0.5, 2.0])
    expected.backward(gradient)
    stage.backward(0, 0, (gradient,))
    assert [layer.factor.grad for layer in stage.layers.values()] == [first.grad, second.grad, third.grad]


@pytest.mark.parametrize("split", [False, True])
def test_gradients_come_back_through_layers_in_between_and_are_not_changed_on_the_way(split: bool) -> None:
    """The middle layer takes `a` and passes it on: its gradient is the sum of both; what came from behind stays."""
    model = with_skips(model_of(("a", ""), ("", "a"), ("", "a")))
    stage = Stage(Job(stages=3, microbatches=1), model, 0, 1, 2)
    x, a = (torch.tensor([value], requires_grad=True) for value in (5.0, 7.0))
    out, passed = stage.forward(0, 0, (x, a), None)
    assert (out.item(), passed.item()) == (5 * 3 + 2 * 49, 7)
    behind = torch.tensor([10.0]), torch.tensor([0.5])
    made = (stage.backward_input if split else stage.backward)(0, 0, behind)
    if split:
        stage.backward_weights(0)
    assert [each.item() for each in made] == [30, 10 * 2 * 2 * 7 + 0.5]
    assert stage.layers[1].factor.grad == 50
    assert [each.item() for each in behind] == [10, 0.5]


@looped(
    ("skips", "told"),
    [
        ([("", ""), ("", "a")], "an earlier layer that hands 'a', found none; layer 1 (l1) takes it"),
        ([("skip", ""), ("", "skap"), ("", "skip")], "found none; layer 1 (l1) takes it (did you mean 'skip'?)"),
        ([("a", ""), ("", "")], "a later layer that takes 'a', found none; layer 0 (l0) hands it"),
        ([("a", ""), ("a", ""), ("", "a")], "one layer that hands 'a', found layer 0 (l0) and layer 1 (l1)"),
        ([("", ""), ("", "a"), ("a", ""), ("", "a")], "found layer 2 (l2) hands it and layer 1 (l1) takes it"),
        ([("", ""), ("a", "a")], "found layer 1 (l1) hands it and layer 1 (l1) takes it"),
        ([("a a", ""), ("", "a")], "one layer that hands 'a', found layer 0 (l0) and layer 0 (l0)"),
    ],
)
def test_names_that_do_not_fit_together_are_told_with_their_layers(skips: list[tuple[str, str]], told: str) -> None:
    with pytest.raises(UserError) as caught:
        with_skips(model_of(*skips))
    (problem,) = caught.value.problems
    assert told in str(problem)


def test_who_returns_less_than_it_hands_is_told() -> None:
    spec = LayerSpec("lazy", "Linear", lambda: nn.Linear(1, 1), ("a",))
    (layer, _) = with_skips(Model((spec, LayerSpec("l1", "Layer", nn.Identity, (), ("a",))), default_loss)).layers
    with pytest.raises(TypeError, match="lazy: expected its own outputs, followed by a, found 1 tensors"):
        layer.build()(torch.ones(1, 1))


def test_more_tensors_than_one_transfer_carries_are_refused_at_the_start() -> None:
    names = " ".join(f"n{number}" for number in range(16))
    model = with_skips(model_of((names, ""), ("", names)))
    with pytest.raises(TypeError, match=r"layer 0 \(l0\): at most 16 tensors leave a stage, found 17"):
        Stage(Job(stages=2), model, 0, 0, 1).probe((torch.ones(1),))
