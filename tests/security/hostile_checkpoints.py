"""Hostile checkpoints by seed: each has one trick, and is whole otherwise, with names and hashes that fit.

All of them, each read by every command in a child of this process, with time and memory:

    python -m tests.security.hostile_checkpoints --count 100 --seed 1
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from typer.testing import CliRunner

from bamboo_cli.app import app
from engine.api.weights import load_weights
from engine.core.errors import BambooError
from engine.core.job.job import Job
from engine.core.manifest import manifest_file
from engine.core.texts import printable
from engine.harness import case_runner
from engine.runtime.checkpoint.export import GivenWeights
from tests.files.made_checkpoints import bytes_of, made_manifest, sha256, state_hash, weights_of

RUN = "20261124-120000-mlp-0a1b"
STEP = 3
JOB = asdict(Job(model="mlp", steps=STEP + 1))  # no step is left: a checkpoint that passes all else is refused for that
EVIL = "evil:L"  # leaves a mark when it is imported
PART = "layer-0000.{:016x}.safetensors"
COMMANDS = (
    "run --resume {0} --other-bits",
    "run --resume {1} --other-bits",
    "checkpoint verify {0}",
    "checkpoint list {0}",
    "export {0} --output out.pt",
)
CODES = (0, 1, 2, 5, 74)
MOST_S, MOST_MB = 5.0, 500
_PLAIN = asdict(made_manifest(STEP, []))


class Made:
    """A checkpoint below `base`, in a run of the folder `results`; `victim` is a folder that nothing may touch."""

    def __init__(self, base: Path, dice: random.Random):
        self.base, self.dice = base, dice
        self.victim = base / "victim"
        self.run = base / "results" / RUN
        self.place = self.run / "checkpoints"
        self.step = self.place / f"step-{STEP:08d}"
        self.step.mkdir(parents=True)
        self.victim.mkdir()
        (self.victim / "precious").write_text("precious")
        (base / "evil.py").write_text(f"open({str(base / 'mark')!r}, 'w')\nL = net = rows = None\n")
        (self.run / "events.jsonl").touch()
        self.facts: dict[str, Any] = {"job": JOB, "host": {}, "run": RUN}
        self.parts = [bytes_of(STEP, 0), bytes_of(STEP, 1)]
        self.sizes: dict[int, int] = {}
        self.plain: dict[str, Any] = {**_PLAIN, "job": dict(JOB), "run": RUN, "names": ["0", "1"], "data_files": []}
        self.changes: dict[str, Any] = {}
        self.text: Callable[[bytes], bytes] = lambda data: data

    def write(self) -> None:
        """Writes parts, manifest and run.json, each with the hash of what it has."""
        rows = []
        for layer, data in enumerate(self.parts):
            path = self.step / PART.format(layer).replace("0000", f"{layer:04d}", 1)
            size, digest = len(data), hashlib.sha256(data).hexdigest()
            path.write_bytes(data)
            if layer in self.sizes:  # the hash of as many zeros takes too long, also for whoever reads it
                size = self.sizes[layer]
                os.truncate(path, size)
            row = {"layer": layer, "shard": 0, "shards": 1, "file": path.name, "size": size, "sha256": digest}
            rows.append({**row, "strides": [], "transient": [], "aliases": []})
        layers = [
            {"layer": layer, "state": state_hash(w=weights_of(STEP, layer)), "buffers": sha256("")}
            for layer in range(2)
        ]
        plain = {**self.plain, "layers": layers, "parts": rows}
        for name, change in self.changes.items():
            plain[name] = change(plain[name]) if callable(change) else change
        data = self.text((json.dumps(plain, sort_keys=True, separators=(",", ":")) + "\n").encode())
        (self.step / manifest_file(data)).write_bytes(data)
        if not (self.run / "run.json").exists():
            (self.run / "run.json").write_text(json.dumps(self.facts))


def _header(entries: object, rest: bytes = b"") -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + rest


def code(made: Made) -> None:
    """Names code in a field, or in several."""
    fields = ["model", "data", "schedule", "logger", "metrics", "optimizer", "lr_schedule", "collate"]
    for name in made.dice.sample(fields, made.dice.randint(1, 3)):
        made.plain["job"][name] = made.dice.choice([EVIL, "evil:net", "os:abort", f"csv,{EVIL}"])
    made.facts["job"] = made.plain["job"]


def places(made: Made) -> None:
    """Chooses where to write."""
    name = made.dice.choice(["results", "checkpoints"])
    made.plain["job"][name] = str(made.victim / made.dice.choice(["", "a/b", "../victim/c"]))


def numbers(made: Made) -> None:
    """Has a number that no 64 bits hold, or that makes a loop."""
    huge = made.dice.choice([10**15, 2**63, 10**400, -1, 1e308, True])
    made.dice.choice(
        [
            lambda: made.changes.update(epoch=huge),
            lambda: made.changes.update(step=huge),
            lambda: made.plain["job"].update(pipelines=huge),
            lambda: made.plain["job"].update(steps=huge, stages=huge),
            lambda: made.changes.update(parts=lambda rows: [{**each, "size": huge} for each in rows]),
            lambda: made.changes.update(parts=lambda rows: [{**each, "shards": huge} for each in rows]),
            lambda: made.changes.update(layers=lambda rows: [{**each, "layer": huge} for each in rows]),
        ]
    )()


def strides(made: Made) -> None:
    """Has strides that no memory has, that overlap, or of no tensor."""
    given = made.dice.choice([[2**62], [0], [1, 1], [10**9], []])
    name = made.dice.choice(["weight/w", "weight/none"])
    made.changes["parts"] = lambda rows: [{**each, "strides": [[name, given]]} for each in rows]


def names(made: Made) -> None:
    """Has names that steer a terminal, lead outside, or are those of no tensor."""
    bad = made.dice.choice(["\x1b]0;x\x07\x1b[2J", "../../victim/x", "\0", "a" * 10**6, "\ud800", "[red]x[/red]"])
    made.dice.choice(
        [
            lambda: made.changes.update(names=[bad, bad]),
            lambda: made.changes.update(run=bad),
            lambda: made.plain["job"].update(name=bad, data=bad),
            lambda: made.changes.update(parts=lambda rows: [{**each, "file": bad} for each in rows]),
            lambda: made.changes.update(parts=lambda rows: [{**each, "aliases": [[bad, bad]]} for each in rows]),
            lambda: made.changes.update(parts=lambda rows: [{**each, "transient": [bad] * 9} for each in rows]),
            lambda: made.changes.update(data_files=[[bad, 1, "0" * 64]]),
        ]
    )()


def jobs(made: Made) -> None:
    """Has a job that is none, or one without an end."""
    nested: Any = 0
    for _ in range(900):
        nested = [nested]
    job = made.dice.choice(
        [
            {f"k{number}": 0 for number in range(60_000)},
            {**JOB, **{f"k{number}": 0 for number in range(900)}},
            {**JOB, "model_args": {f"k{number}": number for number in range(50_000)}},
            {**JOB, "model": nested},
            {**JOB, "stages": "x" * 10**6},
            {**JOB, "partition": [1] * 10**5},
            {**JOB, "param_groups": [{"match": "(" * 50, "lr": "nan"}]},
            {"model": 1, "steps": None},
        ]
    )
    made.plain["job"] = job


def files(made: Made) -> None:
    """Names files of the user's as data: to hash them all would take hours."""
    where = made.dice.choice(["/", "/proc", "/dev/zero", "/usr"])
    made.plain["job"] |= made.dice.choice([{"data": where}, {"data_args": {"path": where}}])
    made.plain["data_files"] = [[where, 2**40, "0" * 64]]


def facts(made: Made) -> None:
    """Has facts of a host that are none."""
    made.plain["facts"] = made.dice.choice([{}, {"isa": "x" * 10**6}, {"cpu": [[]] * 10**5}, {"gpus": {"a": None}}])


def manifests(made: Made) -> None:
    """Has a manifest that is too long, or too many of them."""
    match made.dice.randrange(5):
        case 0:
            path = made.step / "manifest-0123456789abcdef.json"
            path.touch()
            os.truncate(path, made.dice.choice([2**40, 2**26]))
        case 1:
            made.text = lambda data: b"[" + b"[]," * (5 << 20) + b"[]]"
        case 2:
            made.text = lambda data: b"[" * (60 << 20)
        case 3:
            for number in range(500):
                data = json.dumps(number).encode()
                (made.step / manifest_file(data)).write_bytes(data)
        case 4:
            made.text = lambda data: data.replace(b'"epoch":0', b'"epoch":' + b"9" * 5000)


def holes(made: Made) -> None:
    """Has a part of nothing, which the manifest admits."""
    made.sizes[0] = made.dice.choice([2**26, 2**30, 10 << 30, 2**40, 2**62 >> 20])
    if made.dice.random() < 0.5:
        num = (made.sizes[0] - 4096) // 4
        text = json.dumps({"weight/w": {"dtype": "F32", "shape": [num], "data_offsets": [0, 4 * num]}}).encode()
        made.parts[0] = (4088).to_bytes(8, "little") + text.ljust(4088)


def headers(made: Made) -> None:
    """Has a header that is none, is padded, overlaps, or promises more than there is."""
    one = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
    many = {f"weight/{number}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for number in range(250_000)}
    made.parts[0] = made.dice.choice(
        [
            lambda: (2**62).to_bytes(8, "little") + b"{}",
            lambda: _header(b'{"weight/w":' + b" " * (100 << 20) + json.dumps(one).encode() + b"}", b"abcd"),
            lambda: _header(json.dumps({"weight/w": one}).encode() + b" " * (15 << 20), b"abcd"),
            lambda: _header({"weight/w": one, "weight/v": {**one, "data_offsets": [2, 6]}}, b"abcdef"),
            lambda: _header(b"[" * 10**6),
            lambda: _header(b'{"weight/w":1,"weight/w":2}'),
            lambda: _header({"weight/w": {**one, "dtype": "F99"}}, b"abcd"),
            lambda: _header({"weight/w": {**one, "shape": [2**62, 2**62]}}, b"abcd"),
            lambda: _header({"weight/w": {**one, "shape": [10**400]}}, b"abcd"),
            lambda: _header({"weight/w": {**one, "shape": [-4]}}, b"abcd"),
            lambda: _header({"weight/w": {**one, "shape": [1] * 10**5}}, b"abcd"),
            lambda: _header({"weight/w": {**one, "data_offsets": [0, 2**62]}}, b"abcd"),
            lambda: _header({"__metadata__": {"a": "b"}, "weight/w": one}, b"abcd"),
            lambda: _header({"buffer/10000000000/w": one}, b"abcd"),
            lambda: _header(many),
            lambda: b"",
        ]
    )()


def weights(made: Made) -> None:
    """Has other weights than the run had."""
    at = made.dice.randrange(1, 100)
    data = bytearray(made.parts[1])
    data[-at] ^= 1 << made.dice.randrange(8)
    made.parts[1] = bytes(data)


def links(made: Made) -> None:
    """Has links and special files in the place of its own."""
    made.write()
    path = made.dice.choice([*made.step.iterdir(), made.run / "run.json"])
    path.unlink()
    match made.dice.randrange(3):
        case 0:
            path.symlink_to(made.dice.choice(["/etc/passwd", "/dev/zero", str(made.victim / "precious")]))
        case 1:
            os.mkfifo(path)
        case 2:
            path.mkdir()


def records(made: Made) -> None:
    """Has a run.json that leads elsewhere, or nowhere."""
    place = made.dice.choice([str(made.victim), "\0", "a" * 5000, 5, None, ["x"], "nowhere://x"])
    before = {"place": place, "run": RUN, "step": made.dice.choice([10**400, 1e400, "x", 3, None]), "is_named": True}
    made.facts = made.dice.choice(
        [
            {"job": {**JOB, "checkpoints": place}, "host": {}},
            {"job": JOB, "host": {}, "resumed": before},
            {"job": {**JOB, "logger": EVIL}, "host": {}, "resumed": {**before, "place": str(made.place), "step": STEP}},
            {"job": [1], "host": {}},
            {"job": JOB, "host": 5, "resumed": "x"},
        ]
    )


KINDS = (code, places, numbers, strides, names, jobs, files, facts, manifests, holes, headers, weights, links, records)


def make(base: Path, number: int, seed: int = 1) -> Made:
    """Makes the hostile checkpoint of a number: kinds take turns."""
    made = Made(base, random.Random(f"{seed} {number}"))  # noqa: S311
    kind = KINDS[number % len(KINDS)]
    kind(made)
    if kind is not links:
        made.write()
    return made


class Answer(NamedTuple):
    """The exit code of a command, its output, and the time of the processor that it took."""

    words: str
    code: int
    output: str
    cpu_s: float


def answers(made: Made) -> Iterator[Answer]:
    """Yields the answer of every command that reads a checkpoint, called in this process; no run begins."""
    case_runner.run_case = _no_run
    os.chdir(made.base)
    sys.path.insert(0, str(made.base))  # a name of the stranger's module is enough
    for words in (each.format(made.place, RUN) for each in COMMANDS):
        began_s = time.process_time()
        done = CliRunner().invoke(app, words.split())
        code, output = done.exit_code, done.output
        if isinstance(done.exception, BambooError):  # which the program prints
            code, output = int(done.exception.exit_code), f"{output}\n{printable(str(done.exception))}"
        elif done.exception is not None and not isinstance(done.exception, SystemExit):
            output += "".join(traceback.format_exception(done.exception))
        yield Answer(words, code, output, time.process_time() - began_s)
    began_s, output = time.process_time(), ""
    for reader in (lambda: load_weights(made.place, STEP), lambda: GivenWeights(str(made.step))):
        try:
            reader()
        except BambooError as error:
            output += f"{error}\n"
        except Exception as error:
            output += "".join(traceback.format_exception(error))
    yield Answer("weights", 0, printable(output), time.process_time() - began_s)


def _no_run(*given: object, **more: object) -> NoReturn:
    raise InterruptedError("a run began")


def harm(made: Made, answer: Answer) -> list[str]:
    """Returns what is wrong with an answer: code ran, a file outside was touched, it is no plain refusal."""
    wrong = ["code ran"] if (made.base / "mark").exists() else []
    wrong += ["a file outside"] if [each.name for each in made.victim.rglob("*")] != ["precious"] else []
    wrong += ["results elsewhere"] if {each.name for each in (made.base / "results").iterdir()} != {RUN} else []
    wrong += ["a traceback"] if "Traceback" in answer.output else []
    wrong += ["an escape sequence"] if "\x1b" in answer.output else []
    return wrong + ([f"exit code {answer.code}"] if answer.code not in CODES else [])


def _in_child(number: int, seed: int) -> tuple[list[str], float, float]:
    """Returns what is wrong with the answers about one checkpoint, their longest time, and their memory in MB."""
    with tempfile.TemporaryDirectory() as folder:
        made = make(Path(folder), number, seed)
        report = Path(folder, "report")
        if not (child := os.fork()):
            os.environ["HOME"] = os.environ["XDG_STATE_HOME"] = folder
            found = [(answer, harm(made, answer)) for answer in answers(made)]
            lines = [f"{answer.words}: {', '.join(wrong)}: {answer.output[-800:]}" for answer, wrong in found if wrong]
            report.write_text(json.dumps([lines, max(answer.cpu_s for answer, _ in found)]))
            os._exit(0)
        _, status, usage = os.wait4(child, 0)
        lines, cpu_s = json.loads(report.read_text()) if not status else ([f"status {status}"], 0.0)
    megabytes = usage.ru_maxrss / 1024
    lines += [f"{cpu_s:.1f} s of the processor"] if cpu_s > MOST_S else []
    return lines + ([f"{megabytes:.0f} MB"] if megabytes > MOST_MB else []), cpu_s, megabytes


def main() -> None:
    """Makes hostile checkpoints, gives each to every command in a child, and prints what was wrong, slow or large."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    found = []
    for number in range(given.count):
        found.append(_in_child(number, given.seed))
        for line in found[-1][0]:
            print(f"{number} {KINDS[number % len(KINDS)].__name__}: {line}", flush=True)
    num_wrong = sum(bool(lines) for lines, _, _ in found)
    slowest, largest = max(each[1] for each in found), max(each[2] for each in found)
    print(f"{given.count} checkpoints, {num_wrong} wrong; an answer took at most {slowest:.1f} s, {largest:.0f} MB")
    sys.exit(bool(num_wrong))


if __name__ == "__main__":
    main()
