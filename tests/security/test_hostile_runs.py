"""Run folders from elsewhere, by a seeded generator: no reader crashes, stands, takes all memory or runs their code."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bamboo_cli.app import app
from engine.core.errors import BambooError, ExitCode
from engine.core.history.evidence import linked_lines, unlinked
from engine.files.evidence import evidence_files
from tests.files.made_evidence import make_evidence

FOLDERS, BLOCKS = 100, 4
MOST_S, MOST_BYTES = 5.0, 500_000_000  # of processor time and memory for one answer
TIB = 1 << 40
NAME = "20260101-120000-mlp-0a0b"
COMMANDS = (
    ("report", NAME, "--format", "json", "--table", "outcome", "--verify"),
    ("report", NAME, "--table", "actions"),
    ("status", NAME, "--json"),
    ("list", "runs"),
    ("compare", NAME, NAME),
)
VALUES: tuple[Any, ...] = (
    *(10**400, -(10**400), 2**63, 10**15, -1, 0, 1e308, float("inf"), True, None, "x", "\x1b[2J", "../../outside/kept"),
    *([], {}, [[1]], {"a": 1}, [10**15] * 3, "evil_module:L"),
)
EVIL = "import pathlib\npathlib.Path('code-ran').touch()\nL = None\n"


@contextmanager
def bounded() -> Iterator[None]:
    """Ends a block that takes more than its share of the processor or the memory by an exception."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MOST_BYTES, limits[1]))
    before = signal.signal(signal.SIGPROF, _too_long)
    signal.setitimer(signal.ITIMER_PROF, MOST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _too_long(number: int, frame: object) -> None:
    raise TimeoutError(f"more than {MOST_S} s of processor time")


def say(results: Path, *arguments: str) -> str:
    """Runs a command in this process within its bounds; returns its output, or the refusal."""
    with bounded():
        told = CliRunner().invoke(app, [*arguments, "--results", str(results)])
    error = told.exception
    assert error is None or isinstance(error, SystemExit | BambooError), (arguments, repr(error))
    assert "Traceback" not in told.output
    if isinstance(error, BambooError):
        assert error.exit_code is not ExitCode.INTERNAL, (arguments, repr(error))
        assert len(str(error).splitlines()) == 1, str(error)
    return told.output if error is None or isinstance(error, SystemExit) else str(error)


def _lines(run: Path, file: str = "events.jsonl") -> list[dict[str, Any]]:
    return [json.loads(unlinked(line)[0]) for line in (run / file).read_text().splitlines()]


def _forge(run: Path, events: list[dict[str, Any]], file: str = "events.jsonl") -> None:
    """Writes records with the links of true ones."""
    (run / file).write_text(linked_lines(json.dumps(each, separators=(",", ":")) for each in events))


def _field(run: Path, chance: random.Random) -> None:
    events = _lines(run)
    record = chance.choice(events)
    record[chance.choice([*record])] = chance.choice(VALUES)
    _forge(run, events)


def _commit(run: Path, chance: random.Random) -> None:
    events = _lines(run)
    commit = chance.choice([each for each in events if each["event"] == "commit"])
    commit[chance.choice(["at_ns", "step", "loss"])] = chance.choice([10**400, 10**15, -(10**15), 2**62])
    _forge(run, events)


def _job(run: Path, chance: random.Random) -> None:
    events = _lines(run)
    for name in chance.sample([*events[0]], 4):
        events[0][name] = chance.choice(VALUES)
    _forge(run, events)


def _sizes(run: Path, chance: random.Random) -> None:
    events = _lines(run)
    events[0] |= {"stages": 4096, "pipelines": 4096, "microbatches": 65536, "steps": chance.choice([10**15, 10**11])}
    _forge(run, events)


def _resumed(run: Path, chance: random.Random) -> None:
    """A run that goes on from step 10^11 of a job that has as many."""
    events, begun = _lines(run), 10**11
    events[0]["steps"] = begun + 13
    stamp = {"worker": -1, "pid": 1, "at_ns": 1}
    resumed = {"event": "resumed", **stamp, "step": begun, "place": "/", "file": "", "run": "x", "lost": 0}
    for each in events:
        each["step"] = each["step"] + begun + 1 if each["event"] == "commit" else each.get("step")
    events = [{key: value for key, value in each.items() if value is not None} for each in events]
    _forge(run, [events[0], resumed, *events[1:]] if chance.random() < 0.7 else events)


def _many(run: Path, chance: random.Random) -> None:
    events = _lines(run)
    epoch = next(each for each in events if each["event"] == "epoch")
    name = chance.choice(["owners", "members", "shadows"])
    count = chance.choice([1_000_000, 200_000])
    epoch[name] = [[1]] * count if name == "shadows" else [*range(count)]
    _forge(run, events)


def _sparse(run: Path, chance: random.Random) -> None:
    file = chance.choice([*evidence_files(run)])
    os.truncate(run / file, chance.choice([TIB, TIB >> 4, (1 << 26) + 1]))


def _replaced(run: Path, chance: random.Random) -> None:
    path = run / chance.choice([*evidence_files(run), "steps", "twin"])
    (shutil.rmtree if path.is_dir() else os.unlink)(path)
    match chance.randrange(4):
        case 0:
            path.symlink_to(run.parent.parent / "outside" / chance.choice(["kept", "folder"]))
        case 1:
            os.mkfifo(path)
        case 2:
            path.symlink_to("/dev/zero")
        case _:
            path.mkdir()


def _noise(run: Path, chance: random.Random) -> None:
    path = run / chance.choice([*evidence_files(run)])
    data = bytearray(path.read_bytes())
    for _ in range(chance.randint(1, 40)):
        data[chance.randrange(len(data))] = chance.randrange(256)
    path.write_bytes(data)


def _blank(run: Path, chance: random.Random) -> None:
    with (run / chance.choice([*evidence_files(run)])).open("ab") as file:
        file.write(chance.choice([b"\n", b"\0", b"[[[[[\n", b'{"event":"commit"}\n', b"x"]) * 400_000)


def _deep(run: Path, chance: random.Random) -> None:
    with (run / chance.choice([*evidence_files(run)])).open("a") as file:
        file.write(chance.choice(["[", '{"event":']) * 200_000 + "\n")


def _seal(run: Path, chance: random.Random) -> None:
    events = _lines(run)
    seal = next(each for each in events if each["event"] == "seal")
    names = ["../../outside/kept", "/etc/passwd", "steps/../../../outside/kept", "trajectory.csv", "x" * 10_000]
    seal["files"] = [[chance.choice(names), chance.choice([0, -1, 10**17]), "00" * chance.randrange(100)]] * 1000
    _forge(run, events)


def _actions(run: Path, chance: random.Random) -> None:
    folder = run / "steps"
    for name in ("actions-999999999-999999999999999999.bin", "actions-0-0.bin", f"actions-1-{10**17}.bin"):
        data = chance.randbytes(32 * 500)
        (folder / name).write_bytes(b"".join(data[at : at + 31] + b"\xa5" for at in range(0, len(data), 32)))


def _rows(run: Path, chance: random.Random) -> None:
    path = run / chance.choice(["trajectory.csv", "twin/trajectory.csv"])
    lines = path.read_text().splitlines()
    wrong = f"{chance.choice(VALUES)},{chance.choice(VALUES)},,{chance.choice(VALUES)},{chance.choice(VALUES)}"
    lines.insert(chance.randrange(len(lines)), wrong)
    path.write_text("\n".join(lines))


def _hashes(run: Path, chance: random.Random) -> None:
    file = chance.choice(["steps/hashes-0.jsonl", "twin/steps/hashes-0.jsonl"])
    lines = _lines(run, file)
    record = chance.choice(lines)
    record[chance.choice([*record])] = chance.choice(VALUES)
    _forge(run, lines, file)


def _facts(run: Path, chance: random.Random) -> None:
    path = run / "run.json"
    path.write_text(chance.choice(["[" * 100_000, "{}", "\x00", json.dumps({"job": chance.choice(VALUES)})]))


def _hosts(run: Path, chance: random.Random) -> None:
    """Records that another host seems to have shipped, with another attack in them."""
    copy = run / "hosts" / chance.choice(["b", "b" * 200])
    shutil.copytree(run / "steps", copy / "steps")
    shutil.copy(run / "events.jsonl", copy)
    chance.choice([_sparse, _noise, _blank, _deep, _many])(copy, chance)
    if chance.random() < 0.3:
        (run / "hosts" / "c").symlink_to(run.parent.parent / "outside")


ATTACKS: tuple[Callable[[Path, random.Random], None], ...] = (
    *(_field, _field, _commit, _job, _sizes, _resumed, _many, _sparse, _replaced, _noise, _blank, _deep, _seal),
    *(_actions, _rows, _hashes, _facts, _hosts),
)


@pytest.fixture(name="whole", scope="module")
def _whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_evidence(tmp_path_factory.mktemp("evidence") / "run").path


@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.soak) for block in range(1, BLOCKS))])
def test_no_run_folder_from_elsewhere_does_harm(
    whole: Path, tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, results, outside = tmp_path / "here", tmp_path / "results", tmp_path / "outside"
    for each in (here, results, outside / "folder"):
        each.mkdir(parents=True)
    (outside / "kept").write_text("kept")
    (here / "evil_module.py").write_text(EVIL)
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(str(here))
    for seed in range(block, FOLDERS, BLOCKS):
        chance = random.Random(seed)  # noqa: S311
        run = Path(shutil.copytree(whole, results / NAME))
        attack = ATTACKS[seed % len(ATTACKS)]
        attack(run, chance)
        told = say(results, *COMMANDS[seed // len(ATTACKS) % len(COMMANDS)])
        assert "Weights identical" not in told or attack in (_facts, _many, _hosts), (seed, attack, told)
        shutil.rmtree(run)
    assert sorted(each.name for each in here.iterdir() if each.suffix != "") == ["evil_module.py"]
    assert not (here / "code-ran").exists()
    assert [(each.name, each.is_dir()) for each in sorted(outside.iterdir())] == [("folder", True), ("kept", False)]
    assert (outside / "kept").read_text() == "kept"
    assert not [*(outside / "folder").iterdir()]


def refusal(results: Path, *words: str) -> str:
    """Returns the line with which a report of the run refuses its folder, with 74."""
    with bounded():
        told = CliRunner().invoke(app, ["report", NAME, "--results", str(results), *words])
    assert isinstance(told.exception, BambooError), told.output
    assert told.exception.exit_code is ExitCode.STORAGE
    return str(told.exception)


@pytest.mark.parametrize("kind", ["holes", "link", "folder"])
def test_each_file_that_no_run_writes_so_is_refused_with_one_code_and_told_once(
    whole: Path, tmp_path: Path, kind: str
) -> None:
    """Holes in the records were 74, and those in the trajectory a flaw, 1; a message had the same path twice."""
    files = [each for each in evidence_files(whole) if (kind, each) != ("folder", "events.jsonl")]  # that is no run
    for file in files:
        path = Path(shutil.copytree(whole, tmp_path / NAME)) / file
        if kind == "holes":
            os.truncate(path, TIB)
        else:
            path.unlink()
            (path.mkdir if kind == "folder" else partial(path.symlink_to, whole / file))()
        told = refusal(tmp_path)
        assert told.startswith(f"{path}: ") and told.count(str(path)) == 1, told
        shutil.rmtree(tmp_path / NAME)


@pytest.mark.parametrize("file", ["events.jsonl", "trajectory.csv", "twin/events.jsonl", "steps/hashes-0.jsonl"])
def test_an_endless_line_is_refused_in_words(whole: Path, tmp_path: Path, file: str) -> None:
    path = Path(shutil.copytree(whole, tmp_path / NAME)) / file
    with path.open("ab") as opened:
        for _ in range(68):
            opened.write(b"x" * 1_000_000)
    told = refusal(tmp_path)
    assert told.startswith(f"{path}: ") and " b'" not in told, told
