"""`bamboo inject --hosts`: the mistakes that are told before a host is made, all of them at once; its plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from bamboo_cli.inject import inject
from bamboo_cli.matrix import matrix
from bamboo_cli.validate import validate
from engine.core.errors import EnvironmentLacksError, UserError

APP = typer.Typer()
for command in (inject, matrix, validate):
    APP.command()(command)
JOB = "job: {model: mlp, stages: 4, steps: 8, checkpoint_every: 0}\n"
FAULTS = "faults:\n  - {at: {step: 3}, do: power-off}\n"
BEFORE = "host_faults:\n  - {at: {step: 3}, do: power-off}\n"


@pytest.fixture(name="folder", autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*arguments: str) -> Result:
    return CliRunner().invoke(APP, [*arguments])


def fields(*arguments: str, text: str = JOB + FAULTS) -> list[str]:
    """Returns the fields of the mistakes of a command line about a scenario, which is refused; nothing is made."""
    Path("s.yaml").write_text("version: 1\nname: x\nabout: z\n" + text)
    result = call(*arguments)
    assert isinstance(result.exception, UserError), result.output
    assert [each.name for each in Path().iterdir()] == ["s.yaml"]
    return [each.field for each in result.exception.problems]


def test_a_fault_of_a_host_needs_hosts() -> None:
    for line in (("inject", "s.yaml"), ("inject", "s.yaml", "--run", "latest"), ("matrix", "s.yaml")):
        assert fields(*line) == ["faults"]
    assert fields("inject", "s.yaml", "--dry-run") == ["faults"]
    assert fields("inject", "s.yaml", "--dry-run", text=JOB + BEFORE) == ["host_faults"]


def test_all_mistakes_come_at_once() -> None:
    line = ["inject", "s.yaml", "--hosts", "2", "--lease", "1", "--etcd", "127.0.0.1:2379", "--tee"]
    flags = ["--hosts", "--lease", "--etcd", "--tee"]
    wrong = "faults:\n  - {at: {step: 9}, do: power-off, target: {host: h7}}\n  - {at: {step: 0}, do: power-of}\n"
    wrong += "  - {at: {step: 1}, do: kill-coordinator, target: {host: h1}}\n  - {at: {step: 1}, do: kill-worker}\n"
    assert fields(*line, text=JOB + wrong) == [
        *("faults.0.at.step", "faults.0.target.host", "faults.1.do"),
        *("faults.2.do", "faults.2.target", "faults.3.target", *flags),
    ]
    wrong = "host_faults:\n  - {at: {step: 9}, do: power-off, host: h7}\n  - {at: {step: 0}, do: power-of}\n"
    wrong += "  - {at: {step: 1}, do: kill-agent, worker: 1}\n  - {at: {step: 1}, do: kill-worker}\n"
    assert fields(*line, text=JOB + wrong) == [
        *("host_faults.0.at.step", "host_faults.0.host", "host_faults.1.do"),
        *("host_faults.2.do", "host_faults.2.worker", "host_faults.3.worker", *flags),
    ]


def test_the_job_must_be_one_for_several_hosts() -> None:
    job = "job: {model: mlp, stages: 2, steps: 8, checkpoint_every: 1}\n"
    assert fields("inject", "s.yaml", "--hosts", "3", text=job + FAULTS) == ["--hosts", "checkpoints"]


def test_faults_of_workers_and_of_hosts_are_two_things() -> None:
    both = BEFORE + "faults: [{at: {step: 1, stage: 1}, do: kill}]\n"
    assert fields("inject", "s.yaml", "--hosts", "3", text=JOB + both) == ["faults"]
    assert fields("inject", "s.yaml", "--hosts", "3", text=JOB + both.removeprefix(BEFORE)) == ["faults"]


def test_a_mistake_has_its_line() -> None:
    Path("s.yaml").write_text("version: 1\nname: x\nabout: z\n" + JOB + FAULTS.replace("3", "99"))
    result = call("validate", "s.yaml")
    assert result.exit_code == 2
    assert "s.yaml:6:17: faults.0.at.step: expected a step from 1 to 7, found 99" in result.stderr
    Path("s.yaml").write_text("version: 1\nname: x\nabout: z\n" + JOB + BEFORE.replace("3", "99"))
    told = "s.yaml:6:17: host_faults.0.at.step: expected a step from 1 to 7, found 99"
    assert told in call("validate", "s.yaml").stderr


def test_the_plan_names_each_fault() -> None:
    Path("s.yaml").write_text("version: 1\nname: x\nabout: z\n" + JOB + FAULTS)
    line = "fault-1: power-off other in step 3"
    assert call("inject", "s.yaml", "--hosts", "3", "--dry-run").stdout.splitlines()[1:] == [line]
    told = json.loads(call("inject", "s.yaml", "--hosts", "3", "--dry-run", "--json").stdout)
    (fault,) = told["faults"]
    assert (fault["id"], fault["do"], fault["text"]) == ("fault-1", "power-off", line)
    assert (fault["moment"], fault["victims"]) == ({"step": 3, "delay_ns": 0}, [{"host": "other"}])
    assert "1 fault, expects recovered" in call("validate", "s.yaml").stdout


def test_without_namespaces_nothing_is_made_and_the_reason_is_that_of_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.harness.testbed.hosts_error", lambda: "no ip (iproute2 has it)")
    result = call("inject", "host-loss", "--hosts", "3")
    assert isinstance(result.exception, EnvironmentLacksError) and result.exception.exit_code == 4
    assert "no hosts of namespaces: no ip (iproute2 has it)" in str(result.exception)
    assert [*Path().iterdir()] == []
