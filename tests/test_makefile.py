"""When `make` fills .venv and when it reuses it; stand-ins for Python and pip write down how they were called."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# `python -m venv --clear .venv` makes a .venv whose own python fails to install while a file named "broken" exists.
PYTHON = """#!/bin/sh
echo "venv $*" >> calls
rm -rf .venv && mkdir -p .venv/bin
cat > .venv/bin/python <<'END'
#!/bin/sh
case "$3" in
    install) echo "install $*" >> calls; test ! -e broken;;
    *) echo tests >> calls; test ! -e red || { rm red; false; };;
esac
END
printf '#!/bin/sh\\necho "demo $*" >> calls\\n' > .venv/bin/bamboo
chmod +x .venv/bin/python .venv/bin/bamboo
"""
TESTS = ["tests", "tests"]  # what does not look at the clock, then what does
VENV = "venv -m venv --clear .venv"
RUN, TEST = (
    f"install -m pip install --quiet --constraint constraints.txt --editable .[{x}]" for x in ("vision", "dev")
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree in a folder whose name holds a space, with what decides the contents of .venv."""
    tree = tmp_path / "a tree"
    tree.mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tree)
    (tree / "python").write_text(PYTHON)
    (tree / "python").chmod(0o755)
    return tree


def made(tree: Path, target: str) -> tuple[int, list[str]]:
    """Runs one target; returns the exit code and what was called. Variables of a surrounding make stay out."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    (tree / "calls").unlink(missing_ok=True)
    command = ["make", target, "PYTHON=./python"]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=60, check=False)
    return done.returncode, (tree / "calls").read_text().splitlines()


def make(tree: Path, target: str) -> list[str]:
    """Runs one target and returns what was called for it."""
    return made(tree, target)[1]


def test_the_second_time_nothing_is_installed(tree: Path) -> None:
    assert make(tree, "demo") == [VENV, RUN, "demo run"]
    assert make(tree, "demo") == ["demo run"]


def test_tests_add_to_what_the_demo_has_installed(tree: Path) -> None:
    make(tree, "demo")
    assert make(tree, "test") == [TEST, *TESTS]
    assert make(tree, "demo") == ["demo run"]
    assert make(tree, "test") == TESTS


def test_a_failure_is_told_and_does_not_keep_the_tests_that_look_at_the_clock_from_running(tree: Path) -> None:
    assert made(tree, "test") == (0, [VENV, TEST, *TESTS])
    (tree / "red").touch()  # it goes with the first failure
    assert made(tree, "test") == (2, TESTS)
    assert made(tree, "test") == (0, TESTS)


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_another_pinned_set_begins_afresh(tree: Path, name: str) -> None:
    make(tree, "test")
    with (tree / name).open("a") as file:
        file.write("# changed\n")
    assert make(tree, "test") == [VENV, TEST, *TESTS]


def test_a_copied_tree_begins_afresh(tree: Path) -> None:
    make(tree, "demo")
    copy = shutil.copytree(tree, tree.parent / "copy")
    assert make(copy, "demo") == [VENV, RUN, "demo run"]


@pytest.mark.parametrize("before", ["nothing", "demo"])
def test_an_installation_that_failed_is_begun_afresh(tree: Path, before: str) -> None:
    if before == "demo":
        make(tree, "demo")
    (tree / "broken").touch()
    assert make(tree, "test")[-1] == TEST
    (tree / "broken").unlink()
    assert make(tree, "test") == [VENV, TEST, *TESTS]
