"""Faults of a device: what an operation meets is what torch raises on a GPU, and a worker that met it ends."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.core.checks.trajectory import trajectory_hash
from engine.core.errors import TransferFailedError
from engine.core.exclusion import in_words
from engine.core.faults.fault import Fault, Owner
from engine.core.faults.kill_text import kill_moment
from engine.core.job.job import Job
from engine.core.ownership import Grid
from engine.runtime.agent.run_state import Ending
from engine.runtime.device.copies import Copies
from engine.runtime.device.device import HOST, device_trouble, open_device
from engine.runtime.device.device_faults import DeviceTrouble
from engine.runtime.transport.direct_transport import GroupEnd
from engine.runtime.transport.transport import ProgramPurpose, program_key
from tests.doubles.fake_gpu import fake_gpu
from tests.looped import looped
from tests.runtime.thread_runs import run_in_threads

JOB = Job(model="mlp", steps=4, stages=3, microbatches=2, validate_every=0, hang_after="300ms")
KINDS = {
    "gpu-error": "GPU error, injected by fault 'gpu': invalid argument",
    "gpu-sticky": "GPU error, injected by fault 'gpu': device-side assert triggered",
    "gpu-oom": "GPU out of memory, injected by fault 'gpu': tried to allocate 1048576.00 GiB",
}


class Ended(Exception):
    """The worker is gone."""


def stands() -> None:
    raise Ended


class Struck:
    """A host whose faults strike in a block."""

    def __init__(self, trouble: DeviceTrouble, call: int = 0):
        self.told: list[str] = []
        self.trouble, self.call = trouble, call
        self.device = open_device("cpu", 0)

    def __enter__(self) -> Struck:
        given = ("f", self.trouble, self.device.place, self.call, self.told.append, stands)
        self.device.faults.strike(*given)
        return self

    def __exit__(self, *given: object) -> None:
        torch.utils._python_dispatch._pop_mode()


def trouble_of(act: Callable[[], object]) -> str:
    with pytest.raises(RuntimeError) as raised:
        act()
    return device_trouble(raised.value)


@pytest.mark.parametrize(
    ("trouble", "words"),
    [("error", "GPU error: invalid argument"), ("memory", "GPU out of memory: tried to allocate 1048576.00 GiB")],
)
def test_one_call_fails_and_those_behind_it_work(trouble: DeviceTrouble, words: str) -> None:
    x = torch.ones(3)
    with Struck(trouble, call=2):
        y = x + x + x
        assert trouble_of(lambda: y + x) == words
        assert (y + x).tolist() == [4.0] * 3


def test_a_sticky_error_meets_each_later_call_and_wait() -> None:
    x, words = torch.ones(3), "GPU error: device-side assert triggered"
    given, failed = list[Any](), list[Exception]()
    with Struck("sticky") as struck:
        y = x + x  # it has only started the kernel
        assert [trouble_of(lambda: y + x) for _ in range(2)] == [words] * 2
        assert trouble_of(struck.device.wait) == words
        struck.device.copies.when_fetched((x,), given.append, failed.append)
        assert (given, list(map(device_trouble, failed))) == ([], [words])


def test_a_kernel_that_does_not_end_lets_calls_return_and_holds_each_wait_and_message() -> None:
    x, given = torch.ones(3), list[Any]()
    with Struck("hang", call=1) as struck:
        copies = struck.device.copies
        struck.device.wait()
        copies.when_fetched((x,), given.append, unexpected)
        assert not copies.is_leaving and len(given) == 1 and not struck.told
        y = (x + x) * x + x
        assert struck.told == ["a kernel that does not end was started"]
        for wait in (struck.device.wait, lambda: y.sum().item()):
            with pytest.raises(Ended):
                wait()
        copies.when_fetched((y,), given.append, unexpected)
        assert copies.is_leaving and len(given) == 1


def unexpected(error: Exception) -> None:
    raise error


class Marks:
    """A watch that writes down what it is told."""

    def __init__(self) -> None:
        self.marks: list[str] = []

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        self.marks.append("in")
        yield
        self.marks.append("out")

    def wake(self) -> None:
        self.marks.append("left")


def test_a_wait_for_the_device_is_told_and_one_for_the_host_is_not() -> None:
    watch = Marks()
    open_device("cpu", 0, watch=watch).wait()
    assert not watch.marks
    with fake_gpu():
        gpu, given, over = open_device("cuda", 0, watch=watch), list[Any](), threading.Event()
        gpu.wait()
        assert watch.marks == ["in", "out"]
        gpu.copies.when_fetched(gpu.copies.fetched(gpu.put_all((torch.ones(1),))), given.append, unexpected)
        gpu.copies.when_fetched((), lambda nothing: over.set(), unexpected)
        assert over.wait(10)
    until_s = time.monotonic() + 10
    while gpu.copies.is_leaving and time.monotonic() < until_s:
        time.sleep(0.001)
    assert given[0][0].tolist() == [1.0]
    assert watch.marks[2:] in (["left"] * 2, ["left"]), "the last one is told behind its copy"


def test_a_gpu_is_named_while_it_has_not_ended_its_work() -> None:
    host = open_device("cpu", 0)
    assert (host.unfinished(), HOST.unfinished()) == ("", "")
    with Struck("hang") as struck:
        torch.ones(1)
        assert struck.device.unfinished() == "a played GPU"
    with fake_gpu() as gpu:
        device = open_device("cuda", 0)
        assert device.unfinished() == ""
        gpu.streams.busy_until_ns[0] = time.monotonic_ns() + 10**12
        assert device.unfinished() == "GPU 0 (the double of a GPU)"

        def lost() -> bool:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")

        stream: Any = SimpleNamespace(query=lost)
        assert replace(device, computing=stream).unfinished() == ""


def test_a_message_between_gpus_is_leaving_until_its_kernel_has_ended() -> None:
    """Else a worker whose kernel does not end would seem to wait for others, for ever."""
    begun, failed = list[str](), list[Exception]()
    with Struck("hang") as struck:
        torch.ones(1)
        struck.device.copies.when_computed(None, lambda: begun.append("host"), failed.append)
        assert (struck.device.copies.is_leaving, begun) == (True, [])
    with fake_gpu() as gpu:
        gpu.streams.busy_until_ns[0] = time.monotonic_ns() + 200_000_000
        copies = open_device("cuda", 0).copies
        event = torch.cuda.Event()
        event.record()
        copies.when_computed(event, lambda: begun.append("gpu"), failed.append)
        assert (copies.is_leaving, begun) == (True, ["gpu"])
        until_s = time.monotonic() + 10
        while copies.is_leaving and time.monotonic() < until_s:
            time.sleep(0.001)
        assert not copies.is_leaving and not failed


class OnGpu(GroupEnd):
    """The end of a group whose device has failed."""

    def __init__(self) -> None:
        cuts: Any = SimpleNamespace(waiter=SimpleNamespace(wake=lambda: None), back={})
        super().__init__(cuts, (0, 1), 1, open_device("cpu", 0))


def test_an_error_of_the_own_device_is_no_suspicion_of_the_other_end() -> None:
    end, broken = OnGpu(), torch.AcceleratorError("CUDA error: unspecified launch failure")
    end.fails_to(1, RuntimeError("Connection reset by peer"))
    assert [each.peer for each in (end.failed,) if isinstance(each, TransferFailedError)] == [1]
    end.fails_to(1, broken)
    assert end.failed == broken

    class Lost(Copies):
        def landed(self, tensors: Any) -> Any:
            raise broken

    end = OnGpu()
    end.device = replace(end.device, copies=Lost(), is_host=False)
    end.arrives(1, program_key(Grid(2, 1, 1), ProgramPurpose.LOG, 0, 0), (torch.ones(1),))
    assert end.failed is broken, "the thread that took the message in does not end without a word"


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


class Hostile(RuntimeError):
    """An exception of a user's whose text must not be asked for."""

    def __str__(self) -> str:
        raise AssertionError


@looped(
    ("error", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"), "2.00 GiB"),
        (torch.OutOfMemoryError("out"), "GPU out of memory: out"),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCompile"), "encountered"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling"), "GPU error: CUBLAS_STATUS"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), "GPU error: CUDNN_STATUS"),
        (RuntimeError("CUDA driver error: unknown error"), "GPU error: unknown error"),
        (caused(ValueError("no"), RuntimeError("CUDA error: invalid argument")), "GPU error: invalid argument"),
        (RuntimeError("CUDA error: " + "x" * 9000), "GPU error: xxx"),
        (RuntimeError("shapes differ; CUDA error: not so"), ""),
        (MemoryError("host"), ""),
        (Hostile("CUDA error: x"), ""),
    ],
)
def test_an_error_of_the_device_is_told_from_one_of_the_users_code(error: BaseException, words: str) -> None:
    trouble = device_trouble(error)
    assert words in trouble and bool(trouble) == bool(words)
    assert len(trouble) < 400


def faults(do: str, kill: str, call: int = 0) -> tuple[Fault, ...]:
    moment = kill_moment(kill, JOB)
    parameters: dict[str, Any] = {"call": call, "without_gpu": "double"}
    return (Fault("gpu", moment, (Owner(0, moment.action.stage),), do, parameters),)


def verdict_of(ending: Ending) -> str:
    return next(in_words(each.verdict) for each in ending.view.run_state.epochs if each.verdict)


@pytest.fixture(scope="module")
def expected() -> str:
    return trajectory_hash(run_in_threads(JOB).view.run_state.rows)


@pytest.mark.parametrize(("do", "kill"), [("gpu-error", "1:1:B:1"), ("gpu-sticky", "2:2:F:0"), ("gpu-oom", "1:0:F:1")])
def test_a_worker_ends_whose_device_failed_and_another_goes_on_with_the_same_bits(
    expected: str, do: str, kill: str
) -> None:
    ending = run_in_threads(JOB, faults(do, kill, call=1))
    assert (ending.outcome, ending.error) == ("finished", None)
    victim = ending.view.workers[int(kill.split(":")[1])]
    assert victim.state == "dead"
    assert KINDS[do] in verdict_of(ending)
    assert trajectory_hash(ending.view.run_state.rows) == expected


def test_two_gpus_that_fail_in_one_step_are_two_losses() -> None:
    """The second of the same errors in a step ended the run, as if it came from the user's code."""
    job = replace(JOB, stages=4)
    (fault,) = faults("gpu-error", "1:0:B:1")
    ending = run_in_threads(job, (replace(fault, victims=(Owner(0, 0), Owner(0, 2))),))
    assert (ending.outcome, ending.error) == ("finished", None)
    assert [worker.worker for worker in ending.view.workers if worker.state == "dead"] == [0, 2]
    assert trajectory_hash(ending.view.run_state.rows) == trajectory_hash(run_in_threads(job).view.run_state.rows)


@pytest.mark.parametrize("kill", ["1:0:F:1", "1:2:COMMIT"], ids=["a message", "the vote"])
def test_a_kernel_that_does_not_end_is_found_where_its_worker_waits(expected: str, kill: str) -> None:
    """It keeps a message for which others wait; or the norm of its gradients, which the vote needs."""
    ending = run_in_threads(JOB, faults("gpu-hang", kill))
    assert (ending.outcome, ending.error) == ("finished", None)
    assert ending.view.workers[int(kill.split(":")[1])].state == "dead"
    assert re.search(r"hangs in a kernel of a played GPU for .* s .*\(limit .* s\)", verdict_of(ending))
    assert trajectory_hash(ending.view.run_state.rows) == expected
