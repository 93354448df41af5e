"""The samples of a prediction, and its merged outputs: each sample once, in order; what does not fit is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.core.errors import StorageError, UserError
from engine.core.job.job import Job
from engine.models.data_sources import open_data
from engine.models.predicted_samples import PredictedSamples
from engine.runtime.checkpoint.outputs import dims_of, merged_outputs, write_merged, write_outputs


class Rows:
    """Ten numbered rows with a label each, as columns."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"x": torch.full((2,), float(number)), "y": torch.tensor(number)}


def rows() -> Rows:
    """Returns a finite data set without an evaluation set."""
    return Rows()


def samples(**args: Any) -> PredictedSamples:
    job = Job(model="mlp", data="tests.runtime.test_predicted_samples:rows", microbatch_size=4, predict_args=args)
    return PredictedSamples(job, open_data(job))


def read(found: PredictedSamples) -> list[float]:
    """Returns the numbers of all samples that count."""
    parts = ((part, found.batch(part.number).inputs[0]) for part in found.parts())
    return [float(row[0]) for part, x in parts for row in x[: part.rows]]


def test_a_training_set_comes_in_its_order() -> None:
    assert read(samples(samples="", rows=0)) == [float(number) for number in range(10)]
    assert read(samples(samples="training", rows=6)) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    with pytest.raises(UserError, match=r"found 'train' .did you mean 'training'"):
        samples(samples="train")


def test_a_file_may_leave_the_targets_out(tmp_path: Path) -> None:
    save_file({"x": torch.arange(10.0, 20.0).repeat(2, 1).T.contiguous()}, tmp_path / "rows.safetensors")
    assert read(samples(file=str(tmp_path / "rows.safetensors"))) == [float(number) for number in range(10, 20)]
    np.save(tmp_path / "rows.npy", np.zeros((3, 2)))
    with pytest.raises(UserError, match="expected tensors x"):
        samples(file=str(tmp_path / "rows.npy"))


def test_an_endless_set_needs_a_number_of_rows() -> None:
    job = Job(model="gpt", microbatch_size=4, predict_args={"samples": ""})
    with pytest.raises(UserError, match="--limit ROWS for a set without end"):
        PredictedSamples(job, open_data(job))


def written(folder: Path, *parts: tuple[Tensor, ...], total: int) -> Path:
    for number, outputs in enumerate(parts):
        write_outputs(folder, number, outputs, total, 2)
    return folder


def test_outputs_are_joined_by_their_dimensions(tmp_path: Path) -> None:
    whole, across = torch.arange(10.0).reshape(5, 2), torch.arange(15.0).reshape(3, 5)
    filled = [torch.cat([whole, whole[:1]]), torch.cat([across, across[:, :1]], 1)]
    parts = [(filled[0][at : at + 2], filled[1][:, at : at + 2], torch.ones(())) for at in (0, 2, 4)]
    folder = written(tmp_path / "outputs", *parts, total=5)
    merged = merged_outputs(folder, dims_of("0,1,-"))
    assert {name: tensor.tolist() for name, tensor in merged.items()} == {
        "output.0": whole.tolist(),
        "output.1": across.tolist(),
    }
    (only,) = merged_outputs(folder, dims_of("0,-")).items()
    assert (only[0], only[1].tolist()) == ("output", whole.tolist())
    with pytest.raises(UserError, match="in output 2, found 0"):
        merged_outputs(folder, dims_of("0,-1,0"))
    with pytest.raises(UserError, match="a dimension for each output"):
        dims_of("-,-")
    (folder / "00000001.safetensors").unlink()
    with pytest.raises(StorageError, match="the outputs of microbatch 1 are missing"):
        merged_outputs(folder, dims_of("0,1,-"))


def test_a_file_of_outputs_has_the_form_of_its_name(tmp_path: Path) -> None:
    outputs = {"output": torch.tensor([[1.5, 2.0], [0.1, -3.0]])}
    for suffix in (".safetensors", ".npy", ".csv"):
        write_merged(tmp_path / f"out{suffix}", outputs)
    assert torch.equal(load_file(tmp_path / "out.safetensors")["output"], outputs["output"])
    assert np.array_equal(np.load(tmp_path / "out.npy"), outputs["output"].numpy())
    read_back = np.loadtxt(tmp_path / "out.csv", delimiter=",", dtype=np.float32)
    assert np.array_equal(read_back, outputs["output"].numpy())
    with pytest.raises(UserError, match=r"one output that numpy knows for \.npy"):
        write_merged(tmp_path / "two.npy", {**outputs, "other": outputs["output"]})
