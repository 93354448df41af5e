"""``python -m tests.e2e.host_soak``: every fault of hosts many times, each time on new hosts; and the bits of one.

Each case is a `bamboo inject --hosts` as a user starts it. Steps are drawn, and the time after
their begin. The table has a line for each fault; the folder of a case that did not pass is kept and named.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from engine.harness.host_checks import hosts_error
from tests.e2e.launcher import ROOT

LIMIT_S = 400.0  # of a case, on a busy machine
STEPS = 24
MLP = {"model": "mlp", "stages": 4, "microbatches": 2, "steps": STEPS}
TWICE = MLP | {"stages": 2, "pipelines": 2, "redundancy_level": 2}
GPT = {"model": "gpt", "model_args": {"tied": True, "dropout": 0.1}, "microbatches": 2, "steps": 8}
RESNET = {"model": "resnet18", "microbatches": 2, "steps": 4}
BITS = {
    "gpt, 1 pipeline": GPT | {"stages": 3},
    "gpt, 2 pipelines": GPT | {"stages": 2, "pipelines": 2},
    "resnet18, 1 pipeline": RESNET | {"stages": 3},
    "resnet18, 2 pipelines": RESNET | {"stages": 2, "pipelines": 2},
}
# name -> the hosts of the bed, the job, and the faults of each round in turn
FAULTS: dict[str, tuple[int, dict[str, Any], list[list[dict[str, Any]]]]] = {
    "kill-agent": (3, MLP, [[{"do": "kill-agent"}]]),
    "power-off": (
        3,
        MLP,
        [[{"do": "power-off", "target": {"host": each}}] for each in ("other", "coordinator", "etcd-leader")],
    ),
    "cut-host": (3, MLP, [[{"do": "cut-host", "target": {"host": each}}] for each in ("other", "coordinator")]),
    "kill-coordinator": (3, MLP, [[{"do": "kill-coordinator"}]]),
    "kill-etcd-leader": (3, MLP, [[{"do": "kill-etcd-leader"}]]),
    "kill-worker": (3, MLP, [[{"do": "kill-worker", "target": {"worker": each}}] for each in range(4)]),
    "two-at-once": (
        4,
        TWICE,
        [
            [{"do": "power-off", "target": {"host": "h3"}}, {"do": "power-off", "target": {"host": "h1"}}],
            [{"do": "kill-coordinator"}, {"do": "power-off", "target": {"host": "other"}}],
        ],
    ),
}


class SoakCase(NamedTuple):
    """A case: the name of its fault or job, its number, the hosts of its bed, its scenario."""

    name: str
    number: int
    hosts: int
    scenario: dict[str, Any]


class SoakResult(NamedTuple):
    """The result of a case; `problem` is empty if it passed."""

    name: str
    problem: str
    seconds: float
    stall_ms: float | None
    spare_s: float | None


def cases(times: int, only: Sequence[str], seed: int) -> Iterator[SoakCase]:
    """Yields the cases of each round: one of every fault; the jobs that are not broken come once."""
    for name, job in BITS.items():
        if not only or name in only:
            yield SoakCase(name, 0, 3, scenario(job, [{"do": "noop-host", "at": {"step": 1}}]))
    for number in range(times):
        for name, (hosts, job, rounds) in FAULTS.items():
            if only and name not in only:
                continue
            dice = random.Random(f"{seed} {name} {number}")  # noqa: S311 - no secret
            at = {"step": dice.randrange(2, STEPS // 2), "delay": f"{dice.randrange(60)}ms"}
            faults = [each | {"at": at, "id": f"f{place}"} for place, each in enumerate(rounds[number % len(rounds)])]
            yield SoakCase(name, number, hosts, scenario(job, faults))


def scenario(job: dict[str, Any], faults: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the scenario of a job with faults of hosts; nothing but the struck hosts may be lost."""
    whole = {**job, "validate_every": 0, "checkpoint_every": "0", "seed": 7}
    expect = {"outcome": "recovered", "trajectory": "identical", "steps_lost": 0, "samples": "exactly-once"}
    expect |= {"culprit": "exact", "leftovers": "none"}
    about = "a case of the soak"
    return {"version": 1, "name": "soak", "about": about, "job": whole, "faults": [*faults], "expect": expect}


def run_case(case: SoakCase, folder: Path) -> SoakResult:
    """Runs a case in a folder of its own, which stays if the case does not pass."""
    folder.mkdir()
    path = folder / "soak.json"
    path.write_text(json.dumps(case.scenario))
    results = folder.parent / "results"  # shared: the twin of a job runs once
    command = [sys.executable, "-m", "bamboo_cli", "inject", str(path), "--hosts", str(case.hosts), "--json"]
    command += ["--set", f"results={results}"]
    began_s = time.monotonic()
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return SoakResult(case.name, f"no end within {LIMIT_S:g} s; scenario {path}", LIMIT_S, None, None)
    seconds = time.monotonic() - began_s
    (folder / "stderr").write_text(done.stderr)
    try:
        told = json.loads(done.stdout.splitlines()[-1])
        (run,) = told["runs"]
    except (IndexError, KeyError, ValueError):
        last = done.stderr.strip().rpartition("\n")[2]
        return SoakResult(case.name, f"code {done.returncode}: {last}; {folder}", seconds, None, None)
    wrong = [f"{each['name']}: {each['text']}" for each in run["checks"] if each["result"] != "passed"]
    if wrong or done.returncode:
        problem = f"code {done.returncode}: {'; '.join(wrong)}; {run['run_dir']}"
        return SoakResult(case.name, problem, seconds, None, None)
    stalls = list(told["stall_ms"].values())
    spares = [
        float(each["text"].partition("the cut, ")[2].split()[0]) for each in run["checks"] if each["name"] == "lease"
    ]
    shutil.rmtree(run["run_dir"])
    shutil.rmtree(folder)
    return SoakResult(case.name, "", seconds, max(stalls, default=None), min(spares, default=None))


def row(name: str, found: Sequence[SoakResult]) -> dict[str, Any]:
    """Returns the line of the table about one fault or job."""
    stalls = sorted(each.stall_ms for each in found if each.stall_ms is not None)
    spares = [each.spare_s for each in found if each.spare_s is not None]
    return {
        "case": name,
        "passed": sum(not each.problem for each in found),
        "of": len(found),
        "stall_ms_median": round(statistics.median(stalls), 1) if stalls else None,
        "stall_ms_max": round(stalls[-1], 1) if stalls else None,
        "least_before_lease_s": min(spares, default=None),
        "seconds_median": round(statistics.median(each.seconds for each in found), 1),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the soak; returns 0 if all cases passed, 1 if one did not, 4 if this machine makes no hosts."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.host_soak", description=__doc__)
    parser.add_argument("--times", type=int, default=20, help="rounds: cases of each fault")
    parser.add_argument("--only", action="append", choices=[*FAULTS, *BITS], help="a fault or a job; repeatable")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--jobs", type=int, default=1, help="beds at a time; with several, times are not comparable")
    parser.add_argument("--json", action="store_true", help="print one JSON object; progress goes to stderr")
    given = parser.parse_args(arguments)
    if why := hosts_error():
        print(f"this machine makes no hosts of namespaces: {why}", file=sys.stderr)
        return 4
    folder = Path(tempfile.mkdtemp(prefix="host-soak-"))
    found: dict[str, list[SoakResult]] = {}
    listed = list(enumerate(cases(given.times, given.only or (), given.seed)))
    with ThreadPoolExecutor(given.jobs) as pool:
        begun = {pool.submit(run_case, case, folder / str(number)): case for number, case in listed}
        try:
            for each in as_completed(begun):
                case, result = begun[each], each.result()
                found.setdefault(case.name, []).append(result)
                text = result.problem or "passed"
                print(f"{case.name} {case.number}: {text} ({result.seconds:.1f} s)", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            print("interrupted; the cases so far:", file=sys.stderr)
    rows = [row(name, each) for name, each in found.items()]
    problems = [each.problem for results in found.values() for each in results if each.problem]
    if given.json:
        print(json.dumps({"seed": given.seed, "cases": rows, "problems": problems}))
    else:
        print_rows(rows)
    if not problems:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if problems else 0


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """Prints the table."""
    titles = ("case", "passed", "of", "stall ms, median", "max", "ended before the lease, least s", "s")
    lines = [titles, *(tuple("" if each is None else str(each) for each in one.values()) for one in rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(titles))]
    for line in lines:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


if __name__ == "__main__":
    sys.exit(main())
