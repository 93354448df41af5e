"""Hostile files of jobs, scenarios and matrices, drawn by a seed.

They are right files of the library with one wrong place, and files that take the longest for their size.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import yaml

from engine.core.job.job import ACTING, ARGS_FIELDS
from engine.files.jobs.job_value import FIELD_TYPES
from engine.files.jobs.library import library, library_names

HEAD = "version: 1\nname: x\nabout: z\n"
FAULTS = "faults: [{at: {step: 1, stage: 1}, do: kill}]\n"
LONG = "9" * 5000
# As they stand in the file, without quotes.
VALUES = """
-1 0 1 2 99999999999999999999 1e400 -1e400 1e-400 .nan .inf -.inf 1e308h "1e308h" 9999999999999h "1us" "0s" 0.5 true
null ~ [] {} [1] [[1]] {a: 1} [{match: x, lr: .nan}] [{match: "(", lr: 1}] [{match: 1}] [null] 2026-01-01
2026-01-01T00:00:00Z
"2026-01-01" 1:30 010 1_000 0x1F 0o17 yes *x &x !!python/object/apply:os.system "\\0" "\\ud800" "\\x1b[31m" "\\u202e"
"\\U0010ffff" $a $nope first middle "x: lr=abc" "(: lr=1" "a{99999999999}: lr=1" "type:(" "type:a{99999999999}" "1,2"
"1e400" "1epoch" "0epoch" "99999999999epochs" "1e9GB" "../../x" "/dev/null/x" "s3://x" "file:///dev/null" "http://[::1"
"evil:attr" "a=evil:attr" "evil.inner:attr" evil.csv "evil.py" "os:system" "5:2" F B LOG kill random coordinator h0
""".split()
VALUES = [each for each in VALUES if each] + [LONG, f'"{LONG}"', "0x" + "f" * 5000, "1." + "0" * 5000, '"' + "(" * 3000]
WIDE = 60_000


@cache
def _library() -> list[Any]:
    return [yaml.safe_load((library() / f"{name}.yaml").read_text()) for name in library_names()]


def hostile_files(seed: int, number: int) -> Iterator[str]:
    """Yields so many files; one in twenty is long."""
    dice = random.Random(seed)  # noqa: S311
    for count in range(number):
        yield dice.choice(LARGE) if count % 20 == 19 else dice.choice((_job, _mutated, _mutated))(dice)


def _job(dice: random.Random) -> str:
    """Returns a job with wrong values for some of its fields."""
    fields = dice.sample([*FIELD_TYPES, *(f"{each}x" for each in ACTING)], dice.randint(1, 4))
    return "".join(f"{each}: {_value(dice, each)}\n" for each in fields)


def _value(dice: random.Random, name: str = "") -> str:
    value = dice.choice(VALUES)
    return (
        f"{{{dice.choice(('width', 'lr', 'x', '__class__', 'hf_token'))}: {value}}}" if name in ARGS_FIELDS else value
    )


def _mutated(dice: random.Random) -> str:
    """Returns a file of the library in which a value, or a key, is another; a quarter has a wrong field of its job."""
    found = copy.deepcopy(dice.choice(_library()))
    if dice.random() < 0.25:
        name = dice.choice([*FIELD_TYPES])
        found["job"] = {**(found["job"] if isinstance(found.get("job"), dict) else {}), name: "PLACE"}
        return _written(found, _value(dice, name))
    place, key = found, dice.choice([*found])
    while isinstance(place[key], (dict, list)) and place[key] and dice.random() < 0.85:
        place = place[key]
        key = dice.choice([*place]) if isinstance(place, dict) else dice.randrange(len(place))
    if isinstance(place, dict) and dice.random() < 0.2:
        place[dice.choice(("x", "with", "from", "job", "at", "role", "p95", ""))] = "PLACE"
    else:
        place[key] = "PLACE"
    return _written(found, _value(dice))


def _written(found: Any, value: str) -> str:
    return json.dumps(found).replace('"PLACE"', value)


def _repeated(form: str, number: int = WIDE) -> str:
    return ", ".join(form.replace("N", str(each)) for each in range(number))


XS = _repeated("xN", 4000)
CASE = "cases:\n  - name: a\n    only: ONLY\n    faults: [{at: {step: $a, stage: $b}, do: kill}]\n"
KEYS = f"{HEAD}job: {{{_repeated('kN: 0')}}}\n{FAULTS}"
LARGE = [
    KEYS,
    f"{HEAD}job: {{stages: 512, pipelines: 2, model_args: {{depth: 600}}}}\n{FAULTS}",
    f"{HEAD}job: {{stages: 4000, model_args: {{depth: 8000}}}}\n{FAULTS}",
    HEAD + FAULTS + "".join(f"k{each}: 0\n" for each in range(WIDE)),
    HEAD + FAULTS + "".join(f"k{each}: 0\n" for each in range(4000)),
    f"job: 1\n{_repeated('kN: 0', 4000)}",
    f"model_args: {{{_repeated('kN: 0', 4000)}}}\n",
    f"stages: [{'1,' * 300_000}]",
    f"{{{'stages: 0, ' * 90_000}}}",
    f"{HEAD}faults:\n" + "- {at: {step: 1, stage: 1}, do: kill}\n" * 1200,
    f"{HEAD}faults:\n"
    + "".join(f"- {{id: a{n}, after: {{fault: a{n - 1}, delay: 1s}}, do: kill}}\n" for n in range(900)),
    f"{HEAD}faults:\n- {{every: {{mtbf: 0.001 steps, count: 999999999}}, do: kill}}\n",
    f"{HEAD}job: {{steps: 999999999999}}\nfaults:\n- {{every: {{mtbf: 999999 steps, count: 999999999}}, do: kill}}\n",
    f"{HEAD}axes: {{a: [{_repeated('N', 4000)}], b: [1]}}\n{CASE.replace('ONLY', '{}')}",
    f"{HEAD}axes: {{a: [{_repeated('N', 90)}], b: [{_repeated('N', 90)}]}}\n{CASE.replace('ONLY', '{b: [1]}')}",
    f"{HEAD}axes: {{a: [{_repeated('N', 4000)}], b: [1]}}\n{CASE.replace('ONLY', f'{{a: [{XS}]}}')}",
    f"{HEAD}axes: {{a: [{'1, ' * 9000}], b: [1]}}\n{CASE.replace('ONLY', '{a: [1]}')}",
    *(f"{name}: '{part * 60_000}'\n" for name in ("param_groups", "metrics") for part in ("x: lr=1; ", "a:b,", "1,")),
    *(f"{name}: '{'x: lr=1; ' * 3000}'\n" for name in ("param_groups", "partition", "metrics", "logger", "split")),
    f"metrics: '{'1,' * 16_000}'\n",
    f"logger: '{'a:b,' * 8000}'\n",
    "[" * 1_000_000,
    "a: " + "\n  x" * 200_000,
    'a: "' + "x\n" * 400_000,
    "a: " + "9" * 1_000_000,
    "a: 0x" + "f" * 1_000_000,
    "a: &a [x]\n" + "".join(f"b{each}: [*a, *a]\n" for each in range(20_000)),
    "{? " * 300_000,
]
