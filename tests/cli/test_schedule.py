"""`bamboo schedule`: the table of schedules, and the exports."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from bamboo_cli.schedule import schedule
from engine.core.errors import UserError
from engine.core.job.job_rules import check_schedule
from engine.core.ownership import Grid, directions_of, fresh
from engine.core.program.build import build_program
from engine.core.program.schedules import SCHEDULES


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def said(*arguments: str) -> Result:
    return CliRunner().invoke(schedule, arguments, catch_exceptions=False)


def test_schedules_are_compared_for_any_number_of_stages_per_worker() -> None:
    Path("job.yaml").write_text("schedule: zbv\nstages: 8\nstages_per_worker: 4\n")
    found = json.loads(said("compare", "job.yaml", "--json").stdout)
    assert [row["stages_per_worker"] for row in found["rows"]] == [1, 1, 1, 4, 4, 4, 4, 4, 1, 1]
    assert {"zbv", "dualpipev"} <= {*found["skipped"]}
    assert {*found["skipped"]} | {row["schedule"] for row in found["rows"]} == {*SCHEDULES}
    table = said("compare", "job.yaml").stdout
    assert re.search("zbv +not compared: stages_per_worker: expected 2", table)
    assert "over none" not in table


def test_a_comparison_that_takes_long_says_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    small = said("compare", "--json")
    assert small.stderr == ""
    monkeypatch.setattr("bamboo_cli.schedule._SLOW", 0)
    large = said("compare", "--json")
    names = [row["schedule"] for row in json.loads(large.stdout)["rows"]]
    assert large.stderr.splitlines() == [f"comparing {name}" for name in names]
    assert large.stdout == small.stdout


def test_costs_change_the_table_and_must_make_sense() -> None:
    table = said("compare", "--forward", "2", "--backward", "5", "--weights", "1", "--redundancy", "eager").stdout
    assert "forward 2, backward 5, of which 1 for the weights" in table
    assert "over none" in table
    (line,) = [line for line in table.splitlines() if line.startswith("gpipe")]
    assert line.split()[3:5] == ["77", "1.375"]
    with pytest.raises(UserError) as caught:
        said("compare", "--forward", "0", "--backward", "inf")
    assert [each.field for each in caught.value.problems] == ["--forward", "--backward"]
    with pytest.raises(UserError, match="--transfer: expected a finite number >= 0, found -1"):
        said("compare", "--transfer", "-1")
    with pytest.raises(UserError, match=r"--weights: expected a number from 0 to the whole backward's 2, found 3"):
        said("compare", "--weights", "3")


def test_a_transfer_takes_time() -> None:
    assert "transfer takes" not in said("compare").stdout
    table = said("compare", "--transfer", "0.5").stdout
    assert "for the weights; a transfer takes 0.5" in table
    lengths = {line.split()[0]: line.split()[3] for line in table.splitlines() if " loop " in line}
    assert (lengths["1f1b"], lengths["eager-1f1b"]) == ("41", "36")


@pytest.mark.parametrize("redundancy", ["none", "eager"])
def test_compute_actions_alone_can_be_read_again(redundancy: str) -> None:
    done = said("export", "--compute-only", "--redundancy", redundancy)
    assert done.stderr == ""
    assert check_schedule(done.stdout, 4, 1, 8, "auto") == []


def test_a_whole_program_comes_with_a_word_on_who_cannot_read_it() -> None:
    assert "--schedule FILE.csv read --compute-only" in said("export").stderr
    assert "of one pipeline" in said("export", "--compute-only", "--pipelines", "2").stderr
    Path("whole.csv").write_text(said("export").stdout)
    with pytest.raises(UserError, match="export --compute-only leaves them out"):
        said("check", "--schedule", "whole.csv")
    assert said("check", "--program", "whole.csv").exit_code == 0


@pytest.mark.parametrize("name", [name for name in SCHEDULES if directions_of(name) == 1])
def test_what_is_exported_of_a_schedule_is_that_schedule(name: str) -> None:
    v = 2 if SCHEDULES[name].takes(2) else 1
    text = said("export", "--compute-only", "--schedule", name, "--stages", str(4 * v), "--stages-per-worker", str(v))
    ownership = fresh(Grid(4 * v, 8), v, SCHEDULES[name].placement)
    assert build_program(text.stdout, ownership) == build_program(name, ownership)


def test_a_broken_program_is_shown_where_it_breaks() -> None:
    Path("whole.csv").write_text(said("export", "--redundancy", "none").stdout.replace("0RECV_B0,0B0", "0B0,0RECV_B0"))
    done = said("check", "--redundancy", "none", "--program", "whole.csv")
    assert done.exit_code == 1
    assert "0B0: stands before 0RECV_B0, which it requires" in done.stdout
    assert ">0B0<" in done.stdout


def test_slices_are_counted_in_a_comparison_and_in_a_search() -> None:
    table = said("compare", "--slices", "2").stdout
    assert "microbatches of 2 slices; forward 1" in table and "a worker's layers and 1/2 of a microbatch" in table
    assert re.search("dualpipe +not compared: slices: expected 1", table)
    shape = ("--stages", "4", "--microbatches", "6", "--slices", "2")
    said_so = said("search", *shape, "--memory", "2.5", "--output", "sliced.csv").stdout
    assert (
        "next: bamboo run --schedule sliced.csv --stages 4 --stages-per-worker 1 --microbatches 6 --slices 2" in said_so
    )
    assert re.search("1f1b +loop +22.5 +[0-9.]+ +2.5\n", said_so), "halves of 3 (6 + 3 / 2) and of P + 1 slices"
    assert said("check", "--schedule", "sliced.csv", *shape).exit_code == 0


def test_a_schedule_is_searched_written_and_runs() -> None:
    shape = ("--stages", "4", "--microbatches", "6")
    said_so = said("search", *shape, "--forward", "2", "--backward", "5", "--memory", "3", "--output", "mine.csv")
    assert re.search("found +loop +[0-9.]+ +1.[0-9]+ +3", said_so.stdout)
    assert re.search("gpipe .* over the limit", said_so.stdout)
    assert "next: bamboo run --schedule mine.csv --stages 4" in said_so.stdout
    assert said("check", "--schedule", "mine.csv", *shape).exit_code == 0
    found = json.loads(said("search", *shape, "--memory", "3", "--json").stdout)
    assert found["rows"][0].keys() == {"schedule", "placement", "length", "stash", "fits", "offloaded"}
    with pytest.raises(UserError, match="--memory: expected a number >= 1"):
        said("search", "--memory", "0.5")
