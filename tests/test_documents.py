"""The documents are true where a test can tell: paths and links exist, the program knows their commands and options."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bamboo_cli.app import COMMANDS, app, load
from engine.core.errors import ExitCode
from engine.core.program.schedules import SCHEDULES
from engine.files.jobs.job_value import FIELD_HELP
from engine.models.model_registry import DATA, MODELS
from engine.runtime.faults.registry import kinds
from tests.cli.interface import interface
from tests.house_rules import banned

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"
DOCUMENTS = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("docs/how-to/*.md"),
        *REFERENCE.glob("*.md"),
        ROOT / "results/README.md",
    )
}
MOST_LINES = {
    "README.md": 90,
    "ARCHITECTURE.md": 165,
    "docs/bits.md": 155,
    "docs/data.md": 215,
    "docs/elastic.md": 205,
    "docs/faults.md": 235,
    "docs/first-run.md": 155,
    "docs/hosts.md": 215,
    "docs/how-to/any-job.md": 175,
    "docs/optimizers-and-schedules.md": 165,
    "docs/operations.md": 205,
    "docs/own-model.md": 265,
    "docs/python.md": 270,
}  # the others: 150
CODE = re.compile(r"```.*?```|(?:^ {4}[^\n]*\n?)+|`[^`\n]+`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([\w-]+))?\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
PLACE = re.compile(r"(?<![\w./-])(?:engine|bamboo_cli|tests|docs|scenarios|results)/[\w./-]*[\w-]|\b[\w-]+\.md\b")
DOTTED = re.compile(r"\b(?:engine|bamboo_cli)(?:\.\w+)+\b")
NOT_YET = re.compile(
    r"results/(?:20|latest|runs|external)|scenarios/(?:first|matrix)\.yaml"
)  # made by the commands that a page shows

HISTORY = "CHANGELOG.md"  # tells of words and places that have gone
BLOCK = re.compile(r"^(?: {4}|\$ )((?:\.venv/bin/)?(?:bamboo|pytest|make) .*)$", re.MULTILINE)
INLINE = re.compile(r"`((?:bamboo|pytest|make) [^`]+)`")
REDIRECTION = re.compile(r" > [\w.]+\s*$")
QUESTION = re.compile(r"^\| \.\.\. (.+\?) \| (.+) \|$", re.MULTILINE)
CODE_ROW = re.compile(r"^\| (\d+) \| ([A-Z_]+|-) \|", re.MULTILINE)


def missing_places(documents: Mapping[str, str]) -> list[str]:
    """Returns each link and each path in code that leads to nothing."""
    found = []
    for name, text in documents.items():
        links = [((ROOT / name).parent / path, path) for path, _ in LINK.findall(text) if "://" not in path]
        found += [
            f"{name}: {path}#{anchor}"
            for path, anchor in LINK.findall(text)
            if anchor and anchor not in _anchors((ROOT / name).parent / path if path else ROOT / name)
        ]
        places = [
            ((ROOT if "/" in each or (ROOT / each).exists() else (ROOT / name).parent) / each, each)
            for code in CODE.findall(text)
            for each in PLACE.findall(code)
            if name != HISTORY and not NOT_YET.match(each)
        ]
        found += [f"{name}: {each}" for path, each in links + places if not path.exists()]
        names = {each for code in CODE.findall(text) for each in DOTTED.findall(code)} if name != HISTORY else set()
        found += [f"{name}: {each}" for each in sorted(names) if not _is_defined(each)]
    return found


def _anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub makes them."""
    headings = HEADING.findall(page.read_text(encoding="utf-8")) if page.is_file() else []
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _is_defined(name: str) -> bool:
    """Returns whether a dotted name is that of a package, of a module, or of a definition in a module."""
    path, _, last = name.replace(".", "/").rpartition("/")
    module = ROOT / f"{path}.py"
    is_defined = module.exists() and re.search(
        rf"^(?:class|def) {last}\b|^{last}\b.* = ", module.read_text(), re.MULTILINE
    )
    return (ROOT / path / last).is_dir() or (ROOT / path / f"{last}.py").exists() or bool(is_defined)


def commands_of(text: str) -> Iterator[list[str]]:
    """Yields the words of each command that a document shows."""
    for line in (*BLOCK.findall(text), *INLINE.findall(text)):
        yield shlex.split(REDIRECTION.sub("", re.split("  #| \\| ", line)[0]).removeprefix(".venv/bin/"))


def broken_commands(documents: Mapping[str, str]) -> list[str]:
    """Returns each command, option, test file and make target that does not exist."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    found = []
    for name, text in documents.items():
        for program, *words in commands_of(text):
            if program == "bamboo":
                bad = _unknown(words)
            elif program == "make":
                bad = [each for each in words if "=" not in each and each not in targets]
            else:
                bad = [each for each in words if not each.startswith("-") and not (ROOT / each).exists()]
            found += [f"{name}: {program} {' '.join(words)}: {each}" for each in bad]
    return found


def _unknown(words: list[str]) -> list[str]:
    options = {"--version", "--help", "--install-completion"}
    command: Any = None
    if words and not words[0].startswith("-"):
        if words[0] not in COMMANDS:
            return [words[0]]
        command, words = load(words[0]), words[1:]
        if hasattr(command, "commands") and words and not words[0].startswith("-"):
            if words[0] not in command.commands:
                return [words[0]]
            command, words = command.commands[words[0]], words[1:]
        options = {"--help", *(option for each in command.params for option in (*each.opts, *each.secondary_opts))}
    own = words[: words.index("--")] if "--" in words else words  # behind it is a command of others
    return [each for each in own if each.startswith("-") and each.partition("=")[0] not in options]


def broken_codes(table: str) -> list[str]:
    """Returns each exit code of the program that a table lacks or names otherwise, and each that it invents."""
    rows = {(int(code), name) for code, name in CODE_ROW.findall(table)}
    known = {(int(each), each.name) for each in ExitCode}
    return [f"{code} {name}" for code, name in sorted(rows ^ known)]


def test_links_and_paths_lead_somewhere() -> None:
    assert missing_places(DOCUMENTS) == []


def test_links_of_the_examples_lead_somewhere() -> None:
    page = ROOT / "docs" / "examples" / "README.md"
    links = LINK.findall(page.read_text(encoding="utf-8"))
    assert [path for path, _ in links if not (page.parent / path).exists()] == []


@pytest.mark.parametrize(
    "text",
    [
        "[x](gone.md)",
        "[x](data.md#gone)",
        "[x](#gone)",
        "`engine/core/gone.py`",
        "```\ntests/gone/\n```",
        "`docs/gone.md`",
        "`engine.core.errors.Gone`",
    ],
)
def test_a_place_that_is_gone_is_found(text: str) -> None:
    assert len(missing_places({"docs/planted.md": text})) == 1


def test_commands_exist() -> None:
    assert broken_commands(DOCUMENTS) == []
    assert sum(len(list(commands_of(text))) for text in DOCUMENTS.values()) > 60


@pytest.mark.parametrize(
    "text",
    [
        "    bamboo run --gone 3\n",
        "    bamboo gone\n",
        "`bamboo schedule gone`",
        "$ bamboo schedule show --gone\n",
        "    make gone\n",
        "`pytest tests/gone.py`",
    ],
)
def test_a_command_that_is_gone_is_found(text: str) -> None:
    assert len(broken_commands({"docs/planted.md": text})) == 1


def test_the_page_of_exit_codes_has_them_all() -> None:
    assert broken_codes(DOCUMENTS["docs/reference/exit-codes.md"]) == []


def test_a_code_that_is_missing_or_invented_is_found() -> None:
    table = DOCUMENTS["docs/reference/exit-codes.md"]
    assert broken_codes(table.replace("| 80 | STATE_LOST |", "| 80 | LOST |")) == ["80 LOST", "80 STATE_LOST"]
    assert broken_codes(table + "| 99 | NEW | now | - |\n") == ["99 NEW"]


def test_documents_are_short() -> None:
    pages = {name: text for name, text in DOCUMENTS.items() if not name.startswith("docs/reference/")}
    assert [name for name, text in pages.items() if len(text.splitlines()) > MOST_LINES.get(name, 150)] == []


def test_pages_and_help_texts_are_idiomatic() -> None:
    pages = {name: CODE.sub("", text) for name, text in DOCUMENTS.items() if not name.startswith("docs/reference/rec")}
    helps = {line.partition("(")[0].strip(): line for line in interface().splitlines() if not line.startswith("record")}
    commands = {name: load(name).help or "" for name in COMMANDS}
    assert banned(pages | helps | commands | FIELD_HELP | COMMANDS) == []


@pytest.mark.parametrize(
    "text",
    [
        "A worker that hangs is put out.",
        "What keeps notices away is said once.",
        "A mistake is told at once.",
        "The run says at once what it makes of the time left.",
        "It goes on with a run.",
        "ten times its slowest action of late",
        "The fields stand in that module.",
        "Of an input whose answer is missing none was.",
        "Who has that certificate and sends nothing is lost.",
        "The set is compared in the place of the processor.",
    ],
)
def test_a_banned_construction_is_found(text: str) -> None:
    assert len(banned({"planted": text})) == 1
    assert banned({"planted": "What is tested: see the evidence. A hung worker is evicted. Where next?"}) == []


def test_the_models_and_data_of_a_page_can_be_built() -> None:
    from torch import nn

    from engine.core.job.job import Job
    from engine.models.data import Data
    from engine.models.data_sources import bound, given_sets
    from engine.models.layers import Model
    from engine.models.losses import loss_of, metrics_of

    names: dict[str, Any] = {}
    pages = DOCUMENTS["docs/own-model.md"] + DOCUMENTS["docs/data.md"]
    for block in re.findall(r"```python\n(.*?)```", pages, re.DOTALL):
        exec(block, names)  # noqa: S102
    data, model = names["Sums"](seed=3), names["small"](width=8)
    assert isinstance(data, Data) and isinstance(model, nn.Sequential)
    batch = data.microbatch(0, 0, 1, 4)
    outputs = model(batch.inputs[0]).detach()
    assert (*batch.inputs[0].shape, *outputs.shape) == (4, 32, *batch.targets[0].shape)
    finite = bound(names["finite"](seed=3), Job()).microbatch(0, 0, 1, 4)
    assert [each.shape for each in finite.inputs + finite.targets] == [
        each.shape for each in batch.inputs + batch.targets
    ]
    classifier, source = names["classifier"](), given_sets(names["three"]())
    assert source is not None
    (images,), labels = (
        (sets := bound(source, Job())).microbatch(0, 0, 0, 4).inputs,
        sets.microbatch(0, 0, 0, 4).targets,
    )
    assert (sets.facts.task, 0 <= names["top3"]((classifier(images),), labels) <= 1) == ("classify", True)
    own = names["own_loss"]()
    assert isinstance(own, Model)
    assert loss_of(own, (outputs,), batch.targets).isfinite()
    (metric,) = metrics_of(own, (outputs,), batch.targets).values()
    assert metric == (outputs - batch.targets[0]).abs().max().item()


def test_programs_of_pages_use_names_that_exist() -> None:
    from engine import TrainingRun
    from engine.observers.loggers import Logger, RecoveryDone, StepDone

    page = DOCUMENTS["docs/python.md"].partition("## From a torchrun script")[0]
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len([compile(each, "page", "exec") for each in blocks]) == 3
    own = {*dir(TrainingRun), "folder"}
    assert set(re.findall(r"\brun\.(\w+)", page)) <= own | {"json"}
    shown = {*re.findall(r"def (\w+)\(self, done", blocks[-1])}
    assert shown and shown <= {*dir(Logger)}
    fields = {
        *StepDone.__dataclass_fields__,
        *RecoveryDone.__dataclass_fields__,
        "name",
        "metrics",
        "outcome",
        "uncovered",
    }
    assert {*re.findall(r"(?:done|recovery)\.(\w+)", blocks[-1])} <= fields


def test_each_of_twenty_questions_has_an_answer_of_at_most_three_files() -> None:
    questions = QUESTION.findall(DOCUMENTS["CONTRIBUTING.md"])
    answers = [re.findall(r"`([\w/]+\.py)`", answer) for _, answer in questions]
    assert len({question for question, _ in questions}) == 20
    assert [each for each in answers if not 1 <= len(each) <= 3] == []


def test_the_modules_to_read_first_are_short() -> None:
    shown = DOCUMENTS["ARCHITECTURE.md"].partition("## Read these first")[2].partition("\n## ")[0]
    paths = re.findall(r"^\d\. `([\w/]+\.py)`", shown, re.MULTILINE)
    assert 6 <= len(paths) <= 8
    assert sum(len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in paths) <= 1500


def test_pages_name_every_model_source_schedule_and_kind_of_fault() -> None:
    models = DOCUMENTS["docs/own-model.md"] + DOCUMENTS["docs/data.md"]
    faults = DOCUMENTS["docs/faults.md"]
    schedules = DOCUMENTS["docs/optimizers-and-schedules.md"].partition("## Pipeline schedules")[2]
    assert [name for name in (*MODELS, *DATA) if f"`{name}`" not in models] == []
    assert [name for name in SCHEDULES if f"`{name}`" not in schedules.partition("### A schedule of your own")[0]] == []
    assert [name for name in kinds() if f"`{name}`" not in faults] == []


def test_the_shown_program_is_the_one_that_the_command_prints() -> None:
    (arguments, shown) = re.findall(
        r"^\$ bamboo (run --dry-run .*)\n(.*?)^\.\.\.\n```", DOCUMENTS["README.md"], re.DOTALL | re.M
    )[0]
    assert CliRunner().invoke(app, arguments.split()).stdout.startswith(shown)
