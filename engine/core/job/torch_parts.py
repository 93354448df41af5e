"""The optimizers and schedules of torch that a job can name, with their arguments, as a table without torch.

Each schedule is a class of `torch.optim.lr_scheduler`; constant, linear and cosine are bamboo's own
(`engine/core/job/torch_parts.py`). An argument without a default is required. Lists are written as ``0.9,0.999``.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from engine.core.errors import Problem, nearest
from engine.core.job.job import Job
from engine.core.units import MOST_FLOAT, Args, Scalar

ArgumentForm = Literal["number", "amount", "share", "whole", "count", "flag", "numbers", "wholes", "text"]
_NUMBER = r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"
_NUMBERS = re.compile(rf"\s*{_NUMBER}\s*(,\s*{_NUMBER}\s*)*,?\s*")
_EXPECTED: Mapping[ArgumentForm, str] = {
    "number": "a finite float32 number",
    "amount": "a finite float32 number >= 0",
    "share": "a number >= 0 and < 1",
    "whole": "a whole number",
    "count": "a whole number >= 1",
    "flag": "true or false",
    "numbers": "numbers with commas",
    "wholes": "whole numbers with commas",
    "text": "text",
}


class Argument(NamedTuple):
    """An argument of a class: its form, and its default as a job would write it; None if it is required."""

    form: ArgumentForm
    default: Scalar | None


class TorchPart(NamedTuple):
    """A class of torch: its name there, its arguments, and a line about it.

    Of an optimizer `shards` says whether a shard of a tensor can take its own step: it treats each element alone.
    Of a schedule `horizon` is the argument that is the number of steps behind the warm-up unless it is given, and
    `peak` the one that is always the job's rate; any other schedule begins with that rate.
    """

    cls: str
    arguments: Mapping[str, Argument]
    about: str
    shards: bool = True
    horizon: str = ""
    peak: str = ""


def _numbers(**defaults: float) -> dict[str, Argument]:
    return {name: Argument("number", default) for name, default in defaults.items()}


def _flags(*names: str) -> dict[str, Argument]:
    return {name: Argument("flag", False) for name in names}


def _pair(name: str, default: str) -> dict[str, Argument]:
    return {name: Argument("numbers", default)}


def _adam_like(*flags: str, **more: float) -> dict[str, Argument]:
    rest = _numbers(eps=1e-8, weight_decay=0.0, **more)
    return _pair("betas", "0.9,0.999") | rest | _flags(*flags, "maximize")


OPTIMIZERS: Mapping[str, TorchPart] = {
    "adadelta": TorchPart(
        "Adadelta", _numbers(rho=0.9, eps=1e-6, weight_decay=0.0) | _flags("maximize"), "step sizes from past updates"
    ),
    "adafactor": TorchPart(
        "Adafactor",
        _numbers(beta2_decay=-0.8, d=1.0, weight_decay=0.0) | _flags("maximize"),
        "second moments by rows and columns",
        shards=False,
    ),
    "adagrad": TorchPart(
        "Adagrad",
        _numbers(lr_decay=0.0, weight_decay=0.0, initial_accumulator_value=0.0, eps=1e-10) | _flags("maximize"),
        "step sizes from all past gradients",
    ),
    "adam": TorchPart("Adam", _adam_like("amsgrad", "decoupled_weight_decay"), "first and second moments"),
    "adamax": TorchPart("Adamax", _adam_like(), "Adam by the largest gradient"),
    "asgd": TorchPart(
        "ASGD", _numbers(lambd=1e-4, alpha=0.75, t0=1e6, weight_decay=0.0) | _flags("maximize"), "averaged SGD"
    ),
    "muon": TorchPart(
        "Muon",
        _numbers(weight_decay=0.1, momentum=0.95, eps=1e-7)
        | {"nesterov": Argument("flag", True), "ns_steps": Argument("whole", 5)}
        | _pair("ns_coefficients", "3.4445,-4.775,2.0315"),
        "orthogonal updates of matrices; all parameters must be matrices",
        shards=False,
    ),
    "nadam": TorchPart(
        "NAdam", _adam_like("decoupled_weight_decay", momentum_decay=4e-3), "Adam with Nesterov's momentum"
    ),
    "radam": TorchPart("RAdam", _adam_like("decoupled_weight_decay"), "Adam with a rectified start"),
    "rmsprop": TorchPart(
        "RMSprop",
        _numbers(alpha=0.99, eps=1e-8, weight_decay=0.0, momentum=0.0) | _flags("centered", "maximize"),
        "gradients by their running size",
    ),
    "rprop": TorchPart(
        "Rprop",
        _pair("etas", "0.5,1.2") | _pair("step_sizes", "1e-06,50.0") | _flags("maximize"),
        "signs of gradients",
        shards=False,
    ),
}
_CLOSURE = "it calls the model again inside of a step, and a step is taken from the gradients that were reduced"
NO_OPTIMIZERS: Mapping[str, str] = {
    "lbfgs": _CLOSURE,
    "sparseadam": "it takes sparse gradients only, and the engine adds up dense ones",
}
_MULTIPLE = {"total_iters": Argument("whole", 5)}
PLATEAU = "plateau"  # the one schedule whose rate follows from results, and not from the step
SCHEDULES: Mapping[str, TorchPart] = {
    "constant_factor": TorchPart("ConstantLR", _numbers(factor=1 / 3) | _MULTIPLE, "a factor for the first steps"),
    "cosine_annealing": TorchPart(
        "CosineAnnealingLR", {"T_max": Argument("whole", 0)} | _numbers(eta_min=0.0), "half a cosine", horizon="T_max"
    ),
    "cosine_restarts": TorchPart(
        "CosineAnnealingWarmRestarts",
        {"T_0": Argument("whole", None), "T_mult": Argument("whole", 1)} | _numbers(eta_min=0.0),
        "half a cosine, again and again",
    ),
    "cyclic": TorchPart(
        "CyclicLR",
        {"base_lr": Argument("number", None)}
        | {"step_size_up": Argument("whole", 2000), "step_size_down": Argument("whole", 0)}
        | {"mode": Argument("text", "triangular"), "scale_mode": Argument("text", "cycle")}
        | _numbers(gamma=1.0),
        "up to the rate and down to base_lr",
        peak="max_lr",
    ),
    "exponential": TorchPart("ExponentialLR", {"gamma": Argument("number", None)}, "times gamma in each step"),
    "linear_factor": TorchPart(
        "LinearLR", _numbers(start_factor=1 / 3, end_factor=1.0) | _MULTIPLE, "from one factor to another"
    ),
    "multistep": TorchPart(
        "MultiStepLR", {"milestones": Argument("wholes", None)} | _numbers(gamma=0.1), "times gamma at milestones"
    ),
    "onecycle": TorchPart(
        "OneCycleLR",
        _numbers(pct_start=0.3, div_factor=25.0, final_div_factor=1e4)
        | {"anneal_strategy": Argument("text", "cos"), "three_phase": Argument("flag", False)},
        "up to the rate, and far below it",
        horizon="total_steps",
        peak="max_lr",
    ),
    PLATEAU: TorchPart(
        "ReduceLROnPlateau",
        _numbers(factor=0.1, threshold=1e-4, min_lr=0.0, eps=1e-8)
        | {"patience": Argument("whole", 10), "cooldown": Argument("whole", 0)}
        | {"threshold_mode": Argument("text", "rel"), "monitor": Argument("text", "")},
        "times factor when the monitored figure does not improve for patience validations",
    ),
    "polynomial": TorchPart(
        "PolynomialLR", {"total_iters": Argument("whole", 0)} | _numbers(power=1.0), "down to 0", horizon="total_iters"
    ),
    "step": TorchPart(
        "StepLR", {"step_size": Argument("whole", None)} | _numbers(gamma=0.1), "times gamma every step_size steps"
    ),
}
_FUNCTION = "it takes a function: give package.module:function, which gets the step and returns a factor"
_SEVERAL = "it takes other schedules: give package.module:function, which gets the step and returns a factor"
NO_SCHEDULES: Mapping[str, str] = {
    "lambda": _FUNCTION,
    "lambdalr": _FUNCTION,
    "multiplicative": _FUNCTION,
    "multiplicativelr": _FUNCTION,
    "sequential": _SEVERAL,
    "sequentiallr": _SEVERAL,
    "chained": _SEVERAL,
    "chainedscheduler": _SEVERAL,
}


def argument_problems(
    field: str, arguments: Mapping[str, Argument], args: Args, *, all_of: bool = True, beside: Collection[str] = ()
) -> list[Problem]:
    """Returns the problems with arguments of a part, which may have others `beside` these.

    With `all_of` they include those required and not given.
    """
    problems = [unknown_argument(field, name, {*arguments, *beside}) for name in args if name not in arguments]
    problems += [
        Problem(f"{field}.{name}", _expected(arguments[name]), repr(value))
        for name, value in args.items()
        if name in arguments and not _fits(arguments[name], value)
    ]
    if all_of:
        problems += [
            Problem(f"{field}.{name}", f"{_expected(argument)}, since it has no default")
            for name, argument in arguments.items()
            if argument.default is None and name not in args
        ]
    return problems


def unknown_argument(field: str, name: str, names: Collection[str]) -> Problem:
    """Returns the problem with an argument that is none of `names`."""
    expected = f"one of {', '.join(sorted(names))}" if names else "no arguments"
    return Problem(f"{field}.{name}", expected, repr(name), nearest(name, names))


def given_arguments(arguments: Mapping[str, Argument], args: Args) -> dict[str, object]:
    """Returns valid arguments as the class takes them."""
    return {
        name: listed(value) if arguments[name].form in ("numbers", "wholes") else plain_argument(value)
        for name, value in args.items()
    }


def plain_argument(value: Scalar) -> object:
    """Returns an argument as a class takes it: a text of numbers with commas is a tuple."""
    return listed(value) if isinstance(value, str) and "," in value and _NUMBERS.fullmatch(value) else value


def listed(value: Scalar) -> tuple[float, ...]:
    """Returns the numbers of a valid list; whole ones stay whole."""
    texts = [each.strip() for each in str(value).split(",")]
    return tuple(int(each) if re.fullmatch(r"[+-]?\d{1,18}", each) else float(each) for each in texts if each)


def as_list(values: Iterable[float]) -> str:
    """Returns numbers as a job writes a list of them."""
    return ",".join(map(str, values))


def _expected(argument: Argument) -> str:
    count = f"{len(listed(argument.default))} " if argument.form == "numbers" and argument.default is not None else ""
    return count + _EXPECTED[argument.form]


def _fits(argument: Argument, value: Scalar) -> bool:
    form = argument.form
    if form == "flag" or isinstance(value, bool):
        return form == "flag" and isinstance(value, bool)
    if form == "text":
        return isinstance(value, str)
    if form in ("numbers", "wholes"):
        numbers = listed(value) if _NUMBERS.fullmatch(str(value)) else ()
        count = len(numbers) if argument.default is None else len(listed(argument.default))
        fit = (_is_number(number) and (form == "numbers" or type(number) is int) for number in numbers)
        return len(numbers) == count > 0 and all(fit)
    if form == "count":
        return type(value) is int and value >= 1
    if form in ("amount", "share"):
        return not isinstance(value, str) and (0 <= value < 1 if form == "share" else 0 <= value <= MOST_FLOAT)
    return _is_number(value) and (form == "number" or type(value) is int)


def _is_number(value: Scalar) -> bool:
    return not isinstance(value, str) and math.isfinite(value) and abs(value) <= MOST_FLOAT


# Learning rates as pure functions of the step.


# Maps progress after the warm-up, in [0, 1), to a factor of the peak learning rate.
LR_SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


def warming_up(peak: float, step: int, warmup_steps: int) -> float:
    """Returns the rate of a step of the warm-up: linear, and `peak` in its last step."""
    return peak * (step + 1) / warmup_steps


def learning_rate(name: str, peak: float, step: int, num_steps: int, warmup_steps: int) -> float:
    """Returns the rate of `step` (0-based): linear warm-up to `peak`, then the named decay until the last step."""
    if step < warmup_steps:
        return warming_up(peak, step, warmup_steps)
    progress = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    return peak * LR_SCHEDULES[name](progress)


# The scale of the loss in float16, as torch.amp.GradScaler defines it: a pure rule of the steps before.
#
# A small gradient is zero in float16, so the loss is multiplied by a scale before the backward, and the gradients are
# divided by it before they are clipped. A step whose gradients are not all finite is skipped, and the scale becomes
# smaller. After enough other steps in a row it becomes greater. Scales are float32 numbers, as torch keeps them.

PREDICT_ARGUMENTS = {"samples": Argument("text", ""), "file": Argument("text", ""), "rows": Argument("whole", 0)}
SCALER_ARGUMENTS = {
    "init_scale": Argument("number", 65536.0),
    "growth_factor": Argument("number", 2.0),
    "backoff_factor": Argument("number", 0.5),
    "growth_interval": Argument("whole", 2000),
}
LEAST_SCALE = 2.0**-24  # the smallest float16; below it no gradient can be too large because of the scale


class LossScale(NamedTuple):
    """The scale of a step, and the number of good steps in a row since it has changed."""

    scale: float
    good_steps: int = 0


class LossScaling(NamedTuple):
    """The rule of a job."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def first(self) -> LossScale:
        """Returns the scale of the first step."""
        return LossScale(_float32(self.init_scale))

    def after(self, now: LossScale, *, is_skipped: bool) -> LossScale:
        """Returns the scale of the step after one with the scale `now`."""
        if is_skipped:
            return LossScale(_float32(now.scale * self.backoff_factor))
        if now.good_steps + 1 < self.growth_interval:
            return LossScale(now.scale, now.good_steps + 1)
        grown = now.scale * self.growth_factor
        return LossScale(_float32(grown) if grown <= MOST_FLOAT else now.scale)


def loss_scaling(job: Job) -> LossScaling | None:
    """Returns the rule of a job; None where the loss is not scaled."""
    return LossScaling(**job.scaler_args) if job.dtype == "float16" else None  # type: ignore[arg-type]


def inverse_of(scale: float) -> float:
    """Returns the factor of gradients that takes a scale away, as torch rounds it."""
    return _float32(1.0 / scale)


def scaling_problems(job: Job) -> Iterator[Problem]:
    """Yields the problems with the arguments of the scale."""
    if job.dtype != "float16":
        for name in job.scaler_args:
            yield Problem(f"scaler_args.{name}", "dtype float16 with it", job.dtype, "no other dtype needs a scale")
        return
    if problems := argument_problems("scaler_args", SCALER_ARGUMENTS, job.scaler_args):
        yield from problems
        return
    rule = LossScaling(**job.scaler_args)  # type: ignore[arg-type]
    limits = {
        "init_scale": (rule.init_scale >= LEAST_SCALE, "a number >= 2 ** -24"),
        "growth_factor": (rule.growth_factor > 1, "a number > 1"),
        "backoff_factor": (0 < rule.backoff_factor < 1, "a number > 0 and < 1"),
        "growth_interval": (rule.growth_interval >= 1, "a whole number >= 1"),
    }
    for name, (holds, expected) in limits.items():
        if not holds:
            yield Problem(f"scaler_args.{name}", expected, repr(job.scaler_args[name]))


def _float32(number: float) -> float:
    (rounded,) = struct.unpack("<f", struct.pack("<f", number))
    return float(rounded) if math.isfinite(rounded) else MOST_FLOAT
