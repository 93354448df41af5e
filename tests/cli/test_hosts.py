"""`bamboo agent --hosts`: the mistakes that are told before anything is asked of the store, all of them at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from bamboo_cli import agent as host_agent
from bamboo_cli.agent import agent, is_own_address, is_scenario, usual_address
from engine.core.errors import UserError

APP = typer.Typer()
APP.command()(agent)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(APP, [*arguments])


def problems(*arguments: str) -> list[str]:
    """Returns the fields of the mistakes of a command line, which is refused."""
    result = call(*arguments)
    assert isinstance(result.exception, UserError), result.output
    assert result.exception.exit_code == 2
    return [each.field for each in result.exception.problems]


def test_all_mistakes_come_at_once_and_nothing_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    line = ["--hosts", "9", "--node", "-", "--address", "192.0.2.1", "--workers", "-1", "--lease", "1"]
    line += ["--trusted-network", "nowhere"]
    assert problems(*line, "--set", "stages=2") == [
        "--hosts",
        "--run",
        "--lease",
        "--node",
        "--address",
        "--trusted-network",
        "--workers",
        "--hosts",
        "checkpoints",
    ]
    assert list(tmp_path.iterdir()) == []


def test_clear_text_to_etcd_needs_its_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = call("--hosts", "2", "--run", "1", "--etcd", "192.0.2.1:2379", "--address", "127.0.0.1").exception
    assert isinstance(found, UserError)
    assert [each.field for each in found.problems] == ["--etcd", "--address"]
    assert "--etcd-plain-http" in str(found)


def test_the_address_of_this_host_is_told_by_an_etcd_that_is_refused_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[str] = []

    def address_to(host: str) -> str:
        asked.append(host)
        return "127.0.0.1"

    monkeypatch.setattr(host_agent, "usual_address", address_to)
    call("--hosts", "2", "--run", "1", "--etcd", "192.0.2.1:2379,192.0.2.2:2379")
    assert asked == ["192.0.2.1"]


def test_a_run_and_hosts_to_join_are_two_things() -> None:
    assert problems("--hosts", "2", "--join", "latest") == ["--hosts"]
    assert problems() == ["--join"]


def test_an_address_is_of_this_host_if_a_socket_can_be_bound_to_it() -> None:
    assert is_own_address("127.0.0.7")
    assert not is_own_address("192.0.2.1")
    assert not is_own_address("nowhere")
    assert usual_address("127.0.0.1") == "127.0.0.1"
    assert usual_address("no.such.host.invalid") == "127.0.0.1"


def test_the_mistakes_in_kills_come_with_all_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    line = ["--hosts", "2", "--run", "1", "--address", "127.0.0.1", "--set", "stages=4"]
    assert problems(*line, "--kill", "3:9", "--kill", "x", "--grace", "never") == [
        "--kill",
        "--kill 3:9",
        "--grace",
        "--hosts",
    ]
    assert problems("--join", "latest", "--kill", "3:1") == ["--kill"]


def test_a_scenario_has_its_own_faults_and_a_job_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    line = ["--hosts", "2", "--run", "1", "--address", "127.0.0.1"]
    assert problems("kill-middle-stage", *line, "--kill", "3:1") == ["--kill", "--hosts"]
    (tmp_path / "wrong.yaml").write_text("version: 1\nname: w\nabout: w\njob: {stages: 0}\nfaults: []\nexpect: {}\n")
    assert "--hosts" in problems(str(tmp_path / "wrong.yaml"), *line)
    assert is_scenario(tmp_path / "wrong.yaml")
    (tmp_path / "job.yaml").write_text("stages: 2\n")
    assert not is_scenario(tmp_path / "job.yaml")
    assert not is_scenario(tmp_path / "none.yaml")
    assert is_scenario(Path("kill-middle-stage"))


def test_an_option_of_the_other_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    line = ["--hosts", "2", "--run", "1", "--address", "127.0.0.1", "--set", "stages=4", "--set", "checkpoint_every=0"]
    assert problems(*line, "--standby") == ["--standby", *problems(*line)]
    assert problems("--join", "latest", "--grace", "2s") == ["--grace"]
