"""A thousand damaged checkpoints: each is refused with the name of the file, and the next older one is taken."""

from __future__ import annotations

import json
import os
import random
import socket
import stat
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest

from engine.codec import manifests as manifest_module
from engine.codec.manifests import manifest_bytes
from engine.core.manifest import DamagedCheckpointError, Manifest, manifest_file
from engine.files.checkpoint_folder import CheckpointFolder, CheckpointName, checkpoints_at
from engine.files.checkpoint_stores import FolderStorage
from tests.doubles.power_disk import PowerDisk
from tests.files.made_checkpoints import made_manifest, save, weights_of

OLDER, NEWER = 1, 2
FOLDER = f"step-{NEWER:08d}"
Case = tuple[str, str, bytes]  # what was done, the damaged file, its bytes now


class Damaged:
    """Two whole checkpoints in memory, of which one file of the newer one is replaced for a moment."""

    def __init__(self) -> None:
        self.disk = PowerDisk()
        self.folder = CheckpointFolder(FolderStorage(self.disk, "memory"))
        self.older, self.newer = (save(self.folder, step, num_layers=3) for step in (OLDER, NEWER))
        self.files = {name: self.disk.read(name, 10**6) for name in self.disk.names() if "/" in name}
        self.manifest = self.folder.manifest(self.newer)

    def write(self, name: str, data: bytes) -> None:
        if name in self.disk.names():
            self.disk.remove(name)
        fd = self.disk.create(name)
        while data:
            data = data[self.disk.write(fd, data) :]

    def refused(self, name: str, data: bytes, refuses: Callable[[Manifest], str] = lambda manifest: "") -> str:
        """Returns the reason for which a damaged file is refused; the older checkpoint is found."""
        is_forged = name not in self.files
        self.write(name, data)
        if is_forged:  # under its own name, in place of the manifest
            self.disk.remove(str(self.newer))
        found = self.folder.newest_good(refuses=refuses)
        if is_forged:
            self.disk.remove(name)
            self.write(str(self.newer), self.files[str(self.newer)])
        else:
            self.write(name, self.files[name])
        assert found.name == self.older, f"{name} was taken"
        (refused,) = found.refused
        return refused.reason


def damages(made: Damaged, dice: random.Random) -> Iterator[Case]:
    """Yields damaged bytes of the files of the newer checkpoint, without an end; a few of them are the right bytes."""
    names = [name for name in made.files if name.startswith(FOLDER)]
    for number in count():
        name = names[number % len(names)]
        data = made.files[name]
        at, bit = dice.randrange(len(data)), 1 << dice.randrange(8)
        match number // len(names) % 6:
            case 0:
                at %= 64  # of the header
                yield "flip in the header", name, data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]
            case 1:
                yield "flip", name, data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]
            case 2:
                yield "truncated", name, data[:at]
            case 3:
                yield "zeroed", name, data[:at] + bytes(len(data) - at)
            case 4:
                yield "longer", name, data + bytes(at)
            case 5:
                others = [each for other, each in made.files.items() if other != name]
                yield "swapped or stale", name, dice.choice(others)


def test_a_thousand_damaged_files_are_refused() -> None:
    made = Damaged()
    cases = (case for case in damages(made, random.Random(16)) if case[2] != made.files[case[1]])  # noqa: S311
    for what, name, data in islice(cases, 1000):
        reason = made.refused(name, data)
        assert name in reason, f"{what} of {name}: {reason}"
    assert made.folder.newest_good().name == made.newer  # and without any damage it is taken


def forged(manifest: Manifest) -> Iterator[tuple[str, bytes]]:
    """Yields manifests with a name that fits their bytes, and a word that the refusal has."""
    whole: dict[str, Any] = json.loads(manifest_bytes(manifest))

    def text(**changes: Any) -> bytes:
        return (json.dumps(whole | changes, sort_keys=True, separators=(",", ":")) + "\n").encode()

    def parts(**changes: Any) -> bytes:
        first, *rest = whole["parts"]
        return text(parts=[first | changes, *rest])

    def layers(**changes: Any) -> bytes:
        first, *rest = whole["layers"]
        return text(layers=[first | changes, *rest])

    file = whole["parts"][0]["file"]
    for outside in (f"../{file}", f"/tmp/{file}", f"a/{file}", "..", "", "\0", file.upper(), f"{file}\n", "x" * 9999):
        yield "expected the name of a part", parts(file=outside)
    yield "not the name of shard 0 of 1 of layer 0", parts(file=whole["parts"][1]["file"])
    yield "not the name of shard 0 of 2 of layer 0", parts(shards=2)
    yield "expected the parts of each layer", text(parts=whole["parts"][1:])
    yield "expected the parts of each layer", text(parts=[*whole["parts"], whole["parts"][0]])
    yield "expected each shard of layer 0 once", text(parts=[whole["parts"][0], *whole["parts"]])
    yield "expected a size in bytes", parts(size=-1)
    yield "expected a size in bytes", parts(sha256="0" * 63)
    yield "strides", parts(strides=[["weight/w", [-1]]])
    yield "'strides'", parts(strides=[["weight/w", 1]])
    yield "expected a SHA-256", layers(state="")
    yield "expected a SHA-256", layers(buffers="../" * 22)
    yield "expected a SHA-256", text(init="abc")
    yield "expected a SHA-256", text(data_files=[["a.txt", 1, "abc"]])
    yield "expected a SHA-256", text(code_files=[["a.py", 1, "abc"]])
    yield "expected each layer once", text(layers=[])
    yield "expected each layer once", layers(layer=7)
    for name in whole:
        without = {other: each for other, each in whole.items() if other != name}
        yield f"field '{name}'", (json.dumps(without, sort_keys=True, separators=(",", ":")) + "\n").encode()
        yield f"'{name}'", text(**{name: [3.5, {}]})
    yield "has no field 'more'", text(more=1)
    yield "'job': expected the fields of a job", text(job={})
    yield "one for each of 3 layers", text(names=[])
    yield "expected a size in bytes", parts(size=1 << 80)
    yield "expected strides", parts(strides=[["weight/w", [1 << 80]]])
    yield "'epoch'", text(epoch=1 << 80)
    yield "'format'", text(format=3)
    many = {f"k{number}": 0 for number in range(1025)}
    yield from (
        ("'run': expected the name of a run", text(run="")),
        ("expected 1 to 4096 pipelines, found 1000000", text(job=whole["job"] | {"pipelines": 10**15})),
        ("at most 1024 values", text(job=whole["job"] | {"model_args": many})),
        ("with at most 1048576 objects", b"[" + b"[]," * (1 << 20) + b"[]]"),
    )
    yield "'format'", text(format="1")
    yield "'step'", text(step=-1)
    yield "'step'", text(step=10**13)
    yield "belongs into step-00000003", text(step=3)
    yield "belongs into step-00000001", text(step=OLDER)
    yield "'epoch'", text(epoch=-1)
    yield "'loss'", text(loss="nan")
    yield "canonical", text(loss=float("nan"))
    yield "canonical", json.dumps(whole).encode()
    yield "canonical", text().replace(b'{"code', b'{"epoch":5,"code')
    for junk in (b"", b"{", b"\xff\xfe", b"[" * 100_000, b"1" * 5000):
        yield "expected one object of JSON", junk
    yield "'format'", b"[1]"


def test_forged_manifests_are_refused_with_the_field() -> None:
    made = Damaged()
    for word, data in forged(made.manifest):
        name = f"{FOLDER}/{manifest_file(data)}"
        reason = made.refused(name, data)
        assert name in reason, reason
        assert word in reason


def test_a_checkpoint_of_another_job_is_refused_by_the_reader() -> None:
    made = Damaged()
    other = manifest_bytes(made_manifest(NEWER, made.manifest.parts, job={"model": "resnet18", "steps": 80}))
    name = f"{FOLDER}/{manifest_file(other)}"
    assert made.refused(name, other, lambda each: "" if each.job["model"] == "gpt" else "another model") == (
        "another model"
    )


def put_link(path: Path) -> None:
    """Replaces a file or folder by a link to the same content elsewhere."""
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def put_pipe(path: Path) -> None:
    """Replaces a file by a pipe that nothing writes into."""
    path.unlink()
    os.mkfifo(path)


def put_socket(path: Path) -> None:
    """Replaces a file by a socket."""
    path.unlink()
    made = socket.socket(socket.AF_UNIX)
    here = os.getcwd()
    os.chdir(path.parent)  # a path of a socket has 108 bytes
    made.bind(path.name)
    os.chdir(here)
    made.close()


def put_folder(path: Path) -> None:
    """Replaces a file by a folder."""
    path.unlink()
    path.mkdir()


def put_huge(path: Path) -> None:
    """Replaces a file by one with a terabyte of nothing."""
    os.truncate(path, 2**40)


@pytest.mark.parametrize("put", [put_link, put_pipe, put_socket, put_folder, put_huge, Path.unlink])
@pytest.mark.parametrize("which", ["part", "manifest"])
def test_links_and_special_files_are_refused(tmp_path: Path, put: Callable[[Path], None], which: str) -> None:
    folder = checkpoints_at(tmp_path / "run" / "checkpoints", tmp_path)
    older, newer = (save(folder, step) for step in (OLDER, NEWER))
    file = newer.file if which == "manifest" else folder.manifest(newer).parts[1].file
    put(tmp_path / "run" / "checkpoints" / FOLDER / file)
    found = folder.newest_good()
    assert found.name == older
    assert (which == "manifest" and put is Path.unlink) or file in found.refused[0].reason


def test_a_folder_that_is_a_link_has_no_checkpoints(tmp_path: Path) -> None:
    folder = checkpoints_at(tmp_path / "checkpoints", tmp_path)
    older, newer = (save(folder, step) for step in (OLDER, NEWER))
    put_link(tmp_path / "checkpoints" / FOLDER)
    assert folder.newest_good().name == older
    with pytest.raises(Exception, match="is a link, and bamboo follows none here"):
        folder.verify(newer)
    assert stat.S_ISLNK((tmp_path / "checkpoints" / FOLDER).lstat().st_mode)


class TwoFaced(PowerDisk):
    """A disk of which each file has other bytes from its second read on."""

    def __init__(self) -> None:
        super().__init__()
        self.num_reads: dict[str, int] = {}

    def read(self, name: str, most: int) -> bytes:
        self.num_reads[name] = number = self.num_reads.get(name, 0) + 1
        data = super().read(name, most)
        return data if number == 1 else bytes(len(data))


def weights(folder: CheckpointFolder, manifest: Manifest, layer: int) -> bytes:
    return bytes(folder.layer(manifest, layer).tensors["weight/w"].pieces[0])


def hash_of_another_read(folder: CheckpointFolder, manifest: Manifest, layer: int) -> bytes:
    """Planted: verifies, and then reads again to parse."""
    folder.layer(manifest, layer)
    (part,) = manifest.parts_of(layer)
    return folder._storage.read(f"{manifest.folder}/{part.file}", part.size)[-100:]


@pytest.mark.parametrize(
    ("read", "is_fooled"), [(weights, False), (hash_of_another_read, True)], ids=["product", "planted"]
)
def test_the_bytes_that_were_hashed_are_those_to_parse(
    read: Callable[[CheckpointFolder, Manifest, int], bytes], is_fooled: bool
) -> None:
    disk = TwoFaced()
    folder = CheckpointFolder(FolderStorage(disk, "memory"))
    manifest = folder.manifest(save(folder, NEWER))
    data = [read(folder, manifest, each.layer) for each in manifest.layers]
    assert (data != [weights_of(NEWER, each.layer) for each in manifest.layers]) is is_fooled


def parsed_first(name: str, data: bytes) -> object:
    """Planted: parses the manifest, and then looks at its hash."""
    json.loads(data)
    return manifest_module.manifest_of(name, data)


@pytest.mark.parametrize(
    ("read", "is_parsed"), [(manifest_module.manifest_of, False), (parsed_first, True)], ids=["product", "planted"]
)
def test_no_byte_is_parsed_before_its_hash(
    read: Callable[[str, bytes], object], is_parsed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Damaged()
    parsed: list[object] = []
    monkeypatch.setattr(json, "loads", parsed.append)
    with pytest.raises(DamagedCheckpointError):
        read(str(made.newer), made.files[str(made.newer)].replace(b"gpt", b"got"))
    assert bool(parsed) is is_parsed


def test_a_name_is_that_of_its_step() -> None:
    assert str(CheckpointName(NEWER, "manifest-0123456789abcdef.json")) == f"{FOLDER}/manifest-0123456789abcdef.json"
