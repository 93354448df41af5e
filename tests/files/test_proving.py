"""A verdict is computed of the evidence: after any change in it no run is called identical, and the file is named."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.core.checks.proof import Proof
from engine.core.errors import StorageError
from engine.core.history.process_records import CheckRecord, EndedRecord
from engine.core.history.run_records import UNSEALED, VERSION, CommitRecord
from engine.core.texts import sentence
from engine.files.events_file import read_history
from engine.files.evidence import evidence_files, proof_of, seal_of
from engine.files.linked_lines import add_records
from engine.files.run_folder import RunFolder
from engine.report.judgement import Judgement, judgement_of
from tests.files.made_evidence import make_evidence

MUTATIONS = 208
IDENTICAL = "Weights identical to the run without the fault, 12 of 12 steps."


def judged(run: Path) -> Judgement:
    history = read_history(run / "events.jsonl")
    return judgement_of(history, proof_of(RunFolder(run), history))


def proof(run: Path) -> Proof:
    return judged(run).proof


@pytest.fixture(name="whole", scope="module")
def _whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_evidence(tmp_path_factory.mktemp("evidence") / "run").path


@pytest.fixture(name="run")
def _run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def _flipped(data: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << chance.randrange(8)]) + data[place + 1 :]


def _cut(data: bytes, chance: random.Random) -> bytes:
    begin = chance.randrange(len(data))
    return data[:begin] + data[begin + chance.randint(1, 400) :]


def _short(data: bytes, chance: random.Random) -> bytes:
    return data[: -chance.randint(1, min(400, len(data)))]


def _longer(data: bytes, chance: random.Random) -> bytes:
    begin = chance.randrange(len(data))
    return data[:begin] + data[: chance.randint(1, 64)] + data[begin:]


def _zeroed(data: bytes, chance: random.Random) -> bytes:
    begin = chance.randrange(len(data))
    return data[:begin] + bytes(len(data[begin : begin + 64])) + data[begin + 64 :]


def _without(data: bytes, chance: random.Random) -> bytes:
    parts = _parts(data)
    del parts[chance.randrange(len(parts))]
    return b"".join(parts)


def _doubled(data: bytes, chance: random.Random) -> bytes:
    parts = _parts(data)
    place = chance.randrange(len(parts))
    parts.insert(place, parts[place])
    return b"".join(parts)


def _swapped(data: bytes, chance: random.Random) -> bytes:
    parts = _parts(data)
    one, other = chance.randrange(len(parts)), chance.randrange(len(parts))
    parts[one], parts[other] = parts[other], parts[one]
    return b"".join(parts)


def _another_digit(data: bytes, chance: random.Random) -> bytes:
    places = [place for place, each in enumerate(data) if chr(each).isdigit()] or [0]
    place = chance.choice(places)
    return data[:place] + str((data[place] + 1) % 10).encode() + data[place + 1 :]


def _parts(data: bytes) -> list[bytes]:
    """Returns the lines of a file, or the entries of one of actions."""
    is_text = b"\n" in data[-1:]
    return data.splitlines(keepends=True) if is_text else [data[at : at + 32] for at in range(0, len(data), 32)]


WAYS: list[Callable[[bytes, random.Random], bytes]] = [
    *(_flipped, _cut, _short, _longer, _zeroed, _without, _doubled, _swapped, _another_digit),
]


@pytest.mark.parametrize("block", range(8))
def test_no_mutated_evidence_is_called_identical_and_each_names_its_file(
    whole: Path, tmp_path: Path, block: int
) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    files = [*evidence_files(whole)]
    assert {each.rpartition("/")[2].partition("-")[0] for each in files} == {
        *("events.jsonl", "trajectory.csv", "run.json", "actions", "hashes"),
    }
    for seed in range(block, MUTATIONS, 8):
        chance = random.Random(seed)  # noqa: S311
        file, way = files[seed % len(files)], chance.choice(WAYS)
        before = (whole / file).read_bytes()
        after = way(before, chance)
        if after == before:
            continue
        (run / file).write_bytes(after)
        try:
            found = judged(run)
            told = [found.weights(), found.damage(), *map(str, found.proof.flaws)]
        except StorageError as error:
            told = [sentence(str(error))]
        assert not any("identical" in each.lower() for each in told), (seed, file, way, told)
        assert any(file in each for each in told), (seed, file, way, told)
        (run / file).write_bytes(before)
    assert judged(run).weights() == IDENTICAL


def test_a_file_that_is_gone_is_named(whole: Path, run: Path) -> None:
    for file in evidence_files(whole):
        if file == "events.jsonl":
            continue
        (run / file).unlink()
        assert any(each.place == file and "gone" in each.text for each in proof(run).flaws), file
        shutil.copy(whole / file, run / file)
    shutil.rmtree(run / "twin")
    assert "twin/trajectory.csv: it is gone" in [*map(str, proof(run).flaws)]


def test_a_change_among_actions_is_named_with_its_part_of_the_file(tmp_path: Path) -> None:
    run = make_evidence(tmp_path / "run", steps=400).path
    (file,) = (run / "steps").glob("actions-1-*")
    data = bytearray(file.read_bytes())
    data[5000] ^= 1
    file.write_bytes(data)
    assert [*map(str, proof(run).flaws)] == [
        f"steps/{file.name}: its bytes 4,096 to 8,191 are not those that the run wrote"
    ]


@pytest.mark.parametrize("left", ["", '{"event":"job","worker":-1'])
def test_emptied_records_beside_other_evidence_are_one_flaw_with_its_place(run: Path, left: str) -> None:
    (run / "events.jsonl").write_text(left)
    text = "events.jsonl: it has no whole record, and files that follow the first one are there"
    assert [*map(str, proof(run).flaws)] == [text]
    shutil.rmtree(run / "twin")
    shutil.rmtree(run / "steps")
    assert [*map(str, proof(run).flaws)] == [text], "the trajectory is there"


def test_a_run_that_has_just_begun_has_no_flaw(run: Path) -> None:
    for each in ("twin", "steps"):
        shutil.rmtree(run / each)
    (run / "trajectory.csv").unlink()
    (run / "steps").mkdir()
    (run / "events.jsonl").write_text("")
    assert proof(run) == Proof(missing="the run has recorded nothing yet")


def test_whole_evidence_is_verified_and_a_difference_is_told(whole: Path, tmp_path: Path) -> None:
    assert (proof(whole).flaws, proof(whole).missing, judged(whole).weights()) == ((), "", IDENTICAL)
    found = judged(make_evidence(tmp_path / "wrong", wrong_step=7).path)
    assert found.proof.is_whole
    assert "step 7, layer 0: different weights or optimizer state" in found.weights()


def test_the_verdict_needs_no_record_of_it(run: Path) -> None:
    """Whoever writes the record of a comparison, the seal and all links again cannot make other hashes equal."""
    other = make_evidence(run.parent / "wrong", wrong_step=7).path
    shutil.copytree(other / "steps", run / "steps", dirs_exist_ok=True)
    shutil.copy(other / "trajectory.csv", run)
    lines = (run / "events.jsonl").read_text().splitlines(keepends=True)
    (run / "events.jsonl").write_text("".join(lines[:-2]))
    add_records(run / "events.jsonl", seal_of(run), EndedRecord(outcome="finished", exit_code=0))
    (flaw,) = proof(run).flaws
    assert str(flaw) == "events.jsonl: the comparison reports no difference, and the hashes have a difference in step 7"


@pytest.mark.parametrize("file", ["events.jsonl", "steps/hashes-0.jsonl"])
def test_records_that_another_host_has_shipped_are_held_against_their_links(run: Path, file: str) -> None:
    """Only `bamboo collect` looked at them."""
    copy = run / "hosts" / "b"
    copy.mkdir(parents=True)
    (copy / "events.jsonl").write_bytes((run / "events.jsonl").read_bytes()[:-100])
    shutil.copytree(run / "steps", copy / "steps")
    assert judged(run).weights() == IDENTICAL, "a copy may end early"
    lines = (copy / file).read_text().splitlines(keepends=True)
    (copy / file).write_text("".join([*lines[:6], *lines[7:]]))
    assert any(str(each).startswith(f"hosts/b/{file}:") for each in proof(run).flaws)
    (copy / file).unlink()
    (copy / file).symlink_to(run / file)
    with pytest.raises(StorageError, match="is a link"):
        proof(run)


@pytest.mark.parametrize("kept", [1, 2, 7])
def test_a_run_whose_launcher_was_killed_is_not_verified(run: Path, kept: int) -> None:
    lines = (run / "events.jsonl").read_text().splitlines(keepends=True)
    (run / "events.jsonl").write_text("".join(lines[:-kept]))
    found = judged(run)
    assert not found.proof.flaws
    assert "has no" in found.proof.missing
    assert "identical" not in found.weights()


def test_a_torn_record_of_a_worker_that_died_and_checks_behind_the_seal_are_no_flaw(run: Path) -> None:
    with (run / "events.jsonl").open("a") as file:
        file.write('{"event":"mark","worker":1,"pi')
    add_records(run / "events.jsonl", CheckRecord(name="outcome", result="passed", text="recovered", request="r.json"))
    assert judged(run).weights() == IDENTICAL
    add_records(run / "events.jsonl", CommitRecord(step=12, loss=1.0, grad_norm=1.0, clip_factor=1.0, last=True))
    with pytest.raises(StorageError, match="step 12 is committed, and the job has 12 steps"):
        judged(run)


def test_a_run_of_an_older_bamboo_is_not_verified(run: Path) -> None:
    events = run / "events.jsonl"
    bare = [line[:-28] + "}\n" for line in events.read_text().splitlines() if '"event":"seal"' not in line]
    events.write_text("".join(bare).replace(f'"version":{VERSION}', f'"version":{UNSEALED}'))
    for each in (run / "steps").glob("hashes*"):
        each.write_text("".join(line[:-28] + "}\n" for line in each.read_text().splitlines()))
    found = judged(run)
    assert found.weights() == ("Weights not verified: its records are of an older bamboo, which did not link them.")
    assert not found.is_red


def test_records_of_this_version_without_links_are_no_older_ones(run: Path) -> None:
    events = run / "events.jsonl"
    bare = [line[:-28] + "}\n" for line in events.read_text().splitlines()]
    events.write_text("".join(bare).replace('"compared":12', '"compared":999'))
    told = [str(each) for each in judged(run).proof.flaws]
    assert "events.jsonl: none of its records is linked to those before" in told
    assert any("999" in each for each in told), "contradictions are looked for all the same"


def test_a_run_without_a_twin_keeps_its_reason(tmp_path: Path) -> None:
    found = judged(make_evidence(tmp_path / "run", is_compared=False).path)
    assert found.weights() == "Weights not compared: the run has no verdict yet."
    assert found.proof.comparison is None
