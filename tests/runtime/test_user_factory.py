"""Models and data of the user's own: what a factory may return, and what is said when it does anything else."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from engine.core.errors import Problem, UserError
from engine.core.job.job import Job
from engine.core.units import Scalar
from engine.models.data import DataFacts
from engine.models.data_sources import open_data
from engine.models.layers import FunctionLayer, Tie
from engine.models.model_loader import build_model
from engine.models.user_code import exception_of

FACTS = DataFacts(task="regress", features=4, outputs=1)
_numbers = itertools.count()
WriteModule = Callable[[str], str]


@pytest.fixture(name="module")
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriteModule:
    """Returns a function that writes source as a module on Python's path and returns the module's name."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(source: str) -> str:
        name = f"user_module_{next(_numbers)}"
        (tmp_path / f"{name}.py").write_text(f"from torch import nn\nimport torch\n{source}\n")
        return name

    return write


def refusal(model: str, **model_args: Scalar) -> Problem:
    """Returns the one problem that building `model` raises."""
    with pytest.raises(UserError) as caught:
        build_model(Job(model=model, model_args=model_args), FACTS)
    (problem,) = caught.value.problems
    return problem


def raised(call: Callable[[], object]) -> str:
    """Returns the exception of a call that opens a model or data, in the words of a run."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the words name the type
        call()
    frames = caught.value.__traceback__
    assert frames is not None and frames.tb_next is not None
    return exception_of(caught.value.with_traceback(frames.tb_next.tb_next)).at_start()  # without those of the test


def test_a_sequential_keeps_its_names_and_order(module: WriteModule) -> None:
    name = module(
        "def make(*, width=3):\n    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1))"
    )
    model = build_model(Job(model=f"{name}:make", model_args={"width": 5}), FACTS)
    assert [(spec.name, spec.kind) for spec in model.layers] == [("0", "Linear"), ("1", "ReLU"), ("2", "Linear")]
    assert model.layers[0].build().weight.shape == (5, 4)


def test_a_list_may_mix_modules_and_functions(module: WriteModule) -> None:
    name = module("def make():\n    return [nn.Linear(4, 2), torch.tanh, lambda x: x.sum(1, keepdim=True)]")
    layers = [spec.build() for spec in build_model(Job(model=f"{name}:make"), FACTS).layers]
    x = torch.ones(3, 4)
    for layer in layers:
        x = layer(x)
    assert isinstance(layers[1], FunctionLayer)
    assert x.shape == (3, 1)


def test_a_factory_may_return_a_model(module: WriteModule) -> None:
    name = module(
        "from engine.models.layers import LayerSpec, Model\n"
        "def loss(outputs, targets): return outputs[0].sum()\n"
        "def make(): return Model((LayerSpec('only', 'Linear', lambda: nn.Linear(4, 1)),), loss)"
    )
    model = build_model(Job(model=f"{name}:make"), FACTS)
    assert model.layers[0].name == "only"
    assert model.loss((torch.ones(3),), ()) == 3


def test_weights_depend_on_the_seed_of_the_job_alone(module: WriteModule) -> None:
    name = module("def make():\n    return [nn.Linear(4, 4), nn.Linear(4, 1)]")

    def weight(seed: int) -> torch.Tensor:
        torch.rand(seed + 1)
        model = build_model(Job(model=f"{name}:make", seed=seed), FACTS)
        return model.layers[1].build().get_parameter("weight")

    assert torch.equal(weight(0), weight(0))
    assert not torch.equal(weight(0), weight(1))


def test_each_build_is_a_copy_and_the_callers_stream_stays(module: WriteModule) -> None:
    name = module("def make():\n    return [nn.Linear(4, 1)]")
    state = torch.get_rng_state()
    spec = build_model(Job(model=f"{name}:make"), FACTS).layers[0]
    first, second = (spec.build().get_parameter("weight") for _ in range(2))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(first, second)
    assert first is not second


def test_a_parameter_of_several_layers_becomes_a_tie(module: WriteModule) -> None:
    name = module(
        "def make():\n    first, last = nn.Embedding(8, 4), nn.Linear(4, 8)\n"
        "    last.weight = first.weight\n    middle = nn.Linear(4, 4, bias=False)\n"
        "    return nn.Sequential(first, middle, middle, last)"
    )
    model = build_model(Job(model=f"{name}:make"), FACTS)
    assert len(model.layers) == 4
    assert model.ties == (Tie(((0, "weight"), (3, "weight"))), Tie(((1, "weight"), (2, "weight"))))


def test_the_loss_follows_the_targets(module: WriteModule) -> None:
    name = module("def make():\n    return [nn.Linear(4, 3)]")
    loss = build_model(Job(model=f"{name}:make"), FACTS).loss
    outputs = (torch.tensor([[0.0, 1.0, 3.0]]),)
    assert loss(outputs, (torch.zeros(1, 3),)).item() == pytest.approx(10 / 3)
    assert loss(outputs, (torch.tensor([2]),)).item() == pytest.approx(0.169846)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def make():\n    return 3", "it returned int"),
        ("def make():\n    return []", "at least one layer"),
        ("def make():\n    return [nn.Linear(4, 1), 'relu']", "layer 1 is <class 'str'>"),
        ("def make():\n    return [nn.ReLU]", "layer 0 is <class 'torch.nn"),
        ("make = 3", "it is a int"),
        ("def makes():\n    return [nn.ReLU()]", "did you mean 'makes'?"),
    ],
)
def test_what_a_factory_does_wrong_is_said(module: WriteModule, source: str, words: str) -> None:
    factory = f"{module(source)}:make"
    problem = refusal(factory)
    assert (problem.field, problem.found) == ("model", repr(factory))
    assert words in str(problem)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            "def make():\n    return cut()\ndef cut():\n    raise ValueError('no GPU here')",
            r"in the factory \w+:make: ValueError: no GPU here \(\S+/user_module_\d+.py:6, in cut\)",
        ),
        (
            "def make():\n    raise SystemExit(3)",
            r"in the factory \w+:make: SystemExit: 3 \(\S+.py:4, in make",
        ),
        ("raise SystemExit(3)", r"in the import of \w+: SystemExit: 3 \(\S+.py:3, in <module>\)"),
        (
            "def main():\n    raise ValueError('no RANK')\nmain()",
            r"in the import of \w+, which calls main \(a script guards that by `if __name__ == \"__main__\":`\): "
            r"ValueError: no RANK \(\S+.py:4, in main\)",
        ),
        ("def make(:", r"in the import of \w+: SyntaxError: invalid syntax \(\S+/user_module_\d+.py:3\)"),
        ("import no_such_module_of_mine", r"in the import of \w+: ModuleNotFoundError: .* \(\S+.py:3, in <module>\)"),
    ],
    ids=["raises", "exits", "import exits", "script", "syntax", "import of an import"],
)
def test_an_exception_in_a_factory_names_the_factory_and_the_users_line(
    module: WriteModule, source: str, words: str
) -> None:
    factory = f"{module(source)}:make"
    assert re.match(words, raised(lambda: build_model(Job(model=factory), FACTS)))


MODEL_OF_MODULES = """
from engine.models.layers import LayerSpec, Model
def loss(outputs, targets): return outputs[0].sum()
def make():
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    return Model(layers=(first, torch.relu, LayerSpec("own", "Linear", lambda: nn.Linear(4, 4)), last), loss=loss)
"""


def test_a_tie_that_a_model_names_itself_is_there_once(module: WriteModule) -> None:
    named = MODEL_OF_MODULES.replace("loss=loss)", "loss=loss, ties=(Tie(((0, 'weight'), (3, 'weight'))),))")
    name = module(f"from engine.models.layers import Tie\n{named}")
    assert build_model(Job(model=f"{name}:make"), FACTS).ties == (Tie(((0, "weight"), (3, "weight"))),)


def test_the_layers_of_a_model_may_be_modules_functions_and_specs(module: WriteModule) -> None:
    model = build_model(Job(model=f"{module(MODEL_OF_MODULES)}:make"), FACTS)
    assert [(each.name, each.kind) for each in model.layers] == [
        ("0", "Linear"),
        ("1", "FunctionLayer"),
        ("own", "Linear"),
        ("3", "Linear"),
    ]
    assert model.ties == (Tie(((0, "weight"), (3, "weight"))),)
    weights = [model.layers[index].build().get_parameter("weight") for index in (0, 0, 3)]
    assert weights[0] is not weights[1]
    assert all(torch.equal(weights[0], each) for each in weights)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ("Model((nn.Linear,), loss)", "TypeError: layer 0 is <class 'torch.nn.modules.linear.Linear'>: call it"),
        ("Model((nn.ReLU(), 3), loss)", "TypeError: layer 1 is <class 'int'>"),
        ("Model(nn.Linear(1, 1), loss)", "TypeError: expected an nn.Sequential or a list of layers, found Linear"),
        (
            "Model((nn.ReLU(),), 'mse')",
            "TypeError: Model: expected loss as a function of (outputs, targets), found str",
        ),
        ("Model((nn.ReLU(),))", "TypeError: Model.__init__() missing 1 required positional argument: 'loss'"),
        (
            "Batch((x,), x)",
            "TypeError: Batch: expected targets as a tuple of tensors, found Tensor; write targets=(x,)",
        ),
        ("Batch([x], (x,))", "TypeError: Batch: expected inputs as a tuple of tensors, found list; write inputs=(x,)"),
        (
            "Batch((x, 3), (x,))",
            "expected inputs as a tuple of tensors, found a tuple with a int inside, at position 1",
        ),
        (
            "DataFacts(task='clasify')",
            "ValueError: DataFacts: expected one of causal, masked, classify, regress as task",
        ),
    ],
)
def test_models_batches_and_facts_check_what_they_are_given(module: WriteModule, made: str, words: str) -> None:
    name = module(
        "from engine.models.layers import Batch, Model\nfrom engine.models.data import DataFacts\n"
        f"x, loss = torch.ones(1), lambda outputs, targets: outputs[0].sum()\ndef make():\n    return {made}"
    )
    told = raised(lambda: build_model(Job(model=f"{name}:make"), FACTS))
    assert words in told
    assert f"{name}.py:7, in make" in told


def test_the_current_folder_is_not_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").write_text("def make(): return []")
    monkeypatch.chdir(tmp_path)
    assert "ModuleNotFoundError" in refusal("only_here:make").hint


@pytest.mark.parametrize("name", ["pkg.mod:", "pkg.mod:a.b", ":make", "pkg/mod:make", "os:system()"])
def test_the_grammar_is_strict(name: str) -> None:
    assert "package.module:factory" in refusal(name).expected


def test_unknown_and_missing_arguments_are_named(module: WriteModule) -> None:
    name = module("def make(width, *, depth=1):\n    return [nn.Linear(4, width)]")
    with pytest.raises(UserError) as caught:
        build_model(Job(model=f"{name}:make", model_args={"widht": 3}), FACTS)
    unknown, missing = caught.value.problems
    assert (unknown.field, unknown.found, unknown.hint) == ("model_args.widht", "'widht'", "did you mean 'width'?")
    assert missing.field == "model_args.width"


USER_DATA = """
from engine.models.data import DataFacts
from engine.models.layers import Batch

class Ones:
    def __init__(self, seed, scale=1):
        self.facts, self.args = DataFacts(task="regress", features=1), (seed, scale)

    def microbatch(self, step, pipeline, microbatch, size):
        return Batch((torch.ones(size, 1),), (torch.ones(size, 1),))

    def validation(self, index, size):
        return self.microbatch(0, 0, 0, size)

class NoFacts(Ones):
    def __init__(self, seed):
        self.facts = {}

def seedless():
    return Ones(0)

def fails(seed):
    return 1 / 0

class NoValidation:
    def __init__(self, seed):
        self.facts = DataFacts(task="regress", features=1)

    def microbatch(self, step, pipeline, microbatch, size):
        return torch.ones(size, 1), torch.ones(size, 1)

class Pairs(NoValidation):
    def validation(self, index, size):
        return [][index]
"""


def test_a_user_may_bring_data(module: WriteModule) -> None:
    data = open_data(Job(model="mlp", data=f"{module(USER_DATA)}:Ones", data_args={"scale": 2}, seed=9))
    assert data._source.args == (9, 2)  # type: ignore[attr-defined]
    assert data.microbatch(0, 0, 0, 3).inputs[0].shape == (3, 1)


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("NoFacts", "it returned NoFacts, whose facts are a dict: facts = DataFacts(task=...)"),
        ("NoValidation", "it returned NoValidation without validation()"),
        ("torch", "it is a module"),
        ("Zeros", "a factory in user_module"),
    ],
)
def test_what_a_data_factory_does_wrong_is_said(module: WriteModule, factory: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        open_data(Job(data=f"{module(USER_DATA)}:{factory}"))
    assert words in str(caught.value)


OBJECTS = f"""{USER_DATA}
net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
rows = Ones(seed=1, scale=2)
"""


def test_a_module_and_a_source_of_data_stand_for_themselves_and_an_import_draws_the_same_everywhere(
    module: WriteModule,
) -> None:
    def weights() -> torch.Tensor:
        linear = build_model(Job(model=f"{module(OBJECTS)}:net"), FACTS).layers[0].build()
        assert isinstance(linear, nn.Linear)
        return linear.weight

    torch.manual_seed(1)
    first = weights()
    torch.manual_seed(2)
    assert torch.equal(first, weights())
    name = module(OBJECTS)
    assert open_data(Job(data=f"{name}:rows")).microbatch(0, 0, 0, 3).inputs[0].shape == (3, 1)
    problem = refusal(f"{name}:net", width=3)
    assert str(problem) == f"model_args: expected no arguments, found width ({name}:net is a Sequential, no factory)"


def test_an_exception_in_the_data_names_the_data_and_the_users_line(module: WriteModule) -> None:
    """Neither of them was named: torch's words, or the frames of bamboo, were all that a user got."""
    name = module(USER_DATA)
    told = raised(lambda: open_data(Job(data=f"{name}:fails")))
    assert re.match(rf"in the factory {name}:fails: ZeroDivisionError: division by zero \(\S+.py:\d+, in fails", told)
    pairs = open_data(Job(data=f"{name}:Pairs"))
    told = raised(lambda: pairs.microbatch(0, 0, 0, 2))
    call = "Pairs.microbatch(step=0, pipeline=0, microbatch=0, size=2)"
    expected = f"{call}: expected a Batch, found tuple: return Batch(inputs=(x,), targets=(y,))"
    assert re.match(rf"in the data: TypeError: {re.escape(expected)} \(\S+.py:\d+, in microbatch\)", told)
    told = raised(lambda: pairs.validation(0, 2))
    assert re.match(r"in the data: IndexError: list index out of range \(\S+.py:\d+, in validation\)", told)


ROWS = """
from engine.models.data import DataFacts
from engine.models.layers import Batch
class Rows:
    facts = DataFacts(task="regress", features=2, outputs=1)
    def __init__(self, seed, at, rows, targets, width, dtype):
        self.at, self.rows, self.targets, self.width, self.dtype = at, rows, targets, width, getattr(torch, dtype)
    def microbatch(self, step, pipeline, microbatch, size):
        if step < self.at:
            return Batch((torch.zeros(size, 2),), (torch.zeros(size, 1),))
        return Batch((torch.zeros(self.rows, self.width, dtype=self.dtype),), (torch.zeros(self.targets, 1),))
    def validation(self, index, size):
        return self.microbatch(self.at, 0, 0, size)
"""


@pytest.mark.parametrize(
    ("at", "wrong", "told"),
    [
        (0, {"rows": 10}, "returned 10 rows in inputs[0], 4 were asked for"),
        (0, {"rows": 0, "targets": 0}, "returned 0 rows in inputs[0], 4 were asked for"),
        (3, {"targets": 3}, "returned 3 rows in targets[0], 4 were asked for"),
        (
            3,
            {"width": 5},
            "returned float32 [4, 5] as inputs, the first were float32 [4, 2]; --variable-shapes lets sizes differ",
        ),
        (3, {"dtype": "float64"}, "returned float64 [4, 2] as inputs, the first were float32 [4, 2]"),
    ],
)
def test_a_microbatch_of_another_size_or_shape_is_a_fault_of_the_data(
    module: WriteModule, at: int, wrong: dict[str, Scalar], told: str
) -> None:
    """A wrong number of rows trained, with wrong figures, or a layer was blamed for it."""
    args: dict[str, Scalar] = {"at": at, "rows": 4, "targets": 4, "width": 2, "dtype": "float32", **wrong}
    data = open_data(Job(data=f"{module(ROWS)}:Rows", data_args=args))
    for step in range(at):
        data.microbatch(step, 0, 0, 4)
    call = f"Rows.microbatch(step={at}, pipeline=0, microbatch=1, size=4)"
    assert raised(lambda: data.microbatch(at, 0, 1, 4)).startswith(f"in the data: ValueError: {call} {told} (")


def test_a_factory_without_a_signature_is_called() -> None:
    told = raised(lambda: build_model(Job(model="math:hypot", model_args={"x": 1}), FACTS))
    assert told == "in the factory math:hypot: TypeError: math.hypot() takes no keyword arguments"


def test_data_of_another_task_is_refused_by_the_model() -> None:
    with pytest.raises(UserError) as caught:
        build_model(Job(model="gpt"), FACTS)
    assert caught.value.problems[0].field == "data"


USER_BATCHES = """
from engine.models.data import Chunk
from engine.models.data import DataFacts
from engine.models.data import WholeBatch

class Whole:
    facts, spec, num_made = DataFacts(task="regress", features=1), None, 0

    def __init__(self, seed):
        pass

    def batch(self, step, pipeline, size):
        self.num_made += 1
        x = torch.arange(size).float().view(size, 1) + 100 * step + 1000 * pipeline
        return WholeBatch((x,), x + 0.5, {"named": [x, "text"]})

    def validation_batch(self, size):
        return self.batch(-1, 0, size)

class Odd(Whole):
    def batch(self, step, pipeline, size):
        return super().batch(step, pipeline, size + 1)

class Double(Whole):
    def batch(self, step, pipeline, size):
        return super().batch(step, pipeline, 2 * size)

class LongTargets(Whole):
    def batch(self, step, pipeline, size):
        return WholeBatch((torch.ones(size, 1),), torch.ones(2 * size))

class LongValidation(Whole):
    def validation_batch(self, size):
        return super().validation_batch(3 * size)

class Number(Whole):
    def batch(self, step, pipeline, size):
        return 3

class Grows(Whole):
    def batch(self, step, pipeline, size):
        return super().batch(step, pipeline, size + step)

class Drifts(Whole):
    def batch(self, step, pipeline, size):
        return WholeBatch((torch.ones(size, 1), step), torch.ones(size, 1))
"""
BATCH_JOB = Job(model="mlp", microbatches=3, pipelines=2, validation_microbatches=2, microbatch_size=2)


def test_whole_batches_become_microbatches_of_their_own_memory(module: WriteModule) -> None:
    data = open_data(replace(BATCH_JOB, data=f"{module(USER_BATCHES)}:Whole"))
    for pipeline in range(2):
        for microbatch in range(3):
            batch = data.microbatch(1, pipeline, microbatch, 2)
            first = 100 + 1000 * pipeline + 2 * microbatch
            for tensor in batch.inputs:
                assert tensor.flatten().tolist() == [first, first + 1]
                tensor.zero_()  # what comes after does not see it
            assert batch.targets[0].flatten().tolist() == [first + 0.5, first + 1.5]
    assert data.microbatch(1, 0, 0, 2).inputs[1].flatten().tolist() == [100, 101]
    assert data.validation(1, 2).inputs[0].flatten().tolist() == [-98, -97]
    assert (
        vars(vars(data)["_source"])["_source"].num_made == 1 + 2 + 1
    )  # at the start, for each pipeline, for validation


def test_the_first_layer_is_called_with_the_form_of_the_batch(module: WriteModule) -> None:
    source = USER_BATCHES + (
        "def first(x, *, named): return x, named[0], torch.tensor(len(named[1]))\n"
        "def make(): return [first, torch.add]\n"
    )
    name = module(source)
    job = replace(BATCH_JOB, model=f"{name}:make", data=f"{name}:Whole")
    data = open_data(job)
    layer = build_model(job, data.facts).layers[0].build()
    x, again, length = layer(*data.microbatch(0, 0, 2, 2).inputs)
    assert x.tolist() == again.tolist() == [[4], [5]]
    assert length == len("text")


def test_a_first_layer_that_is_called_by_name_may_hand_a_skip(module: WriteModule) -> None:
    source = USER_BATCHES + (
        "def first(x, *, named): return 3 * x, named[0]\n"
        "def last(x, skip): return x - skip\n"
        "first.hands = last.takes = ('skip',)\n"
        "def make(): return [first, torch.neg, last]\n"
    )
    name = module(source)
    data = open_data(replace(BATCH_JOB, data=f"{name}:Whole"))
    values = data.microbatch(0, 0, 2, 2).inputs
    for spec in build_model(Job(model=f"{name}:make"), data.facts).layers:
        made = spec.build()(*values)
        values = made if isinstance(made, tuple) else (made,)
    assert values[0].tolist() == [[-16], [-20]]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Odd", "batch.args.0: expected 6 along dimension 0, found 7"),
        ("Double", "batch.args.0: expected 6 along dimension 0, found 12"),
        ("LongTargets", "batch.targets: expected 6 along dimension 0, found 12"),
    ],
)
def test_batches_of_another_size_are_told_when_they_are_opened(module: WriteModule, name: str, told: str) -> None:
    whole = f"{module(USER_BATCHES)}:{name}"
    words = raised(lambda: open_data(replace(BATCH_JOB, data=whole)))
    assert words.startswith(f"in the data: ValueError: {name}.batch(step=0, pipeline=0, size=6): {told} (")


def test_a_batch_of_validation_has_its_size_too(module: WriteModule) -> None:
    data = open_data(replace(BATCH_JOB, data=f"{module(USER_BATCHES)}:LongValidation"))
    with pytest.raises(ValueError, match=r"validation_batch\(size=4\): batch.args.0: expected 4 .* found 12"):
        data.validation(0, 2)


def test_what_is_wrong_with_a_batch_is_told_with_the_call_that_made_it(module: WriteModule) -> None:
    name = module(USER_BATCHES)
    words = raised(lambda: open_data(replace(BATCH_JOB, data=f"{name}:Number")))
    told = "Number.batch(step=0, pipeline=0, size=6) returned int, expected a WholeBatch"
    assert words.startswith(f"in the data: TypeError: {told} (")
    data = open_data(replace(BATCH_JOB, data=f"{name}:Grows"))
    with pytest.raises(ValueError, match=r"^Grows.batch\(step=4, pipeline=1, size=6\): batch.args.0: .* found 10"):
        data.microbatch(4, 1, 0, 2)


def test_values_that_are_no_tensors_must_stay(module: WriteModule) -> None:
    data = open_data(replace(BATCH_JOB, data=f"{module(USER_BATCHES)}:Drifts"))
    with pytest.raises(ValueError, match="arguments of the same form in every microbatch"):
        data.microbatch(1, 0, 0, 2)


@pytest.mark.parametrize("names", ["'skip'", "('skip', 3)"])
def test_names_of_skips_are_checked(module: WriteModule, names: str) -> None:
    source = f"def make():\n    layer = nn.ReLU()\n    layer.takes = {names}\n    return [nn.ReLU(), layer]"
    problem = refusal(f"{module(source)}:make")
    assert "a tuple of names as takes of layer 1" in str(problem)


def test_functions_may_hand_and_take_too(module: WriteModule) -> None:
    source = (
        "def hand(x): return 2 * x, x\n"
        "def take(x, skip): return x - skip\n"
        "hand.hands = take.takes = ['skip']\n"
        "def make(): return [hand, torch.exp, take]"
    )
    layers = [spec.build() for spec in build_model(Job(model=f"{module(source)}:make"), FACTS).layers]
    values: tuple[torch.Tensor, ...] = (torch.ones(1),)
    for layer in layers:
        values = layer(*values)
    assert torch.equal(values[0], torch.exp(torch.tensor([2.0])) - 1)
