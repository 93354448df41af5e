"""Weights that are compared: of runs, of checkpoints, of exported files."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from engine.core.checks.trajectory import TrajectoryRow
from engine.core.errors import NothingMatchedError, StorageError, UserError
from engine.core.job.job import Job
from engine.core.manifest import header_bytes
from engine.files.checkpoint_folder import checkpoints_at
from engine.files.jobs.named_weights import WeightsComparison, compare_weights, named_weights
from engine.files.trajectory_file import trajectory_text
from tests.files.made_checkpoints import made_manifest, part_of, sha256, state_hash, weights_of

OLD, NEW, OTHER = "20261122-100000-a-0000", "20261123-100000-b-0000", "20261124-100000-c-0000"


def make(
    results: Path, run: str, steps: range, kept: tuple[int, ...] = (), after: str = "", wrong_from: int = 99
) -> None:
    """Makes a run with two layers, whose second one is another from the step `wrong_from` on."""
    folder = results / run
    folder.mkdir(parents=True)

    def bytes_at(step: int, layer: int) -> bytes:
        data = weights_of(step, layer)
        return data[:-1] + b"\0" if layer == 1 and step >= wrong_from else data

    rows = [
        TrajectoryRow(step, layer, state_hash(w=bytes_at(step, layer)), sha256(""), 0.5)
        for step in steps
        for layer in (0, 1)
    ]
    (folder / "trajectory.csv").write_text(trajectory_text(rows))
    facts: dict[str, object] = {"job": asdict(Job()), "host": {}}
    if after:
        place = str(results / after / "checkpoints")
        facts["resumed"] = {"place": place, "run": after, "step": steps.start - 1, "file": ""}
    (folder / "run.json").write_text(json.dumps(facts))
    checkpoints = checkpoints_at(folder / "checkpoints")
    for step in kept:
        parts = [checkpoints.write_part(step, layer, [part_of(w=bytes_at(step, layer))]) for layer in (0, 1)]
        manifest = made_manifest(step, parts, run=run)
        layers = tuple(replace(each, state=state_hash(w=bytes_at(step, each.layer))) for each in manifest.layers)
        checkpoints.publish(replace(manifest, layers=layers))


def compared(results: Path, a: str, b: str) -> WeightsComparison:
    return compare_weights(named_weights(a, results), named_weights(b, results))


def test_a_run_that_was_resumed_is_compared_with_the_whole_one_from_its_first_step(tmp_path: Path) -> None:
    make(tmp_path, OLD, range(6), kept=(3,))
    make(tmp_path, NEW, range(4, 9), after=OLD)
    make(tmp_path, OTHER, range(9))
    found = compared(tmp_path, NEW, OTHER)
    assert found.is_equal
    assert found.lines()[0] == "equal: 18 of 18 rows in 9 steps, up to step 8, are equal"
    assert found.lines()[1].endswith(" in both")
    (tmp_path / OLD / "trajectory.csv").unlink()  # its launcher was killed
    assert compared(tmp_path, NEW, OTHER).lines()[0] == "equal: 10 of 10 rows in 5 steps, up to step 8, are equal"


def test_the_first_difference_is_found_by_step_layer_tensor_and_element(tmp_path: Path) -> None:
    make(tmp_path, OLD, range(9), kept=(2, 5, 8))
    make(tmp_path, NEW, range(9), kept=(2, 5, 8), wrong_from=4)
    found = compared(tmp_path, OLD, "latest")
    ours = weights_of(5, 1)[-1]
    assert not found.is_equal and found.lines()[0] == "different: 13 of 18 rows in 9 steps, up to step 8, are equal"
    assert found.lines()[2].startswith("first difference: step 4, layer 1: weights or optimizer state, ")
    values = f"{ours} (0x{ours:02x}) and 0 (0x00)"
    told = f"first different element after step 5: layer 1, tensor weight/w, element [99]: {values}"
    assert found.lines()[3] == told
    assert found.as_dict()["first_tensor"]["element"] == (99,)
    assert compared(tmp_path, f"{OLD}@2", f"{NEW}@2").lines() == ["equal: all 2 tensors after step 2"]
    assert not compared(tmp_path, f"{OLD}@8", f"{NEW}@8").is_equal
    assert compared(tmp_path, f"{OLD}@2", NEW).steps == (2, 2)
    with pytest.raises(NothingMatchedError, match="no checkpoint in"):
        compared(tmp_path, f"{OLD}@3", NEW)


def test_an_exported_file_is_compared_by_the_names_of_the_model(tmp_path: Path) -> None:
    make(tmp_path, OLD, range(9), kept=(8,))
    entries = {
        f"{layer}.w": {"dtype": "U8", "shape": [100], "data_offsets": [100 * layer, 100 * layer + 100]}
        for layer in (0, 1)
    }
    head = header_bytes({"__metadata__": {"format": "pt"}} | entries)
    file = tmp_path / "model.safetensors"
    file.write_bytes(head + weights_of(8, 0) + weights_of(8, 1))
    assert compared(tmp_path, OLD, str(file)).lines() == ["equal: all 2 tensors (after step 8, and a file)"]
    assert compared(tmp_path, str(file), str(file)).lines() == ["equal: all 2 tensors"]
    file.write_bytes(head + weights_of(8, 0) + weights_of(7, 1))
    assert not compared(tmp_path, OLD, str(file)).is_equal
    file.write_bytes(head)
    with pytest.raises(StorageError, match="no safetensors file that can be read"):
        compared(tmp_path, OLD, str(file))
    (tmp_path / "model.pt").write_bytes(b"PK")
    with pytest.raises(UserError, match="bamboo export writes one"):
        named_weights(str(tmp_path / "model.pt"), tmp_path)


def test_runs_without_a_common_step_are_not_called_equal(tmp_path: Path) -> None:
    make(tmp_path, OLD, range(3), kept=(2,))
    make(tmp_path, NEW, range(5, 9), kept=(8,))
    with pytest.raises(NothingMatchedError, match="neither hashes nor checkpoints"):
        compared(tmp_path, OLD, NEW)
