"""The state of a job in its checkpoints, read without running code; and pickled data as data."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from engine.core.checks.external_verdict import JobReports, judge
from engine.core.errors import StorageError
from engine.external import weights
from engine.external.pickled import PickledObject, unpickled
from engine.external.weights import checkpoint_evidence, distance

_PLAIN = {
    "a": [1, -2, 2**40, 1 << 80, 1.5, None, True, False],
    "b": (1,),
    "c": ((), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
    7: {},
}
_STRANGE = {b"bytes": {1, 2}, "frozen": frozenset([3]), "text": "\u00e9\n", "twice": [_PLAIN, _PLAIN]}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_data_is_read_as_it_was_written(protocol: int) -> None:
    assert unpickled(pickle.dumps(_PLAIN, protocol), "here") == _PLAIN
    if protocol >= 4:
        assert unpickled(pickle.dumps(_STRANGE, protocol), "here") == _STRANGE


class _Harm:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("/proc/no-such-folder",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_nothing_is_run(protocol: int) -> None:
    value = unpickled(pickle.dumps([_Harm()], protocol), "here")[0]
    assert isinstance(value, PickledObject)
    assert (value.name, value.args) == ("posix.mkdir", ("/proc/no-such-folder",))


@pytest.mark.parametrize("data", [b"", b"x", b"\x80\x04", b"(.", b"\x80\x04Q.", pickle.dumps([1] * 9)[:-3]])
def test_what_is_no_pickle_is_refused_with_its_source(data: bytes) -> None:
    with pytest.raises(StorageError, match=r"^here: "):
        unpickled(data, "here")


def _save(path: Path, weight: torch.Tensor) -> None:
    state = OrderedDict({"model": {"weight": weight, "bias": torch.ones(2)}, "lr": 0.1, "step": 9})
    path.parent.mkdir(parents=True, exist_ok=True)
    match path.suffix:
        case ".pt":
            torch.save(state, path)
        case ".safetensors":
            save_file({"weight": weight, "bias": torch.ones(2)}, path)
        case _:
            dcp.save(dict(state), checkpoint_id=path, no_dist=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("name", "step", "tensor"),
    [
        ("step_7", 7, "model.weight"),
        ("checkpoint-12/model-00001-of-00001.safetensors", 12, "weight"),
        ("epoch=3-step=40.pt", 40, "model.weight"),
        ("state.pt", 9, "model.weight"),
    ],
)
def test_the_checkpoints_of_two_runs_are_compared_by_bits_and_by_values(
    tmp_path: Path, name: str, step: int, tensor: str
) -> None:
    weight = torch.randn(3, 2, generator=torch.Generator().manual_seed(0))
    for run, factor in (("run", 1.0), ("twin", 1.0), ("other", 1 + 1e-4)):
        _save(tmp_path / run / name, weight * factor)
    same = checkpoint_evidence(tmp_path / "run", tmp_path / "twin")
    assert same.unread == [] and [state.step for state in same.run] == [step]
    assert judge(JobReports(states=same.run), JobReports(states=same.twin)).status("weights") == "same"
    other = checkpoint_evidence(tmp_path / "run", tmp_path / "other")
    reports = JobReports(states=other.run), JobReports(states=other.twin)
    verdict = judge(*reports, distances=other.distances)
    assert verdict.first_different_step == step and f"{tensor!r} is different" in verdict.parts[3].text
    assert judge(*reports, tolerance=1e-3, distances=other.distances).status("weights") == "within tolerance"
    assert judge(*reports, tolerance=1e-5, distances=other.distances).status("weights") == "different"


def test_a_checkpoint_that_runs_code_is_not_read_and_named(tmp_path: Path) -> None:
    for run in ("run", "twin"):
        (tmp_path / run / "step_4").mkdir(parents=True)
        torch.save({"weight": torch.ones(1), "harm": _Harm()}, tmp_path / run / "step_3.pt")
        (tmp_path / run / "step_4" / ".metadata").write_bytes(pickle.dumps(_Harm()))
        (tmp_path / run / "model.pt").write_bytes(b"nonsense")
    evidence = checkpoint_evidence(tmp_path / "run", tmp_path / "twin")
    assert (evidence.run, evidence.twin) == ([], [])
    texts = "\n".join(evidence.unread)
    assert "step_3.pt: no tensors that can be read without running code (UnpicklingError)" in texts
    assert "the metadata has no Metadata where one is expected" in texts and "model.pt" in texts


def test_a_distance_is_relative_and_infinite_where_it_is_not_defined() -> None:
    one = torch.tensor([1.0, -4.0])
    assert distance(one, one * 1.5) == pytest.approx(1 / 3)
    assert distance(one, one.clone()) == distance(torch.ones(0), torch.ones(0)) == 0
    for other in (one[:1], one.double(), torch.tensor([1.0, float("nan")])):
        assert distance(one, other) == float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_a_whole_fingerprint_sees_every_element_with_or_without_a_fast_hash(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.arange(999).remainder(2).to(dtype)
    other = tensor.clone()
    other[500] = 1 - other[500].to(torch.int8)
    told = [weights.fingerprint_of({"a": each, "b": each[::2]}, None, None) for each in (tensor, other)]
    monkeypatch.setattr(weights, "_hasher", lambda: hashlib.sha256)
    told += [weights.fingerprint_of({"a": each, "b": each[::2]}, None, None) for each in (tensor, other)]
    assert len({tuple(each.values()) for each in told}) == 4
    assert all(len(text) == weights.DIGITS for each in told for text in each.values())
    assert told[3] == weights.fingerprint_of({"a": other, "b": other[::2].clone()}, None, None)
