"""The models, data and arguments that a job can name, as the resolution of a job asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine.core.config.job import Job
from engine.core.errors import Problem


@dataclass(frozen=True, slots=True)
class Offered:
    """The models, data and arguments that a job can name.

    `problems` returns the problems with those that a job names, `arguments` returns the arguments that its parts take,
    such as ``model_args.width``. Unless `calls_code`, a generator of a schedule, which is the user's code, is not
    called: `Job.schedule` keeps its name, and no rule about the program is checked.
    """

    problems: Callable[[Job], Iterable[Problem]]
    arguments: Callable[[Job], Iterable[str]]
    calls_code: bool = True


ANYTHING = Offered(lambda job: (), lambda job: ())
