"""The parameter groups of a job, by the plain names of a model's parameters.

Rule: a tied parameter has the group of its first use. Each use is updated where it is, and all must stay equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from engine.core.checkpoints.plain_names import prefixes
from engine.core.config.job import Job
from engine.core.config.param_groups import ParamGroup, group_of, idle_groups, param_groups
from engine.core.errors import UserError
from engine.models.layers import Model


def groups_by_layer(job: Job, model: Model, layers: Mapping[int, nn.Module]) -> dict[int, dict[str, ParamGroup]]:
    """Returns for each layer the groups of its trained parameters; none for a parameter without one."""
    found: dict[int, dict[str, ParamGroup]] = {index: {} for index in layers}
    if not job.param_groups:
        return found
    groups = param_groups(job.param_groups)
    for index, name, plain in _plain_names(model, layers):
        if (group := group_of(groups, plain)) is not None:
            found[index][name] = group
    return found


def check_groups(job: Job, model: Model, layers: Mapping[int, nn.Module]) -> None:
    """Raises UserError if a group of the job has no parameter among all `layers` of the model."""
    names = [plain for _, _, plain in _plain_names(model, layers)]
    if problems := idle_groups(param_groups(job.param_groups), names):
        raise UserError(problems)


def _plain_names(model: Model, layers: Mapping[int, nn.Module]) -> Iterable[tuple[int, str, str]]:
    """Yields layer, name there and plain name of each trained parameter; a tied one has that of its first use."""
    beginnings = prefixes([each.name for each in model.layers])
    first = {use: min(tie.uses) for tie in model.ties for use in tie.uses}
    for index, layer in layers.items():
        for name, parameter in layer.named_parameters():
            if parameter.requires_grad:
                at, there = first.get((index, name), (index, name))
                yield index, name, f"{beginnings[at]}{there}"
