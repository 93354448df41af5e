"""Data sources: purity of microbatches, disjoint splits, file formats, and what a user is told about a wrong one."""

from __future__ import annotations

import gzip
import importlib.util
import os
import struct
from pathlib import Path

import pytest
import torch

from engine.core.errors import EnvironmentLacksError, Problem, UserError
from engine.core.job.job import Job
from engine.models.data import Data
from engine.models.data_sources import open_data
from engine.models.datasets import split
from engine.models.layers import Batch
from engine.models.model_registry import DATA, DATA_TEXTS, MODEL_TEXTS, MODELS, SAMPLES

BUILTIN_JOBS = {
    "text": Job(model="gpt"),
    "masked text": Job(model="bert"),
    "digits": Job(model="resnet18"),
    "vectors": Job(model="mlp"),
    "synthetic images": Job(model="vgg19", data="synthetic", data_args={"size": 16}),
    "synthetic tokens": Job(model="gpt", data="synthetic"),
    "synthetic masked tokens": Job(model="bert", data="synthetic"),
}
MNIST_NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


@pytest.fixture(name="each", params=BUILTIN_JOBS, scope="module")
def _each(request: pytest.FixtureRequest) -> Data:
    return open_data(BUILTIN_JOBS[request.param])


def refusal(job: Job) -> Problem:
    """Returns the one problem that opening the data of `job` raises."""
    with pytest.raises(UserError) as caught:
        open_data(job)
    (problem,) = caught.value.problems
    return problem


def same(first: Batch, second: Batch) -> bool:
    pairs = zip(first.inputs + first.targets, second.inputs + second.targets, strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def idx(values: torch.Tensor) -> bytes:
    header = bytes((0, 0, 8, values.dim())) + struct.pack(f">{values.dim()}I", *values.shape)
    return header + bytes(values.flatten().int().tolist())


def mnist_files() -> dict[str, bytes]:
    contents = {}
    for part, count in (("train", 6), ("t10k", 3)):
        contents[f"{part}-images-idx3-ubyte"] = idx(torch.arange(count * 20).reshape(count, 5, 4))
        contents[f"{part}-labels-idx1-ubyte"] = idx(torch.arange(count))
    return contents


def write(folder: Path, contents: dict[str, bytes]) -> str:
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return str(folder)


def test_a_microbatch_depends_on_its_numbers_alone(each: Data) -> None:
    first = each.microbatch(3, 1, 2, 4)
    each.microbatch(0, 0, 0, 4)
    each.validation(0, 4)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    assert same(first, each.microbatch(3, 1, 2, 4))
    assert torch.equal(state, torch.get_rng_state())


def test_every_number_makes_another_microbatch(each: Data) -> None:
    batches = [each.microbatch(*numbers, 4) for numbers in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))]
    assert not any(same(a, b) for index, a in enumerate(batches) for b in batches[:index])


def test_another_process_would_load_the_same_microbatch(each: Data, request: pytest.FixtureRequest) -> None:
    job = BUILTIN_JOBS[request.node.callspec.params["each"]]
    assert same(each.microbatch(7, 0, 1, 4), open_data(job).microbatch(7, 0, 1, 4))
    assert same(each.validation(7, 4), open_data(job).validation(7, 4))


def test_the_seed_changes_training_microbatches() -> None:
    first, second = (open_data(Job(seed=seed)) for seed in (0, 1))
    assert not same(first.microbatch(0, 0, 0, 4), second.microbatch(0, 0, 0, 4))
    assert same(first.validation(0, 4), second.validation(0, 4))


def test_batches_have_the_shapes_that_the_facts_promise(each: Data) -> None:
    facts = each.facts
    for batch in (each.microbatch(0, 0, 0, 3), each.validation(10**6, 3)):
        (inputs,), (targets,) = batch.inputs, batch.targets
        if facts.task in ("causal", "masked"):
            assert inputs.shape == targets.shape == (3, facts.sequence)
            assert inputs.dtype == targets.dtype == torch.int64
            assert inputs.min() >= 0
            assert inputs.max() < facts.vocabulary
        elif facts.task == "classify":
            assert inputs.shape == (3, facts.channels, facts.height, facts.width)
            assert inputs.min() >= 0
            assert 0.5 < inputs.max() <= 1
            assert targets.shape == (3,)
            assert targets.max() < facts.num_classes
        else:
            assert inputs.shape == (3, facts.features)
            assert targets.shape == (3, facts.outputs)


def test_training_never_sees_the_validation_text(tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_bytes(b"a" * 900 + b"b" * 100)
    data = open_data(Job(data=str(tmp_path / "my.txt"), data_args={"sequence": 8}))
    for index in range(50):
        training, validation = data.microbatch(index, 0, 0, 8), data.validation(index, 8)
        for values in (training.inputs[0], training.targets[0]):
            assert (values == ord("a")).all()
        for values in (validation.inputs[0], validation.targets[0]):
            assert (values == ord("b")).all()


def test_a_target_is_the_next_byte(tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_bytes(bytes(range(200)))
    batch = open_data(Job(data=str(tmp_path / "my.txt"), data_args={"sequence": 8})).microbatch(0, 0, 0, 4)
    assert torch.equal(batch.inputs[0] + 1, batch.targets[0])


def test_the_masked_task_hides_the_same_share_of_each_sample() -> None:
    data = open_data(Job(model="bert", data_args={"sequence": 40}))
    causal = open_data(Job(model="gpt", data_args={"sequence": 40})).microbatch(0, 0, 0, 4)
    batch = data.microbatch(0, 0, 0, 4)
    hidden = batch.inputs[0] == data.facts.vocabulary - 1
    assert hidden.sum(dim=1).tolist() == [6, 6, 6, 6]
    assert torch.equal(batch.targets[0] != -100, hidden)
    assert torch.equal(torch.where(hidden, batch.targets[0], batch.inputs[0]), causal.inputs[0])


def test_split_shares_out_every_image_once() -> None:
    images, labels = torch.arange(100).reshape(100, 1, 1, 1), torch.arange(100)
    training, validation = split(images, labels)
    assert len(training[1]) == 80
    assert sorted(training[1].tolist() + validation[1].tolist()) == list(range(100))
    assert torch.equal(training[0].flatten(), training[1])


def test_digits_are_those_of_scikit_learn() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    data = open_data(Job(model="resnet18"))
    theirs = torch.from_numpy(datasets.load_digits().images).float() / 16
    batch = data.validation(0, 8)
    for image in batch.inputs[0]:
        assert (theirs == image[0]).all(dim=(1, 2)).any()


def test_digits_are_scaled_up() -> None:
    data = open_data(Job(model="resnet18", data_args={"size": 16}))
    assert data.facts.height == data.facts.width == 16
    assert data.microbatch(0, 0, 0, 2).inputs[0].shape == (2, 1, 16, 16)


def test_validation_visits_every_image_once_in_a_round() -> None:
    data = open_data(Job(model="resnet18"))
    whole = data.validation(0, 360).inputs[0]
    assert torch.equal(whole[8:16], data.validation(1, 8).inputs[0])
    assert torch.equal(whole, data.validation(1, 360).inputs[0])


@pytest.mark.parametrize("is_gzipped", [False, True])
def test_mnist_files_are_read(tmp_path: Path, is_gzipped: bool) -> None:
    contents = mnist_files()
    if is_gzipped:
        contents = {f"{name}.gz": gzip.compress(content) for name, content in contents.items()}
    data = open_data(Job(model="resnet18", data=write(tmp_path, contents)))
    assert (data.facts.channels, data.facts.height, data.facts.width) == (1, 5, 4)
    batch = data.validation(0, 3)
    assert batch.targets[0].tolist() == [0, 1, 2]
    assert torch.equal(batch.inputs[0] * 255, torch.arange(60.0).reshape(3, 1, 5, 4))


def test_cifar_files_are_read(tmp_path: Path) -> None:
    record = bytes([7]) + bytes(1024) + bytes([51]) * 1024 + bytes([255]) * 1024
    write(tmp_path, {"data_batch_1.bin": record, "data_batch_2.bin": record * 2, "test_batch.bin": record})
    data = open_data(Job(model="resnet18", data=str(tmp_path)))
    batch = data.microbatch(0, 0, 0, 2)
    assert batch.inputs[0].shape == (2, 3, 32, 32)
    assert batch.targets[0].tolist() == [7, 7]
    assert batch.inputs[0].mean(dim=(0, 2, 3)).tolist() == pytest.approx([0, 0.2, 1])
    assert len(data.training_set[1]) == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        ({}, "MNIST idx files or CIFAR-10"),
        ({"data_batch_1": b"\x80"}, "pickled"),
        ({"data_batch_1.bin": b"\0" * 3073}, "test_batch.bin"),
        ({"data_batch_1.bin": b"\0" * 3072}, "it has 3072 bytes"),
        ({"data_batch_1.bin": b"\x0a" + b"\0" * 3072}, "labels 0..9"),
        ({"train-images-idx3-ubyte": b""}, "train-labels-idx1-ubyte"),
        (dict.fromkeys(MNIST_NAMES, b"\0\0\x08\x01\0\0"), "unsigned bytes with 3 dimensions"),
        ({**mnist_files(), "t10k-images-idx3-ubyte": idx(torch.zeros(3, 5, 5))}, "images of one size"),
        ({**mnist_files(), "t10k-labels-idx1-ubyte": idx(torch.zeros(2))}, "one label for each of 3"),
        ({**mnist_files(), "t10k-labels-idx1-ubyte": idx(torch.zeros(3))[:-1]}, "3 bytes after the header"),
        ({**dict.fromkeys([f"{name}.gz" for name in MNIST_NAMES], b"no gzip")}, "a file that can be read"),
    ],
)
def test_a_wrong_image_folder_is_refused(tmp_path: Path, contents: dict[str, bytes], words: str) -> None:
    problem = refusal(Job(model="resnet18", data=write(tmp_path, contents)))
    assert problem.field == "data"
    assert words in str(problem)
    assert str(tmp_path) in problem.found


def test_an_unknown_name_gets_its_nearest_spelling() -> None:
    problem = refusal(Job(data="tekst"))
    assert (problem.field, problem.found, problem.hint) == ("data", "'tekst'", "did you mean 'text'?")
    problem = refusal(Job(model="gtp"))
    assert (problem.field, problem.hint) == ("model", "did you mean 'gpt'?")
    for dotted, meant in (("mygpt.MyGPT", "mygpt:MyGPT"), ("mine.nets.GPT", "mine.nets:GPT")):
        assert refusal(Job(model=dotted)).hint == f"did you mean '{meant}'?"
    assert refusal(Job(model="checkpoints/a-1.pt")).hint == ""


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    assert refusal(Job(data=str(tmp_path / "missing.txt"))).hint == "No such file or directory"
    os.mkfifo(tmp_path / "pipe")
    assert refusal(Job(data=str(tmp_path / "pipe"))).expected == "a regular file"


@pytest.mark.parametrize("length", [0, 89])
def test_a_text_that_is_too_short_is_refused(tmp_path: Path, length: int) -> None:
    (tmp_path / "short.txt").write_bytes(b"x" * length)
    problem = refusal(Job(data=str(tmp_path / "short.txt"), data_args={"sequence": 8}))
    assert problem.field == "data"
    assert "at least 90 bytes" in problem.expected
    assert f"{length} bytes" in problem.found


def test_the_shortest_text_is_enough(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_bytes(b"x" * 90)
    data = open_data(Job(data=str(tmp_path / "short.txt"), data_args={"sequence": 8}))
    assert data.validation(0, 2).inputs[0].shape == (2, 8)


def test_data_that_a_model_cannot_learn_is_refused() -> None:
    assert "text, synthetic" in refusal(Job(model="gpt", data="digits")).expected
    assert "digits, synthetic" in refusal(Job(model="resnet18", data="text")).expected


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentLacksError, match="pip install scikit-learn"):
        open_data(Job(model="resnet18"))


def test_every_wrong_argument_is_named_at_once() -> None:
    with pytest.raises(UserError) as caught:
        open_data(Job(model="mlp", data_args={"featurs": 3, "outputs": 0, "features": "many"}))
    assert [(problem.field, problem.found) for problem in caught.value.problems] == [
        ("data_args.featurs", "'featurs'"),
        ("data_args.outputs", "0"),
        ("data_args.features", "'many'"),
    ]
    assert caught.value.problems[0].hint == "did you mean 'features'?"


def test_the_list_of_data_says_the_samples_that_they_yield() -> None:
    def sample(data: Data) -> str:
        batch = data.microbatch(0, 0, 0, 2)
        inputs, targets = batch.inputs[0], batch.targets[0]
        kind, shape = str(inputs.dtype).removeprefix("torch."), "x".join(map(str, inputs.shape[1:]))
        match data.facts.task:
            case "classify":
                return f"{kind} {shape}, {data.facts.num_classes} classes"
            case "regress":
                return f"{kind} {shape}, target {str(targets.dtype).removeprefix('torch.')} {targets.shape[1]}"
            case _:
                return f"{kind} {shape}, below {data.facts.vocabulary}"

    found = {name: {task: sample(factory(0)) for task, factory in tasks.items()} for name, tasks in DATA.items()}
    assert found == SAMPLES
    assert list(DATA_TEXTS) == list(DATA)
    assert list(MODEL_TEXTS) == list(MODELS)
