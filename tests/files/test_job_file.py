"""A job's layers: each overrides the lower ones, names the origin of its values and the place of its mistakes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from engine.core.errors import UserError
from engine.core.job.job import Job
from engine.core.program.schedules import SCHEDULES
from engine.files.jobs.job_file import resolve_job
from engine.files.jobs.resolved_job import ResolvedJob, explain
from tests.looped import looped


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def resolve(
    text: str | None = None,
    environment: Mapping[str, str] | None = None,
    settings: tuple[str, ...] = (),
    **flags: str,
) -> ResolvedJob:
    """Resolves a job file of this text in the working folder together with the other layers."""
    if text is not None:
        Path("job.yaml").write_text(text)
    return resolve_job(Path("job.yaml") if text is not None else None, environment or {}, settings, flags)


def problems(
    text: str | None = None,
    environment: Mapping[str, str] | None = None,
    settings: tuple[str, ...] = (),
    **flags: str,
) -> list[str]:
    with pytest.raises(UserError) as caught:
        resolve(text, environment, settings, **flags)
    return [str(problem) for problem in caught.value.problems]


def test_without_layers_a_job_is_all_defaults() -> None:
    resolved = resolve()
    assert resolved.job == Job(device="cpu", elastic=True)
    by_itself = ("device", "elastic")
    assert {resolved.origins[name] for name in resolved.origins if name not in by_itself} == {"default"}
    assert resolved.origins["device"] == "default (auto: no GPU)"
    assert [name for name, _, _ in explain(resolved)] == list(Job.__dataclass_fields__)


LEVELS = (
    "default",
    "user/bamboo/job.yaml:2:9",
    "bamboo.yaml:1:9",
    "job.yaml:3:9",
    "BAMBOO_STAGES",
    "--set",
    "--stages",
)


@looped("top", range(len(LEVELS)))
def test_each_level_wins_over_all_below_it(top: int) -> None:
    # The layer at level n says stages: 10 + n.
    files = {1: "user/bamboo/job.yaml", 2: "bamboo.yaml", 3: "job.yaml"}
    texts = {1: "\nstages: 11", 2: "stages: 12", 3: "version: 1\n\nstages: 13"}
    for level, name in files.items():
        if level <= top:
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(texts[level])
    resolved = resolve_job(
        Path("job.yaml") if top >= 3 else None,
        {"XDG_CONFIG_HOME": "user"} | ({"BAMBOO_STAGES": "14"} if top >= 4 else {}),
        ["stages=15"] if top >= 5 else [],
        {"stages": "16"} if top >= 6 else {},
    )
    assert resolved.job.stages == (10 + top if top else Job().stages)
    assert resolved.origins["stages"] == LEVELS[top]


def test_the_user_file_is_found_from_home() -> None:
    path = Path("home/.config/bamboo/job.yaml")
    path.parent.mkdir(parents=True)
    path.write_text("seed: 7")
    assert resolve(environment={"HOME": "home"}).origins["seed"] == f"{path}:1:7"
    assert resolve(environment={"HOME": "home", "XDG_CONFIG_HOME": "elsewhere"}).job.seed == 0


def test_the_project_file_is_that_of_the_given_folder() -> None:
    Path("sub").mkdir()
    Path("sub/bamboo.yaml").write_text("seed: 7")
    assert resolve_job(None, {}, project=Path("sub")).origins["seed"] == "sub/bamboo.yaml:1:7"


def test_arguments_meet_one_by_one() -> None:
    resolved = resolve(
        "model_args:\n  width: 1\n  depth: 1\n  tied: false\n",
        {"BAMBOO_MODEL_ARGS__WIDTH": "2", "BAMBOO_MODEL_ARGS__DEPTH": "2"},
        ("model_args.width=3", "model_args.path=a.b=c"),
    )
    assert resolved.job.model_args == {"width": 3, "depth": 2, "tied": False, "path": "a.b=c"}
    rows = [row for row in explain(resolved) if row[0].startswith("model_args")]
    assert rows == [
        ("model_args.width", 3, "--set"),
        ("model_args.depth", 2, "BAMBOO_MODEL_ARGS__DEPTH"),
        ("model_args.tied", False, "job.yaml:4:9"),
        ("model_args.path", "a.b=c", "--set"),
    ]


def test_a_whole_number_passes_for_a_number_and_becomes_one() -> None:
    job = resolve("lr: 1").job
    assert type(job.lr) is float
    assert job.lr == 1.0


@pytest.mark.parametrize("number", ["0", "100"])
def test_a_whole_number_says_how_often_checkpoints_are_kept(number: str) -> None:
    assert resolve(f"checkpoint_every: {number}\n").job.checkpoint_every == number


def test_a_list_of_first_layers_is_a_partition() -> None:
    assert resolve("partition: [2, 4, 6]").job.partition == "2,4,6"


def test_text_fields_take_texts_of_the_command_line_as_they_stand() -> None:
    resolved = resolve(None, {"BAMBOO_PARTITION": "4"}, ("stages=2", "data=a #1: x.txt", "model='gpt'"), name="010")
    assert (resolved.job.partition, resolved.job.data, resolved.job.model, resolved.job.name) == (
        "4",
        "a #1: x.txt",
        "gpt",
        "010",
    )


def test_reserved_and_foreign_variables_are_left_alone() -> None:
    assert resolve(environment={"BAMBOO_ETCD": "127.0.0.1:2379", "bamboo_buildKey": "x", "PATH": "/"}).job == Job(
        device="cpu", elastic=True
    )


@looped(
    ("text", "message"),
    [
        ("stagse: 2", "job.yaml:1:1: stagse: expected a field of the job (did you mean 'stages'?)"),
        ("version: 2", "job.yaml:1:10: version: expected 1, found 2"),
        ("version: true", "job.yaml:1:10: version: expected 1, found true"),
        ("- a", "job.yaml:1:1: expected a mapping of fields, found a list"),
        ("stages: four", "job.yaml:1:9: stages: expected a whole number, found 'four'"),
        ("stages: '4'", "job.yaml:1:9: stages: expected a whole number, found '4' (remove the quotes)"),
        ("stages: true", "job.yaml:1:9: stages: expected a whole number, found true"),
        ("stages: 4.0", "job.yaml:1:9: stages: expected a whole number, found 4.0"),
        ("stages:", "job.yaml:1:8: stages: expected a whole number, found nothing"),
        ("stages: {a: 1}", "job.yaml:1:9: stages: expected a whole number, found a mapping"),
        ("stages: 0", "job.yaml:1:9: stages: expected a whole number >= 1, found 0"),
        ("stages: yes", "job.yaml:1:9: stages: expected a value that reads only one way, found 'yes' "
         "(write true or false, or quote it)"),
        ("lr: fast", "job.yaml:1:5: lr: expected a number, found 'fast'"),
        ("lr: .inf", "job.yaml:1:5: lr: expected a number, found inf"),
        ("lr: true", "job.yaml:1:5: lr: expected a number, found true"),
        ("name: 123", "job.yaml:1:7: name: expected text, found 123 (quote it)"),
        ("partition: [2, a]", "job.yaml:1:12: partition: expected text, found a list"),
        ("dtype: float23", "job.yaml:1:8: dtype: expected one of float32, bfloat16, float16, found 'float23' "
         "(did you mean 'float32'?)"),
        ("model_args: 3", "job.yaml:1:13: model_args: expected a mapping, found 3 (give each as model_args.NAME)"),
        ("model_args: {w: [1]}", "job.yaml:1:17: model_args.w: expected text, a number, true or false, found a list"),
        ("model_args: {w: .nan}", "job.yaml:1:17: model_args.w: expected text, a number, true or false, found nan"),
        (
            "model_args: {a b: 1}",
            "job.yaml:1:14: model_args.a b: expected an argument named with letters, digits and _, found 'a b'",
        ),
        ("a: b: c", "job.yaml:1:5: expected readable YAML (quote the value, which has a second ': ')"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_file_has_its_place_and_message(text: str, message: str) -> None:
    assert problems(text) == [message]


@looped(
    ("environment", "message"),
    [
        ({"BAMBOO_STAGE": "2"}, "BAMBOO_STAGE: expected a variable that bamboo knows (did you mean 'BAMBOO_STAGES'?)"),
        ({"BAMBOO_STAGES__X": "2"}, "BAMBOO_STAGES__X: expected a variable that bamboo knows "
         "(did you mean 'BAMBOO_STAGES'?)"),
        ({"BAMBOO_STAGES": "x"}, "BAMBOO_STAGES: stages: expected a whole number, found 'x'"),
        ({"BAMBOO_STAGES": ""}, "BAMBOO_STAGES: stages: expected a whole number, found nothing"),
        ({"BAMBOO_STAGES": "0"}, "BAMBOO_STAGES: stages: expected a whole number >= 1, found 0"),
        ({"BAMBOO_STAGES": "1:30"}, "BAMBOO_STAGES: stages: expected a value that reads only one way, found '1:30' "
         "(quote it: YAML 1.1 counts in sixties here)"),
        ({"BAMBOO_MODEL_ARGS": "x"}, "BAMBOO_MODEL_ARGS: model_args: expected a mapping, found 'x' "
         "(give each as model_args.NAME)"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_variable_names_it(environment: dict[str, str], message: str) -> None:
    assert problems(None, environment) == [message]


@looped(
    ("setting", "message"),
    [
        ("stages", "--set: expected FIELD=VALUE, found 'stages'"),
        ("stages=x", "--set stages=x: stages: expected a whole number, found 'x'"),
        (
            "stages=[1]",
            "--set stages=[1]: stages: expected one value, found a list (separate values by commas, without brackets)",
        ),
        ("stages=0", "--set stages=0: stages: expected a whole number >= 1, found 0"),
        ("stages.a=1", "--set stages.a=1: stages.a: expected a field of the job (did you mean 'stages'?)"),
        ("sead=1", "--set sead=1: sead: expected a field of the job (did you mean 'seed'?)"),
        (
            "model_args.=1",
            "--set model_args.=1: model_args.: expected an argument named with letters, digits and _, found ''",
        ),
        (
            "model_args.tied=no",
            "--set model_args.tied=no: model_args.tied: expected a value that reads only one way, found 'no' "
            "(write true or false, or quote it)",
        ),
    ],
)
def test_a_mistake_in_a_setting_repeats_it(setting: str, message: str) -> None:
    assert problems(None, None, (setting,)) == [message]


def test_a_mistake_in_a_flag_names_it() -> None:
    assert problems(microbatch_size="0", schedule="1fb1", steps="many") == [
        "--steps: expected a whole number, found 'many'",
        "--microbatch-size: expected a whole number >= 1, found 0",
        f"--schedule: expected one of {', '.join(sorted(SCHEDULES))}, found '1fb1' (did you mean '1f1b'?)",
    ]


def test_all_mistakes_of_all_layers_come_at_once_in_order() -> None:
    Path("bamboo.yaml").write_text("lr: fast\nstages: 3\nlr: 1\n")
    text = "steps: 0\nseed: x\nbogus: 1\nstages: 0\nthreads: 010\n"
    found = problems(text, {"BAMBOO_SEED": "-1"}, ("audit=-1",), threads="0")
    assert [line.split(": expected")[0] for line in found] == [
        "bamboo.yaml:1:5: lr",
        "bamboo.yaml:3:1: lr",
        "job.yaml:1:8: steps",
        "job.yaml:2:7: seed",
        "job.yaml:3:1: bogus",
        "job.yaml:4:9: stages",
        "job.yaml:5:10: threads",
        "BAMBOO_SEED: seed",
        "--set audit=-1: audit",
        "--threads",
    ]


def test_a_mistake_shows_even_where_a_higher_layer_hides_it() -> None:
    assert problems("stages: four", stages="4") == ["job.yaml:1:9: stages: expected a whole number, found 'four'"]


def test_a_missing_job_file_is_reported_beside_the_rest() -> None:
    with pytest.raises(UserError) as caught:
        resolve_job(Path("none.yaml"), {}, ["x"])
    assert [str(problem) for problem in caught.value.problems] == [
        "none.yaml: expected a file that can be read, found No such file or directory",
        "--set: expected FIELD=VALUE, found 'x'",
    ]
