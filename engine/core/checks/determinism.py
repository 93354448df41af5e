"""What a worker sets before it builds the model, so that the same operations give the same bits each time.

Rules: this list is the only one. A worker applies it as it is (`engine/runtime/device/device.py`), and
`bamboo run --explain` prints it. It also names what no library promises, and what bamboo does about that.
"""

from __future__ import annotations

from typing import NamedTuple

from engine.core.errors import Problem
from engine.core.job.job import Job


class Setting(NamedTuple):
    """A variable of the environment, or a dotted name of torch: an attribute, or a function that takes the value.

    `read` returns the value that was set. `off` is that of a job that is not deterministic, None for any. If it
    `may_change`, the user's code may set another one: it changes no bit.
    """

    name: str
    value: str | int
    why: str
    read: str = ""
    off: int | None = None
    may_change: bool = False


DEMANDED = 2  # of torch's modes: an error
_EVERYWHERE = (
    Setting(
        "torch.set_deterministic_debug_mode",  # `use_deterministic_algorithms` also imports the compiler, for seconds
        DEMANDED,
        "2 is error: an operation without a deterministic form raises, in place of other bits",
        "torch.get_deterministic_debug_mode",
        off=0,
    ),
    Setting(
        "torch.utils.deterministic.fill_uninitialized_memory",
        False,
        "it would write each new tensor twice; the trial before training fills them instead, and finds who reads them",
        may_change=True,
    ),
)
_SDP = "torch.backends.cuda."
_ON_GPUS = (
    Setting("CUBLAS_WORKSPACE_CONFIG", ":4096:8", "read when CUDA starts; a sum else depends on other streams"),
    Setting("torch.backends.cudnn.benchmark", False, "the fastest kernel is another one each time"),
    Setting("torch.backends.cudnn.deterministic", True, "cuDNN has kernels with atomic sums"),
    Setting(
        "torch.backends.cudnn.allow_tf32",
        False,
        "the older name of the next ones, first: torch then allows to read it, and torch.backends.cudnn.flags(...)",
        may_change=True,
    ),
    Setting(
        "torch.backends.cuda.matmul.fp32_precision", "ieee", "no TF32, whatever the version's default", "", None, True
    ),
    Setting("torch.backends.cudnn.conv.fp32_precision", "ieee", "no TF32, which is the default here", "", None, True),
    Setting("torch.backends.cudnn.rnn.fp32_precision", "ieee", "no TF32, which is the default here", "", None, True),
    Setting(
        f"{_SDP}enable_cudnn_sdp",
        False,
        "its backward is not deterministic in large batches",
        f"{_SDP}cudnn_sdp_enabled",
    ),
    Setting(
        f"{_SDP}enable_mem_efficient_sdp",
        False,
        "fused attention is flash attention, else plain products: its choice depends on fewer things",
        f"{_SDP}mem_efficient_sdp_enabled",
    ),
)
# What no library promises, and what bamboo does about it.
_LIMITS = {
    "operations": "one without a deterministic form is named, with its layer, in the trial before step 0",
    "compiled code": "torch.compile may choose kernels by their time: set torch._inductor.config.deterministic with it",
    "kernels": "another kind of CPU or version of torch gives other bits: a resume compares them",
}
_LIMITS_ON_GPUS = {
    "libraries": "cuBLAS and cuDNN promise bits for one kind of GPU and one version: a resume compares them",
    "collectives": "their sums may depend on the ranks: bamboo sums point to point, in the order of the pipelines",
}


def settings_of(job: Job) -> tuple[Setting, ...]:
    """Returns what a worker of a job sets before it builds the model."""
    if not job.deterministic:
        return tuple(each._replace(value=each.off) for each in _EVERYWHERE if each.off is not None)
    return (*_EVERYWHERE, *(_ON_GPUS if job.device == "cuda" else ()))


def promises(job: Job) -> list[tuple[str, object, str]]:
    """Returns (name, value, reason) of each setting of a job, then a row for each thing that no library promises."""
    rows: list[tuple[str, object, str]] = [(each.name, each.value, each.why) for each in settings_of(job)]
    if job.deterministic:
        limits = _LIMITS | (_LIMITS_ON_GPUS if job.device == "cuda" else {})
        rows += [(f"not promised: {name}", None, text) for name, text in limits.items()]
    return rows


def without_form(layer: str, operation: str) -> Problem:
    """Returns the problem of an operation that has no deterministic form, in a layer of this name."""
    expected = "operations with a deterministic form"
    hint = "--no-deterministic lets it run; then no bits are promised, and no run is compared with a twin"
    return Problem("model", expected, f"{layer}: {operation}", hint)


def changed_setting(setting: Setting, value: object) -> Problem:
    """Returns the problem of a setting that the user's code has changed."""
    hint = "the code of the model or of the data has set it: leave it out, or train with --no-deterministic"
    return Problem("deterministic", f"{setting.name} as {setting.value!r}", repr(value), hint)
