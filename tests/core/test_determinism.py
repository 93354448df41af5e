"""The list of what a worker sets: each name once, with a reason; what a job without it sets; what is printed."""

from __future__ import annotations

from engine.core.checks.determinism import promises, settings_of
from engine.core.job.job import Job


def test_a_job_on_gpus_sets_all_that_one_on_the_cpu_sets_and_more() -> None:
    on_cpu, on_gpu = (settings_of(Job(device=device)) for device in ("cpu", "cuda"))
    assert on_gpu[: len(on_cpu)] == on_cpu != on_gpu
    assert len({each.name for each in on_gpu}) == len(on_gpu)
    assert all(each.why and not each.why.endswith(".") for each in on_gpu)


def test_a_job_that_is_not_deterministic_takes_back_what_others_have_set_in_its_process() -> None:
    assert [(each.name, each.value) for each in settings_of(Job(deterministic=False, device="cuda"))] == [
        ("torch.set_deterministic_debug_mode", 0)
    ]


def test_the_list_is_printed_with_what_no_library_promises() -> None:
    printed = [name for name, _, _ in promises(Job(device="cuda"))]
    assert printed[: len(settings_of(Job(device="cuda")))] == [each.name for each in settings_of(Job(device="cuda"))]
    assert [name for name in printed if name.startswith("not promised: ")] == [
        f"not promised: {name}" for name in ("operations", "compiled code", "kernels", "libraries", "collectives")
    ]
    assert len(promises(Job(deterministic=False))) == 1
