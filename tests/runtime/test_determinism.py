"""What is set before the model is built, what a layer may not do then, and the names of operations without a form."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.core.checks.determinism import settings_of
from engine.core.errors import UserError
from engine.core.job.job import Job
from engine.models import model_loader
from engine.models.layers import Model
from engine.models.losses import default_loss
from engine.runtime.agent import session
from engine.runtime.device import device as determinism
from engine.runtime.device.device import WithoutForm, changed, set_up
from engine.runtime.worker import worker
from tests.doubles.fake_gpu import fake_gpu
from tests.looped import looped
from tests.runtime.impure_layers import Linear, between
from tests.runtime.small_jobs import WIDTH
from tests.runtime.test_pure_check import check_of, run
from tests.runtime.thread_runs import run_in_threads

TINY: dict[str, Any] = {"model": "mlp", "stages": 2, "steps": 1, "microbatches": 2}
OURS = "tests.runtime.test_determinism:"
ON_GPUS = settings_of(Job(device="cuda"))


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Begins with torch as it is imported, and ends with it."""
    before = {each.name: determinism._value(each) for each in ON_GPUS}
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    yield
    for each in ON_GPUS:
        if each.name.startswith("torch."):
            set_up([each._replace(value=before[each.name])])  # type: ignore[arg-type]


class Putting(Linear):
    """Uses an operation that has no deterministic form on any device."""

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x).clone()
        return made.put_(torch.tensor([0, 0], device=x.device), made.detach()[0, :2].clone())


class Unwritten(nn.Module):
    """Reads memory that it has not written; so much that the system gives zeros each time."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.new_empty(12_000_000)[:WIDTH]


def putting() -> Model:
    return between(Putting)


def careless() -> Model:
    torch.set_deterministic_debug_mode("warn")
    return Model((nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)), default_loss)  # type: ignore[arg-type]


def problems(ending: Any) -> list[str]:
    assert isinstance(ending.error, UserError), ending.error
    return [str(each) for each in ending.error.problems]


def test_each_operation_without_a_deterministic_form_is_named_with_its_layer() -> None:
    ending = run_in_threads(Job(**{**TINY, "model": f"{OURS}putting", "data": "synthetic"}))
    named = problems(ending)
    assert [each.partition(" (--no-deterministic")[0] for each in named] == [
        f"model: expected operations with a deterministic form, found layer {layer}: put_"
        for layer in ("1 (one)", "2 (other)")[: len(named)]
    ]
    assert named


def test_such_an_operation_trains_where_the_job_is_not_deterministic() -> None:
    ending = run_in_threads(Job(**{**TINY, "model": f"{OURS}putting", "data": "synthetic", "deterministic": False}))
    assert (ending.outcome, ending.error) == ("finished", None)
    assert not torch.are_deterministic_algorithms_enabled()


def test_without_the_trial_the_operation_itself_raises() -> None:
    ending = run_in_threads(Job(**{**TINY, "model": f"{OURS}putting", "data": "synthetic", "check_pure": False}))
    assert "put_ does not have a deterministic implementation" in str(ending.error)


def test_both_layers_of_a_worker_are_named_at_once() -> None:
    set_up(settings_of(Job()))
    with WithoutForm():
        check = check_of(between(Putting))
    with pytest.raises(UserError) as caught:
        run(check)
    assert [each.found for each in caught.value.problems] == ["layer 1 (one): put_", "layer 2 (other): put_"]


def test_other_errors_pass_and_the_demand_holds_again_afterwards() -> None:
    set_up(settings_of(Job()))
    x, index = torch.zeros(3), torch.tensor([1])
    with WithoutForm() as mode:
        x.put_(index, torch.ones(1))
        x.put_(index, torch.ones(1))
        with pytest.raises(RuntimeError, match="size"):
            torch.ones(2) + torch.ones(3)
    assert mode.found == ["put_"]
    with pytest.raises(RuntimeError, match="put_"):
        x.put_(index, torch.ones(1))


def test_a_layer_that_reads_memory_it_has_not_written_is_refused() -> None:
    set_up(settings_of(Job()))
    with pytest.raises(UserError) as caught:
        run(check_of(between(Unwritten)))
    assert ["in a copy that has not run the forwards before it" in each.found for each in caught.value.problems] == [
        True,
        True,
    ]
    run(check_of(between(Unwritten), deterministic=False))  # zeros by luck: nothing else tells


def test_code_that_changes_a_setting_is_refused() -> None:
    ending = run_in_threads(Job(**{**TINY, "model": f"{OURS}careless", "data": "synthetic"}))
    (told,) = problems(ending)
    assert told.startswith("deterministic: expected torch.set_deterministic_debug_mode as 2, found 1")


@looped("setting", [each for each in ON_GPUS if not each.may_change])
def test_each_change_of_a_setting_is_seen(setting: Any) -> None:
    set_up(ON_GPUS)
    assert changed(ON_GPUS) == []
    other = ":16:8" if isinstance(setting.value, str) else not setting.value
    set_up([setting._replace(value=other)])
    assert [each.expected for each in changed(ON_GPUS)] == [f"{setting.name} as {setting.value!r}"]


def test_all_is_set_before_cuda_starts_and_before_the_model_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found when each began: nothing that differs from the list."""
    found: dict[str, list[list[Any]]] = {"cuda": [], "model": []}

    def seen(what: str, then: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            found[what].append([each for each in ON_GPUS if determinism._value(each) != each.value])
            return then(*args, **options)

        return call

    torch.backends.cudnn.benchmark = True
    monkeypatch.setattr(session, "refuse_what_this_host_lacks", lambda job: None)
    monkeypatch.setattr(worker, "build_model", seen("model", model_loader.build_model))
    with fake_gpu():
        monkeypatch.setattr(torch.cuda, "device_count", seen("cuda", torch.cuda.device_count))
        ending = run_in_threads(Job(**TINY, device="cuda", share_gpu=True))
    assert (ending.outcome, ending.error) == ("finished", None)
    assert found == {"cuda": [[], []], "model": [[], []]}
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_the_users_code_may_read_what_older_names_tell() -> None:
    """Both raised behind the newer names of the same settings."""
    set_up(ON_GPUS)
    assert torch.backends.cudnn.allow_tf32 is False
    with torch.backends.cudnn.flags(enabled=False):
        pass


LEAN = """
import sys, torch
from engine.core.checks.determinism import settings_of
from engine.core.job.job import Job
from engine.runtime.device.device import WithoutForm, set_up
set_up(settings_of(Job(device="cuda")))
with WithoutForm() as mode:
    torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))
assert mode.found == ["put_"]
heavy = [each for each in ("torch._inductor", "torch._dynamo", "sympy") if each in sys.modules]
sys.exit(f"{heavy} imported" if heavy else 0)
"""


def test_a_worker_does_not_import_the_compiler_for_that() -> None:
    """It takes two seconds of a core and leaves a temporary folder."""
    ended = subprocess.run([sys.executable, "-c", LEAN], capture_output=True, text=True, timeout=100, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
