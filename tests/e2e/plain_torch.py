"""The optimizers and schedules of the plain loop: torch's own classes, as a user's script uses them."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from engine.core.job.job import Job

OPTIMIZERS = {
    "adadelta": "Adadelta",
    "adafactor": "Adafactor",
    "adagrad": "Adagrad",
    "adam": "Adam",
    "adamax": "Adamax",
    "asgd": "ASGD",
    "nadam": "NAdam",
    "radam": "RAdam",
    "rmsprop": "RMSprop",
    "rprop": "Rprop",
}
SCHEDULERS = {
    "constant_factor": "ConstantLR",
    "cosine_annealing": "CosineAnnealingLR",
    "cosine_restarts": "CosineAnnealingWarmRestarts",
    "cyclic": "CyclicLR",
    "exponential": "ExponentialLR",
    "linear_factor": "LinearLR",
    "multistep": "MultiStepLR",
    "onecycle": "OneCycleLR",
    "polynomial": "PolynomialLR",
    "step": "StepLR",
}


def own_class(name: str) -> Any:
    """Returns the class of torch, or of a module, that a job names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute) if attribute else getattr(torch.optim, OPTIMIZERS[name])


def numbers(args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments as torch takes them: a text with commas is a list."""
    return {
        name: [float(each) if "." in each else int(each) for each in value.split(",")] if "," in str(value) else value
        for name, value in args.items()
    }


def optimizer_of(job: Job, parameters: Mapping[str, Tensor]) -> tuple[torch.optim.Optimizer, list[float]]:
    """Returns torch's own optimizer over parameters by plain names, and the factor of each group's rate."""
    kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}.get(job.optimizer) or own_class(job.optimizer)
    wanted = [each.rpartition(":") for each in job.param_groups.split(";") if each]
    found: dict[str, dict[str, Any]] = {}
    for plain, parameter in parameters.items():
        pattern, args = next(((a.strip(), b) for a, _, b in wanted if re.search(a.strip(), plain)), ("", ""))
        values = {key.strip(): float(value) for key, value in (each.split("=") for each in args.split(",") if each)}
        found.setdefault(pattern, {"params": [], "factor": values.pop("lr", 1.0), **values})
        found[pattern]["params"].append(parameter)
    factors = [each.pop("factor") for each in found.values()]
    off = {"foreach": False} if "foreach" in inspect.signature(kind).parameters else {}
    return kind(list(found.values()), lr=job.lr, **off, **numbers(job.optimizer_args)), factors


def plateau_of(job: Job) -> torch.optim.lr_scheduler.ReduceLROnPlateau:
    """Returns torch's own schedule, which a usual loop steps with its losses."""
    dummy = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=job.lr)
    args: Any = {name: value for name, value in job.lr_args.items() if name != "monitor"}
    return torch.optim.lr_scheduler.ReduceLROnPlateau(dummy, **args)


def rates_of(job: Job) -> list[float]:
    """Returns the rates of torch's own scheduler, in a usual loop with an optimizer."""
    if job.lr_schedule in ("constant", "linear", "cosine"):
        return []
    name, rest = SCHEDULERS[job.lr_schedule], max(1, job.steps - job.warmup_steps)
    dummy = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=job.lr)
    more = {"T_max": rest, "total_iters": rest, "total_steps": rest, "max_lr": job.lr, "cycle_momentum": False}
    kind = getattr(torch.optim.lr_scheduler, name)
    taken = inspect.signature(kind).parameters
    own = {"PolynomialLR": ["total_iters"], "CosineAnnealingLR": ["T_max"], "OneCycleLR": ["total_steps"]}
    chosen = [*own.get(name, ()), "max_lr", "cycle_momentum"]
    args = {each: more[each] for each in chosen if each in taken} | numbers(job.lr_args)
    scheduler, rates = kind(dummy, **args), []
    for _ in range(rest):
        rates.append(dummy.param_groups[0]["lr"])
        dummy.step()
        if len(rates) < rest:
            scheduler.step()
    return rates
