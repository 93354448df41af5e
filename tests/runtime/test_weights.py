"""Weights out and in: an export opens without bamboo, computes the same bits, and begins a run with them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from engine.core.checkpoint_rules import Resumption
from engine.core.errors import Problem, UserError
from engine.core.job.job import Job
from engine.core.manifest import DamagedCheckpointError, Manifest, prefixes
from engine.files.checkpoint_folder import CheckpointFolder, CheckpointName, checkpoints_at
from engine.files.jobs.checkpoint_place import hash_as_given
from engine.harness.run_list import export_weights
from engine.models.data_sources import open_data
from engine.models.model_loader import build_model
from engine.runtime.checkpoint.export import INDEX, GivenWeights, check_given, export
from engine.runtime.checkpoint.loader import load
from engine.runtime.stage.replicas import Replicas
from tests.runtime.kept_states import run_and_keep
from tests.runtime.thread_runs import run_in_threads
from tests.runtime.weights_models import sequential

REFUSES_SPARSE = TorchVersion(torch.__version__) >= "2.14"  # with weights_only
JOB = Job(
    model="tests.runtime.weights_models:sequential", data="synthetic", stages=3, microbatches=2, steps=4,
    validate_every=4, validation_microbatches=2, data_args={"outputs": 32}, clip_norm=0.0, audit=1, lr=0.01,
)  # fmt: skip


class Kept(NamedTuple):
    """The last checkpoint of a run, and the loss of the validation after it."""

    folder: CheckpointFolder
    manifest: Manifest
    validation: float


@pytest.fixture(name="kept", scope="module")
def _kept(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    ending, origins = run_and_keep(JOB, tmp_path_factory.mktemp("kept"))
    assert ending.error is None, ending.error
    last = origins[-1]
    folder = checkpoints_at(last.place)
    (found,) = ending.view.run_state.validations[3]
    return Kept(folder, folder.manifest(CheckpointName(last.step, last.file)), found.loss)


def whole_model() -> nn.Sequential:
    return sequential().eval()


def validation_loss(model: nn.Sequential) -> float:
    data = open_data(JOB)
    total = 0.0
    with torch.no_grad():
        for index in range(2):
            batch = data.validation(index, JOB.microbatch_size)
            total += float(nn.functional.mse_loss(model(batch.inputs[0]), batch.targets[0]))
    return total / 2


def exported(kept: Kept, output: Path, **options: Any) -> dict[str, Tensor]:
    done = export(kept.folder, kept.manifest, output, **options)
    if output.is_dir():
        places = json.loads((output / INDEX).read_text())["weight_map"]
        found = {name: load_file(output / file)[name] for name, file in places.items()}
    elif output.suffix == ".safetensors":
        found = load_file(output)
    else:
        found = torch.load(output, weights_only=True)
    assert done.tensors == len(found)
    return found


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "folder"])
def test_an_export_has_the_names_of_the_model_and_gives_the_bits_of_the_run(
    kept: Kept, tmp_path: Path, name: str
) -> None:
    options = {"largest": 3000} if name == "folder" else {}
    found = exported(kept, tmp_path / name, **options)
    model = whole_model()
    assert found.keys() == model.state_dict().keys()
    assert "3.again.weight" in found and "3.scratch" not in found and "5.weight" in found
    model.load_state_dict(found)
    assert validation_loss(model) == kept.validation
    if name == "folder":
        assert len(list((tmp_path / name).glob("model-*-of-*.safetensors"))) > 1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_distributed_checkpoint_loads_an_export_with_the_bits_of_the_run(kept: Kept, tmp_path: Path) -> None:
    done = export(kept.folder, kept.manifest, tmp_path / "folder", for_dcp=True)
    model = whole_model()
    state = {"model": {name: torch.full_like(value, 7) for name, value in model.state_dict().items()}}
    with pytest.raises(torch.distributed.checkpoint.api.CheckpointException, match="Missing key"):
        torch.distributed.checkpoint.load(state, checkpoint_id=tmp_path / "folder", no_dist=True)
    torch.distributed.checkpoint.load(state["model"], checkpoint_id=tmp_path / "folder", no_dist=True)
    model.load_state_dict(state["model"])
    assert validation_loss(model) == kept.validation and done.tensors == len(state["model"])
    with pytest.raises(UserError, match=r"--output: expected a new folder, found '.*m.pt' \(torch's DCP has"):
        export(kept.folder, kept.manifest, tmp_path / "m.pt", for_dcp=True)
    with pytest.raises(UserError, match="a new folder"):
        export(kept.folder, kept.manifest, tmp_path / "folder", for_dcp=True)
    with pytest.raises(UserError, match="init: expected a folder with safetensors files"):  # its index is a pickle
        GivenWeights(str(tmp_path / "folder"))


def test_an_export_opens_where_bamboo_cannot_be_imported(kept: Kept, tmp_path: Path) -> None:
    for name in ("m.safetensors", "m.pt"):
        export(kept.folder, kept.manifest, tmp_path / name)
    program = (
        "import sys, torch; from safetensors.torch import load_file\n"
        "one, other = load_file('m.safetensors'), torch.load('m.pt', weights_only=True)\n"
        "assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)\n"
        "sys.path = [each for each in sys.path if 'bamboo' not in each]\n"
        "print(len(one), any(name.partition('.')[0] in ('engine', 'bamboo_cli') for name in sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], check=False, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == [str(len(whole_model().state_dict())), "False"], done.stderr


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "folder"])
@pytest.mark.parametrize("pipelines", [1, 2])
def test_an_export_begins_a_run_with_its_bits(kept: Kept, tmp_path: Path, name: str, pipelines: int) -> None:
    export(kept.folder, kept.manifest, tmp_path / name)
    job = Job(**{**_fields(JOB), "init": str(tmp_path / name), "steps": 1, "lr": 0.0, "optimizer": "sgd"})
    job = Job(**{**_fields(job), "pipelines": pipelines, "validate_every": 1})
    ending, origins = run_and_keep(job, tmp_path / "again")
    assert ending.error is None, ending.error
    folder = checkpoints_at(origins[0].place)
    again = Kept(folder, folder.manifest(CheckpointName(0, origins[0].file)), 0.0)
    before, after = exported(kept, tmp_path / "a.pt"), exported(again, tmp_path / "b.pt")
    assert before.keys() == after.keys()
    different = [name for name in before if not torch.equal(before[name], after[name])]
    # A learning rate of 0 changes no weight; a forward in training moves the averages of the norm.
    assert all(".norm." in name for name in different), different


def _fields(job: Job) -> dict[str, Any]:
    return {name: getattr(job, name) for name in job.__dataclass_fields__}


def _drop(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda found: found.pop(name)


CHANGES: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "missing": (_drop("3.norm.bias"), "3.norm.bias: missing"),
    "unknown": (lambda found: found.update(extra=torch.zeros(1)), "extra: not in the model"),
    "of another shape": (
        lambda found: found.update({"4.weight": torch.zeros(8, 32)}),
        "4.weight: shape [8, 32], the model has [32, 8]",
    ),
    "of another kind": (
        lambda found: found.update({"4.bias": torch.zeros(32, dtype=torch.int64)}),
        "4.bias: torch.int64, the model has torch.float32",
    ),
    "not tied": (
        lambda found: found.update({"5.weight": torch.zeros(32, 32)}),
        "5.weight: other bits than 0.weight, and the model has one tensor there",
    ),
    "not equal under two names": (
        lambda found: found.update({"3.again.bias": torch.ones(8)}),
        "3.again.bias: other bits than 3.first.bias, and the model has one tensor there",
    ),
}


def refusal(path: Path) -> list[Problem]:
    with pytest.raises(UserError) as caught:
        check_given(GivenWeights(str(path)), JOB, build_model(JOB, open_data(JOB).facts))
    return list(caught.value.problems)


@pytest.mark.parametrize("change", CHANGES)
def test_every_mismatch_is_listed(kept: Kept, tmp_path: Path, change: str) -> None:
    found = exported(kept, tmp_path / "m.pt")
    CHANGES[change][0](found)
    save_file({name: each.contiguous().clone() for name, each in found.items()}, tmp_path / "m.safetensors")
    (problem,) = refusal(tmp_path / "m.safetensors")
    assert problem.field == "init" and problem.found.endswith(CHANGES[change][1])


def test_a_tensor_in_two_files_of_a_folder_is_refused_with_both(tmp_path: Path) -> None:
    for file in ("a.safetensors", "b.safetensors"):
        save_file({"w": torch.zeros(1)}, tmp_path / file)
    with pytest.raises(UserError, match=r"'w' is in '.*/a\.safetensors' and in '.*/b\.safetensors'"):
        GivenWeights(str(tmp_path))


def test_all_mismatches_come_at_once_and_many_are_counted(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, tmp_path / "m.safetensors")
    problems = refusal(tmp_path / "m.safetensors")
    assert len(problems) == len(whole_model().state_dict()) + 2
    save_file({f"x{number}": torch.zeros(1) for number in range(100)}, tmp_path / "n.safetensors")
    assert refusal(tmp_path / "n.safetensors")[-1].found.endswith(" more")


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.11 speaks of them when it reads
def test_files_that_are_no_weights_are_refused(tmp_path: Path) -> None:
    for name, content in (("m.safetensors", b"x" * 50), ("m.pt", b"x" * 50)):
        (tmp_path / name).write_bytes(content)
        assert refusal(tmp_path / name)[0].field == "init"
    torch.save({"model": {"0.weight": torch.zeros(1)}}, tmp_path / "nested.pt")
    assert "save the state_dict itself" in refusal(tmp_path / "nested.pt")[0].found
    torch.save(whole_model(), tmp_path / "pickled.pt")  # needs code to be loaded
    for name, kind in (("m.pt", "RuntimeError"), ("pickled.pt", "UnpicklingError")):
        (problem,) = refusal(tmp_path / name)
        assert problem.expected == "weights that torch.load(weights_only=True) reads"
        assert problem.found.endswith(f"{name}': none ({kind})")  # without torch's advice to load the file as code
    (tmp_path / "mine.py").write_text("import torch\n")
    for name in ("mine.py", "m.pt", "m.safetensors"):
        with pytest.raises(
            UserError, match=r"init: expected weights: FILE\.safetensors, a state_dict .* begins as no file"
        ):
            hash_as_given(str(tmp_path / name), "")  # before a run begins; the class of torch's error was told after it
    assert hash_as_given(str(tmp_path / "nested.pt"), "")
    torch.save({"0.weight": torch.eye(3).to_sparse()}, tmp_path / "sparse.pt")
    expected = "weights that torch.load(weights_only=True) reads" if REFUSES_SPARSE else "dense tensors"
    assert refusal(tmp_path / "sparse.pt")[0].expected == expected
    (tmp_path / "folder").mkdir()
    assert refusal(tmp_path / "folder")[0].expected == "a folder with safetensors files"
    (tmp_path / "folder" / INDEX).write_text(json.dumps({"weight_map": {"a": "../m.safetensors"}}))
    assert refusal(tmp_path / "folder")[0].expected == "an index that names files of its folder"
    for text in ("[]", "{}", '{"weight_map": ["a"]}'):
        (tmp_path / "folder" / INDEX).write_text(text)
        assert refusal(tmp_path / "folder")[0].expected == "an index with a 'weight_map' of file names by tensor"
    (tmp_path / "empty.pt").touch()
    assert refusal(tmp_path / "empty.pt")[0].found.endswith("empty.pt': an empty file")
    assert refusal(tmp_path / "nothing.pt")[0].expected == "weights that can be read"


def test_a_worker_tells_the_user_of_a_mismatch(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "m.safetensors")
    ending = run_in_threads(Job(**{**_fields(JOB), "init": str(tmp_path / "m.safetensors")}))
    assert isinstance(ending.error, UserError)
    assert any("a: not in the model" in each.found for each in ending.error.problems)


def test_outputs_of_another_form_are_refused(kept: Kept, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("x")
    for name in ("m.onnx", "full"):
        with pytest.raises(UserError, match=r"FILE.safetensors, FILE.pt or a new folder"):
            export(kept.folder, kept.manifest, tmp_path / name)
        with pytest.raises(UserError, match=r"FILE.safetensors, FILE.pt or a new folder"):
            export_weights("there is no such run", tmp_path, tmp_path / name, str)  # no byte is read before


def test_layers_of_one_name_have_their_numbers() -> None:
    assert prefixes(["a", "b"]) == ("a.", "b.")
    assert prefixes(["a", "a"]) == ("0.", "1.")


def _replicas() -> Replicas:
    """Returns the stage of the job that has buffers, and weights of other strides than the usual ones."""
    return Replicas(JOB, build_model(JOB, open_data(JOB).facts), (0, 2, 4), [(0, 1)])


def _from_checkpoint(kept: Kept) -> Resumption:
    name = kept.folder.names()[-1]
    return Resumption(name.step, kept.folder.place, name.file)


def test_read_buffers_are_those_of_the_step_boundary(kept: Kept, tmp_path: Path) -> None:
    """Whoever takes over, or writes a checkpoint, reads these."""
    export(kept.folder, kept.manifest, tmp_path / "model.safetensors")
    given, loaded = _replicas(), _replicas()
    GivenWeights(str(tmp_path / "model.safetensors")).fill(given)
    load(loaded, _from_checkpoint(kept))
    for replicas in (given, loaded):
        stage = replicas.stages[0, 1]
        (boundary,) = stage.boundary
        assert int(stage.layers[3].get_buffer("norm.num_batches_tracked")) == JOB.steps * JOB.microbatches
        assert all(torch.equal(*pair) for pair in zip(boundary, stage.buffers(), strict=True))


def test_a_checkpoint_of_weights_with_other_strides_fits_no_model(kept: Kept) -> None:
    replicas = _replicas()
    load(replicas, _from_checkpoint(kept))
    weight = replicas.stages[0, 1].layers[3].get_parameter("conv.weight")
    weight.data = torch.empty(weight.shape).copy_(weight.detach())
    with pytest.raises(DamagedCheckpointError, match=r"expected weight/conv.weight with strides \(9, 9, 3, 1\)"):
        load(replicas, _from_checkpoint(kept))
