"""The checkpoint that a run begins with: which one is found, and which job may go on from it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from engine.core.errors import NothingMatchedError, StorageError, UserError
from engine.core.job.bit_fields import bit_facts
from engine.core.job.job import Job
from engine.core.manifest import LayerHash, Manifest
from engine.core.units import Args
from engine.files.checkpoint_folder import checkpoints_at
from engine.files.host_facts import host_facts
from engine.files.jobs.checkpoint_choice import (
    JobSoFar,
    find_checkpoint,
    find_for_job,
    refuse_other_bits,
    resume_command,
)
from engine.files.jobs.checkpoint_place import with_whole_place
from engine.files.jobs.user_files import code_files, data_files
from tests.files.made_checkpoints import part_of, sha256, state_hash

FACTS = bit_facts(host_facts(Path.cwd()))
OLD, NEW = "20261122-100000-a-0000", "20261123-100000-b-0000"


def keep(
    results: Path,
    run: str,
    steps: tuple[int, ...],
    job: Job | None = None,
    resumed: str = "",
    of_optimizer: tuple[str, ...] = (),
) -> Path:
    job = job or Job()
    place = results / run / "checkpoints"
    place.parent.mkdir(parents=True, exist_ok=True)
    facts: dict[str, object] = {"job": asdict(job), "origins": {}, "host": {}}
    if resumed:
        facts["resumed"] = {"place": str(results / resumed / "checkpoints"), "run": resumed, "step": 0, "file": ""}
    (place.parent / "run.json").write_text(json.dumps(facts))
    folder = checkpoints_at(place)
    for step in steps:
        names = ("w", *of_optimizer)
        part = folder.write_part(step, 0, [part_of(**dict.fromkeys(names, b"bytes"))])
        hashes = state_hash(**{name.partition("/")[2].replace("/", ".") or name: b"bytes" for name in names})
        layers = (LayerHash(0, hashes, sha256("")),)
        manifest = Manifest(
            run=run,
            step=step,
            epoch=1,
            loss=0.5,
            job=asdict(job),
            facts=FACTS,
            data_files=data_files(job),
            code_files=code_files(job),
            init="5" * 64 if job.init else "",
            layers=layers,
            names=("0",),
            parts=(part,),
        )
        folder.publish(manifest)
    return place


def refused_fields(results: Path, job: Job, other_bits: bool = False) -> list[str]:
    found = find_checkpoint("latest", results, lambda line: None)
    with pytest.raises(UserError) as error:
        refuse_other_bits(found, job, other_bits)
    return [each.field for each in error.value.problems]


def test_latest_is_the_newest_run_that_has_one(tmp_path: Path) -> None:
    keep(tmp_path, OLD, (3, 5))
    keep(tmp_path, NEW, ())
    found = find_checkpoint("latest", tmp_path, lambda line: None)
    assert (found.origin.run, found.origin.step) == (OLD, 5)
    assert find_checkpoint("latest@3", tmp_path, lambda line: None).origin.is_named
    assert find_checkpoint(f"{OLD}@3", tmp_path, lambda line: None).origin.step == 3
    assert find_checkpoint(str(tmp_path / OLD / "checkpoints"), tmp_path, lambda line: None).origin.step == 5


def test_the_folder_of_one_step_stands_for_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was taken for a place that holds folders of steps: no checkpoint in it."""
    place = keep(tmp_path, OLD, (3, 5))
    found = find_checkpoint(str(place / "step-00000003"), tmp_path, lambda line: None)
    assert (found.origin.place, found.origin.step, found.origin.is_named) == (str(place), 3, True)
    monkeypatch.chdir(place / "step-00000003")
    assert find_checkpoint(".", tmp_path, lambda line: None).origin.step == 3
    (part,) = (place / "step-00000003").glob("layer-*")
    part.write_bytes(b"")
    with pytest.raises(StorageError, match=r"no checkpoint of step 3 of '\.' is good: 1 was refused"):
        find_checkpoint(".", tmp_path, lambda line: None)


def test_a_checkpoint_of_another_run_than_the_newest_is_told(tmp_path: Path) -> None:
    """`latest` trained an older run to its end, and nothing said that the newest one had no checkpoint."""
    place = keep(tmp_path, OLD, (3, 5))
    keep(tmp_path, NEW, ())
    told: list[str] = []
    found = find_checkpoint("latest", tmp_path, told.append)
    assert told == [f"the newest run {NEW} has no good checkpoint; this is one of run {OLD}"]
    assert found.words == f"resuming after step 5 of run {OLD} ({place})"
    find_checkpoint("latest@3", tmp_path, told.append)
    assert told[1] == f"the newest run {NEW} has no good checkpoint of step 3; this is one of run {OLD}"
    find_checkpoint(OLD, tmp_path, told.append)
    find_checkpoint(str(place), tmp_path, told.append)
    keep(tmp_path, NEW, (), resumed=OLD)
    found = find_checkpoint("latest", tmp_path, told.append)
    assert found.words == f"resuming after step 5 of run {OLD} ({place}), with the job of run {NEW}"
    assert len(told) == 2, told


def test_latest_never_goes_on_with_another_job(tmp_path: Path) -> None:
    """A restart script trained another model: the newest run had kept nothing, and an older one was taken."""
    keep(tmp_path, "20261120-100000-d-0000", (1,), Job(seed=7))
    keep(tmp_path, OLD, (3, 5), Job(model="mlp"))
    keep(tmp_path, NEW, ())
    for text in ("latest", "latest@3"):
        with pytest.raises(NothingMatchedError) as error:
            find_checkpoint(text, tmp_path, lambda line: None)
        assert f"the newest run {NEW} has none, nor has another run of its job" in str(error.value)
    assert f"name a run: {OLD} (model mlp, step 3)" in str(error.value)
    find_checkpoint(OLD, tmp_path, lambda line: None)
    keep(tmp_path, "20261121-100000-c-0000", (2,), Job(stages=2, schedule="gpipe", logger="csv"))
    assert find_checkpoint("latest", tmp_path, lambda line: None).origin.step == 2
    (tmp_path / NEW / "run.json").write_text("{")  # its job is not known
    with pytest.raises(NothingMatchedError, match="20261121-100000-c-0000"):
        find_checkpoint("latest", tmp_path, lambda line: None)


def test_a_job_begins_anew_goes_on_and_is_complete(tmp_path: Path) -> None:
    """The same line each time: nothing yet, then its newest good checkpoint, then its last step."""
    job, told = Job(steps=9), list[str]()
    assert find_for_job(job, tmp_path, told.append) == JobSoFar()
    assert told.pop() == "no run of this job yet: it begins with step 0"
    keep(tmp_path, OLD, (), job)
    assert find_for_job(job, tmp_path, told.append) == JobSoFar()
    assert told.pop() == f"run {OLD} of this job has kept no checkpoint: it begins with step 0"
    place = keep(tmp_path, OLD, (3, 5), job)
    found = find_for_job(replace(job, stages=2, lr=0.5), tmp_path, told.append)
    assert found.choice is not None and found.choice.origin.step == 5
    with pytest.raises(UserError, match=r"lr: expected 0\.002 as in the checkpoint"):  # it does not start over
        refuse_other_bits(found.choice, replace(job, lr=0.5), other_bits=False)
    keep(tmp_path, NEW, (8,), job, resumed=OLD)
    assert find_for_job(job, tmp_path, told.append).finished_by == NEW
    assert find_for_job(replace(job, lr=0.5), tmp_path, told.append).finished_by == ""
    assert find_for_job(replace(job, steps=10), tmp_path, told.append).finished_by == ""
    assert told == []
    for each in (*place.glob("*/manifest-*"), *(tmp_path / NEW).glob("checkpoints/*/manifest-*")):
        each.write_bytes(b"")
    with pytest.raises(StorageError, match="3 checkpoints were refused; move them away to start over"):
        find_for_job(job, tmp_path, told.append)


def test_a_finished_run_that_has_no_checkpoint_any_more_is_complete(tmp_path: Path) -> None:
    job = Job(steps=9)
    keep(tmp_path, NEW, (), job)
    facts = {"job": asdict(job), "host": host_facts(Path.cwd()), "result": {"outcome": "finished", "steps": 9}}
    (tmp_path / NEW / "run.json").write_text(json.dumps(facts))
    assert find_for_job(job, tmp_path, str).finished_by == NEW
    assert find_for_job(replace(job, steps=10), tmp_path, str) == JobSoFar()
    assert find_for_job(replace(job, lr=0.5), tmp_path, str) == JobSoFar()  # its steps had other bits
    (tmp_path / NEW / "run.json").write_text(json.dumps(facts | {"result": {"outcome": "failed", "steps": 9}}))
    assert find_for_job(job, tmp_path, str) == JobSoFar()


def test_a_job_never_goes_on_with_another_one(tmp_path: Path) -> None:
    keep(tmp_path, OLD, (3,))
    keep(tmp_path, NEW, (5,), Job(model="mlp"))
    told: list[str] = []
    found = find_for_job(Job(), tmp_path, told.append)
    assert found.choice is not None and found.choice.origin.run == OLD
    assert told == [f"the newest run {NEW} is of another job (model 'mlp', and here '{Job().model}'): it is left alone"]
    for other in (Job(seed=1), Job(name="another"), Job(data="synthetic"), Job(model_args={"width": 8})):
        assert find_for_job(other, tmp_path, told.append) == JobSoFar()
    (tmp_path / NEW / "run.json").write_text("{")
    find_for_job(Job(), tmp_path, told.append)
    assert told[-1] == f"the newest run {NEW} cannot be read: it is left alone"
    (tmp_path / NEW / "run.json").write_text(json.dumps({"job": asdict(Job(model="mlp")), "host": {}}))
    recorded = {"job": asdict(Job()), "host": {}, "fingerprint": "0" * 16}  # of another version, with other fields
    (tmp_path / OLD / "run.json").write_text(json.dumps(recorded))
    assert find_for_job(Job(), tmp_path, told.append) == JobSoFar()


def test_a_new_machine_finds_what_others_kept_in_the_place_of_the_job(tmp_path: Path) -> None:
    job = Job(checkpoints=str(keep(tmp_path / "shared", OLD, (3, 5))))
    (tmp_path / "shared" / NEW).mkdir()
    (tmp_path / "shared" / OLD / "checkpoints").rename(tmp_path / "kept")
    job = replace(job, checkpoints=str(tmp_path / "kept"))
    found = find_for_job(job, tmp_path / "results", str).choice
    assert found is not None and (found.origin.run, found.origin.step) == (OLD, 5)
    assert find_for_job(replace(job, seed=1), tmp_path / "results", str) == JobSoFar()


def test_a_resumed_run_without_one_stands_for_the_run_before(tmp_path: Path) -> None:
    keep(tmp_path, OLD, (3,))
    keep(tmp_path, NEW, (), resumed=OLD)
    assert find_checkpoint(NEW, tmp_path, lambda line: None).origin.run == OLD
    assert resume_command(tmp_path / NEW, Job(model_args={"hf_token": "x"})) == (
        f"bamboo run --resume {tmp_path / NEW} --set model_args.hf_token=VALUE"
    )


def test_a_resumed_run_goes_on_with_its_own_job_from_the_step_that_it_was_resumed_from(tmp_path: Path) -> None:
    """Not from a newer checkpoint of the run before, and not with that run's job."""
    keep(tmp_path, OLD, (3, 5))
    origin = {"place": str(tmp_path / OLD / "checkpoints"), "run": OLD, "step": 3, "is_named": True, "other_bits": True}
    job = replace(Job(), lr=0.5)
    keep(tmp_path, NEW, (), job)
    for folder in (NEW, "20261124-100000-c-0000"):
        (tmp_path / folder).mkdir(exist_ok=True)
        facts = {"job": asdict(job), "host": host_facts(Path.cwd()), "resumed": origin}
        (tmp_path / folder / "run.json").write_text(json.dumps(facts))
        found = find_checkpoint(folder, tmp_path, lambda line: None)
        assert (found.origin.step, found.origin.is_named, found.origin.other_bits) == (3, True, True)
        assert (found.job["lr"], found.source) == (0.5, str(tmp_path / folder / "run.json"))
        refuse_other_bits(found, job, other_bits=False)
        with pytest.raises(UserError, match="seed"):
            refuse_other_bits(found, replace(job, seed=9), other_bits=False)
    with pytest.raises(NothingMatchedError):
        find_checkpoint(f"{NEW}@5", tmp_path, lambda line: None)


def test_a_renamed_or_copied_run_has_its_checkpoints(tmp_path: Path) -> None:
    place = keep(tmp_path, OLD, (3,))
    run_json = place.parent / "run.json"
    run_json.write_text(json.dumps({"run": OLD, **json.loads(run_json.read_text())}))
    (place.parent / "events.jsonl").touch()
    place.parent.rename(tmp_path / "mine")
    assert find_checkpoint(str(tmp_path / "mine"), tmp_path, lambda line: None).origin.run == OLD
    assert resume_command(tmp_path / "mine", Job()) == f"bamboo run --resume {tmp_path / 'mine'}"


def test_the_place_of_a_run_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = (Job(checkpoints="kept"), Job(), Job(checkpoints="s3://bucket/kept"))
    places = [with_whole_place(job).checkpoints for job in given]
    assert places == [str(tmp_path / "kept"), "", "s3://bucket/kept"]


def test_a_damaged_one_is_named_and_the_next_older_is_taken(tmp_path: Path) -> None:
    place = keep(tmp_path, OLD, (3, 5))
    (part,) = (place / "step-00000005").glob("layer-*")
    part.write_bytes(part.read_bytes()[:-1] + b"z")
    told: list[str] = []
    assert find_checkpoint(OLD, tmp_path, told.append).origin.step == 3
    assert len(told) == 1
    assert told[0].startswith(f"a checkpoint in {place} is refused: step-00000005/{part.name}: expected")
    part.unlink()
    find_checkpoint(OLD, tmp_path, told.append)
    assert told[1].startswith(f"a checkpoint in {place} is refused: cannot read '{part}'")
    for each in place.glob("step-*/layer-*"):
        each.write_bytes(b"")
    with pytest.raises(StorageError, match="2 were refused"):
        find_checkpoint(OLD, tmp_path, told.append)


def test_without_any_there_is_nothing_to_resume(tmp_path: Path) -> None:
    keep(tmp_path, OLD, ())
    for name in ("latest", OLD):
        with pytest.raises(NothingMatchedError):
            find_checkpoint(name, tmp_path, lambda line: None)
    assert resume_command(tmp_path / OLD, Job()) == ""


def test_fields_that_decide_bits_are_refused_with_the_list(tmp_path: Path) -> None:
    keep(tmp_path, OLD, (3,))
    job = replace(Job(), seed=1, pipelines=2, stages=2, schedule="gpipe")
    assert refused_fields(tmp_path, job) == ["pipelines", "seed"]
    assert refused_fields(tmp_path, replace(job, model_args={"width": 8}), other_bits=True) == [
        "model_args",
        "pipelines",
    ]
    free = replace(job, pipelines=1)
    refuse_other_bits(find_checkpoint("latest", tmp_path, lambda line: None), free, other_bits=True)


def test_the_state_of_another_optimizer_is_never_taken(tmp_path: Path) -> None:
    job = Job(optimizer="sgd", optimizer_args={"momentum": 0.9})
    keep(tmp_path, OLD, (3,), job, of_optimizer=("optimizer/w/momentum_buffer",))
    found = find_checkpoint("latest", tmp_path, lambda line: None)
    for other_bits in (True, False):
        with pytest.raises(UserError) as error:
            refuse_other_bits(found, replace(job, optimizer="adamw", optimizer_args={}), other_bits)
        told = next(each for each in error.value.problems if each.field == "optimizer")
        assert told.expected == "'sgd', which wrote the state in the checkpoint"
        assert f"bamboo export {tmp_path / OLD / 'checkpoints'}@3 --output weights.safetensors" in told.hint
    refuse_other_bits(found, replace(job, optimizer_args={}), other_bits=True)


def test_state_that_lacks_a_tensor_is_never_taken(tmp_path: Path) -> None:
    job = Job(optimizer="rmsprop", optimizer_args={"momentum": 0.5})
    keep(tmp_path, OLD, (3,), job, of_optimizer=("optimizer/w/momentum_buffer", "optimizer/w/square_avg"))
    centered = replace(job, optimizer_args={"momentum": 0.9, "centered": True})
    assert refused_fields(tmp_path, centered, other_bits=True) == ["optimizer_args.centered"]
    found = find_checkpoint("latest", tmp_path, lambda line: None)
    others: tuple[Args, ...] = ({"momentum": 0.9}, {}, {"eps": 1e-6})
    for fits in others:
        refuse_other_bits(found, replace(job, optimizer_args=fits), other_bits=True)


def test_a_checkpoint_without_state_of_an_optimizer_fits_any(tmp_path: Path) -> None:
    job = Job(optimizer="sgd")
    keep(tmp_path, OLD, (3,), job)
    found = find_checkpoint("latest", tmp_path, lambda line: None)
    refuse_other_bits(found, replace(job, optimizer="adamw"), other_bits=True)
    with pytest.raises(UserError, match="--other-bits resumes all the same"):
        refuse_other_bits(found, replace(job, optimizer="adamw"), other_bits=False)


def test_a_job_without_another_step_is_refused(tmp_path: Path) -> None:
    keep(tmp_path, OLD, (79,))
    assert refused_fields(tmp_path, Job()) == ["steps"]
    assert refused_fields(tmp_path, Job(), other_bits=True) == ["steps"]
    found = find_checkpoint("latest", tmp_path, lambda line: None)
    with pytest.raises(UserError, match=f"all 80 steps are committed in the checkpoint of run {OLD} in {tmp_path}"):
        refuse_other_bits(found, Job(), other_bits=False)
    with pytest.raises(UserError, match=f"seed: expected 0 as in the checkpoint of run {OLD}, found 1"):
        refuse_other_bits(found, Job(seed=1, steps=90), other_bits=False)


def test_code_that_changed_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("net.py", "blocks.py", "same.py"):
        (tmp_path / name).write_text("import blocks, same")
    job = Job(model="net:make", init="weights.pt")
    keep(tmp_path, OLD, (3,), job)
    found = find_checkpoint("latest", tmp_path, lambda line: None)
    refuse_other_bits(found, job, other_bits=False)
    assert found.origin.init == "5" * 64
    for name in ("net.py", "blocks.py"):
        (tmp_path / name).write_text("import same; import blocks")
    assert refused_fields(tmp_path, job) == ["code file blocks.py", "code file net.py"]
    (tmp_path / "net.py").unlink()
    assert "code file net.py" in refused_fields(tmp_path, job)
    refuse_other_bits(found, job, other_bits=True)


def test_each_data_argument_that_names_a_file_or_a_folder_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    kept_out = ("set/.git/x", "set/__pycache__/x", "set/results/x", "other/x")
    counted = ("x.npy", "set/a", "set/sub/deep/b")
    for name in (*counted, *kept_out):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("one")
    job = Job(
        data="mine:data",
        data_args={"path": "x.npy", "folder": "set", "no file": "\0", "number": 1},
        results="set/results",
    )
    keep(tmp_path / "results", OLD, (3,), job)
    for name in (*counted, *kept_out):
        Path(name).write_text("two")
    assert refused_fields(tmp_path / "results", job) == [f"data file {name}" for name in sorted(counted)]


def test_a_data_file_that_changed_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("one")
    job = Job(data=str(text))
    keep(tmp_path, OLD, (3,), job)
    refuse_other_bits(find_checkpoint("latest", tmp_path, lambda line: None), job, other_bits=False)
    text.write_text("two")
    assert refused_fields(tmp_path, job) == [f"data file {text}"]
    text.unlink()
    assert refused_fields(tmp_path, job) == [f"data file {text}"]
