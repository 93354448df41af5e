"""Any text as the value of any option: it is used, or refused with its place; it never is an internal error.

The options are read off the program, so that a new one is tried too. What a value starts is stopped
(`any_command.confined`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bamboo_cli.app import COMMANDS, load
from engine.core.errors import ExitCode
from tests.cli.any_command import called, confined, leaves

LEAVES = {" ".join(path): command for name in COMMANDS for path, command in leaves(load(name), (name,))}
SCENARIO, MATRIX = "kill-middle-stage", "matrix-smoke"
HOSTS = ("--hosts=3", "--etcd=10.0.0.1:2379", "--trusted-network=10.0.0.0/8")
# Words with which a command does as much as it can here; an option of its own stands before them.
BASE: dict[str, tuple[str, ...]] = {
    "run": ("--dry-run",),
    "inject": ("--dry-run", SCENARIO),
    "validate": (SCENARIO,),
    "matrix": ("--format=list", MATRIX),
    "launch": (*HOSTS, "slurm", "job.yaml"),
    "agent": ("--hosts=1", "--run=r", "--etcd=127.0.0.1:1", "job.yaml"),
    "export": ("--output=out.pt",),
    "compare": ("latest", "latest"),
    "collect": ("latest",),
    "list": ("models",),
}
LONG = "9" * 5000  # Python reads no number of so many digits
DEEP = "(" * 3000
VALUES = """
-1 0 1 2 0.5 1e400 nan inf -inf .nan 1e308 1e308h 9999999999999h 0epoch 1epoch 1e5epoch 99999999999epochs 10m 7d 1.5d
99999999999999999999d 128GB 1e9GB 9999999999999999999999GB true null ~ [1] {a:1} [ ( ) a{99999999999} type:( type:[
type:a{99999999999} x:lr=abc x:lr=nan nothing (:lr=1 x:lr=1e400 a{99999999999}:lr=1 [[a]:lr=1 x:weight_decay=nan .. a/b
../x /dev/null/x a=b =1 : :: a:b a.b:c a:b,c:d 5:2 5:2:B:3 5:2@1 99999999999999999999999:1 5:2:X 1,2 1,,2 , ; % $x * !x
&x ' " # -- 2026-01-01 2026-01-01T00:00:00Z http:// http://x:99999999 http://[::1 s3://x file:// 10.0.0.0/99 ::/0 1/0
0/1 1/99999999999999999999999 localhost:99999 [::1]:1 model_args.x=1 model_args.=1 .=1 steps=1e400 lr=1e400 lr=nan
results=/dev/null/x recovery.max<1s recovery.max<1e308h verdict loss>nan F \u00b2 \u0663 \u00e9 \udcff \x1b[31m \u202e
""".split()
VALUES += ["", "  ", "a: b", "x: lr=1; x: lr=1", LONG, f"steps={LONG}", "x" * 3000]
VALUES += [f"{DEEP}: lr=1", f"type:{DEEP}", f"{LONG}: lr={LONG}", f"{'a' * 100}.{'b' * 100}:80"]
TEXTS = st.sampled_from(VALUES) | st.text(st.sampled_from("0123456789eE.-+:;,=@/[]{}()*$%~ abxhmsBF"), max_size=12)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    here = tmp_path / "over" / "here"
    here.mkdir(parents=True)
    (here / "job.yaml").write_text("stages: 2\n")
    confined(here, monkeypatch)
    return here


def is_flag(parameter: Any) -> bool:
    return bool(getattr(parameter, "is_flag", False))


def tried(name: str, parameter: Any, value: str) -> None:
    option, base = parameter.opts[0], BASE.get(name, ())
    if option.startswith("-"):
        words = (*name.split(), *(each for each in base if not each.startswith(f"{option}=")))
        ended = called(*words[: len(name.split())], f"{option}={value}", *words[len(name.split()) :])
    else:
        options, given_words = (
            [each for each in base if each.startswith("--")],
            [each for each in base if each[0] != "-"],
        )
        arguments = [each.opts[0] for each in LEAVES[name].params if not each.opts[0].startswith("-")]
        place = arguments.index(option)
        given_words[place : place + 1] = [value]
        ended = called(*name.split(), *options, "--", *given_words)
    if ended.code == ExitCode.USAGE and ended.problems:
        assert all(each.field or each.source for each in ended.problems), ended.text


def values_of(name: str) -> list[Any]:
    """Returns the parameters with values; those of a job, which several commands have, of `run` alone."""
    of_job = {each.opts[0] for each in LEAVES["run"].params if getattr(each, "rich_help_panel", "") == "Job"}
    of_job = of_job if name != "run" else set()
    return [each for each in LEAVES[name].params if not is_flag(each) and each.opts[0] not in of_job]


WITH_VALUES = [name for name in LEAVES if values_of(name)]


@pytest.mark.parametrize("name", WITH_VALUES)
def test_any_value_of_an_option_is_used_or_refused_with_its_place(name: str, folder: Path) -> None:
    parameters = values_of(name)

    @settings(max_examples=2 * len(parameters), suppress_health_check=[*HealthCheck])
    @given(parameter=st.sampled_from(parameters), value=TEXTS)
    def holds(parameter: Any, value: str) -> None:
        tried(name, parameter, value)

    holds()


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", LEAVES)
def test_each_value_of_each_option(name: str, folder: Path) -> None:
    for parameter in LEAVES[name].params:
        for value in VALUES if not is_flag(parameter) else ():
            tried(name, parameter, value)


@pytest.mark.parametrize("name", BASE)
def test_the_words_beside_an_option_are_right(name: str, folder: Path) -> None:
    ended = called(*name.split(), *BASE[name])
    assert ended.code != ExitCode.USAGE or name == "launch", ended.text


@pytest.mark.parametrize(
    "words",
    [
        *(("--param-groups", each) for each in ("x: lr=abc", "nothing", "(: lr=1", "x: lr=nan", "x: weight_decay=nan")),
        ("--param-groups", f"{DEEP}: lr=1"),
        ("--param-groups", "a{99999999999}: lr=1"),
        ("--partition", "1e400"),
        ("--partition", f"type:{DEEP}"),
        ("--partition", "type:a{99999999999}"),
        ("--split", LONG),
        ("--checkpoint-every", LONG),
    ],
)
def test_a_wrong_text_of_a_job_has_its_place(words: tuple[str, str], folder: Path) -> None:
    ended = called("run", "--dry-run", *words)
    assert ended.code == ExitCode.USAGE
    assert [each.source for each in ended.problems] == [words[0]]
