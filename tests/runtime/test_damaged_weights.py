"""Weights that were wrong before they were written have the right SHA-256: each reader refuses them all the same."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bamboo_cli.app import app
from engine.api.weights import load_weights
from engine.core.errors import BambooError, StorageError, UserError
from engine.core.job.job import Job
from engine.core.manifest import Manifest, header_bytes
from engine.files.checkpoint_folder import CheckpointFolder, checkpoints_at
from engine.files.jobs.checkpoint_choice import find_checkpoint
from engine.files.jobs.checkpoint_place import hash_as_given
from engine.runtime.checkpoint.export import GivenWeights
from tests.runtime.thread_runs import run_in_threads

RUN = "20261124-120000-mlp-0a1b"
JOB = Job(model="mlp", optimizer="adamw", steps=2, microbatches=2, stages=2, validate_every=0, checkpoint_every="1")
Entries = dict[str, dict[str, Any]]


def header_and_rest(data: bytes) -> tuple[Entries, bytes]:
    begin = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:begin]), data[begin:]


def flipped(entries: Entries, rest: bytes) -> bytes:
    return header_bytes(entries) + bytes([rest[0] ^ 1]) + rest[1:]


def all_ones(entries: Entries, rest: bytes) -> bytes:
    return header_bytes(entries) + b"\xff" * len(rest)


def other_dtype(entries: Entries, rest: bytes) -> bytes:
    name = next(name for name, entry in entries.items() if entry["dtype"] == "F32")
    return header_bytes(entries | {name: entries[name] | {"dtype": "I32"}}) + rest


def transposed(entries: Entries, rest: bytes) -> bytes:
    name = next(name for name, entry in entries.items() if len(entry["shape"]) == 2)
    entry = entries[name]
    shape = [*reversed(entry["shape"])] if len(set(entry["shape"])) > 1 else [1, entry["shape"][0] ** 2]
    return header_bytes(entries | {name: entry | {"shape": shape}}) + rest


def dropped(entries: Entries, rest: bytes) -> bytes:
    """Drops the tensor at the end of the file."""
    last = max(entries, key=lambda name: int(entries[name]["data_offsets"][1]))
    begin = entries.pop(last)["data_offsets"][0]
    return header_bytes(entries) + rest[:begin]


def swapped(entries: Entries, rest: bytes) -> bytes:
    """Gives each of two tensors of one form the bytes of the other one."""
    by_form: dict[str, str] = {}
    for name, entry in entries.items():
        form = f"{entry['dtype']} {entry['shape']}"
        if form in by_form:
            other = by_form[form]
            entries[name], entries[other] = entries[other], entry
            return header_bytes({each: entries[each] for each in entries}) + rest
        by_form[form] = name
    raise AssertionError("no two tensors have one form")


def added(entries: Entries, rest: bytes) -> bytes:
    more = {"buffer/7/x": {"dtype": "U8", "shape": [1], "data_offsets": [len(rest), len(rest) + 1]}}
    return header_bytes(entries | more) + rest + b"x"


DAMAGES = (flipped, all_ones, other_dtype, transposed, dropped, swapped, added)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of results with a run whose last checkpoint is that of step 1."""
    results = tmp_path_factory.mktemp("results")
    ending = run_in_threads(replace(JOB, checkpoints=str(results / RUN / "checkpoints")))
    assert ending.outcome == "finished"
    return results


def put(folder: CheckpointFolder, damage: Callable[[Entries, bytes], bytes]) -> None:
    """Replaces the last checkpoint by one whose layer 1 is damaged, with the right SHA-256 and the old hashes."""
    name = folder.names()[-1]
    manifest: Manifest = folder.manifest(name)
    (part,) = manifest.parts_of(1)
    data = damage(*header_and_rest(folder._storage.read(f"{manifest.folder}/{part.file}", part.size)))
    bad = folder.write_part(manifest.step, 1, [data], strides=part.strides, aliases=part.aliases)
    assert bad.sha256 == hashlib.sha256(data).hexdigest()
    folder.publish(replace(manifest, parts=tuple(bad if each == part else each for each in manifest.parts)))
    folder.remove_parts(name.step, [name.file])


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda each: each.__name__)
def test_each_reader_refuses_the_layer(
    damage: Callable[[Entries, bytes], bytes], results: Path, tmp_path: Path
) -> None:
    """`checkpoint verify` called it good, and `bamboo export` wrote it, with 0; only workers refused it."""
    run = tmp_path / RUN
    shutil.copytree(results / RUN, run)
    folder = checkpoints_at(run / "checkpoints")
    put(folder, damage)
    words = "have not the hashes of the trajectory"
    told: list[str] = []
    assert find_checkpoint(str(folder.place), tmp_path, told.append).origin.step == 0  # which --resume takes
    assert len(told) == 1 and words in told[0]
    output = tmp_path / "weights.pt"

    def call(*arguments: object) -> tuple[int, str, BaseException | None]:
        done = CliRunner().invoke(app, [str(each) for each in arguments])
        return done.exit_code, done.output, done.exception

    code, text, _ = call("checkpoint", "verify", folder.place)
    assert code == 1 and words in text and "refused" in text
    code, _, error = call("export", f"{folder.place}@1", "--output", output)
    assert isinstance(error, StorageError) and not output.exists()
    with pytest.raises(StorageError):
        load_weights(run / "checkpoints", 1)
    with pytest.raises(BambooError, match=words):
        GivenWeights(str(run / "checkpoints" / "step-00000001"))
    with pytest.raises(UserError, match=words):
        hash_as_given(str(run / "checkpoints" / "step-00000001"), "")  # which is before any worker
    assert hash_as_given(str(run / "checkpoints" / "step-00000000"), "")
    assert GivenWeights(str(run / "checkpoints" / "step-00000000")).names() == list(
        load_weights(run / "checkpoints", 0)
    )


def test_weights_that_are_whole_are_read_by_all(results: Path, tmp_path: Path) -> None:
    place = results / RUN / "checkpoints"
    assert CliRunner().invoke(app, ["checkpoint", "verify", str(place)]).exit_code == 0
    output = tmp_path / "weights.safetensors"
    for each in (place, place / "step-00000001"):
        assert CliRunner().invoke(app, ["export", str(each), "--output", str(output)]).exit_code == 0
    exported, kept = GivenWeights(str(output)), GivenWeights(str(place / "step-00000001"))
    assert sorted(exported.names()) == sorted(kept.names())
    assert all(exported.tensor(name).equal(kept.tensor(name)) for name in kept.names())


def test_a_folder_that_is_no_whole_checkpoint_begins_no_run(results: Path, tmp_path: Path) -> None:
    """Workers were started first."""
    step = Path(shutil.copytree(results / RUN / "checkpoints" / "step-00000001", tmp_path / "step-00000001"))

    def refusal(path: Path) -> str:
        done = CliRunner().invoke(app, ["run", "--init", str(path), "--results", str(tmp_path / "results")])
        assert isinstance(done.exception, UserError), done.output
        assert not (tmp_path / "results").exists()
        return str(done.exception)

    (manifest,) = step.glob("manifest-*")
    shutil.copy(manifest, step / f"manifest-{'0' * 16}.json")
    assert "the folder of one checkpoint" in refusal(step)
    manifest.unlink()
    assert "its SHA-256 begins with" in refusal(step)
    assert "it has no safetensors file" in refusal(results / RUN / "checkpoints")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    assert "it begins as no file of weights does" in refusal(tmp_path / "folder")
