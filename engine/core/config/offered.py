"""The models, data and arguments that a job can name, as the resolution of a job asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from engine.core.config.job import ACTING, Job
from engine.core.errors import Problem
from engine.core.scalar import Scalar


@dataclass(frozen=True, slots=True)
class Offered:
    """The models, data and arguments that a job can name.

    `problems` returns the problems with those that a job names, `arguments` returns the arguments that its parts take,
    such as ``model_args.width``. `acts_on` has the fields of `ACTING` that the command acts on: it imports the code
    that they name, or writes to the folder. Unless it acts on the schedule, a generator is not called: `Job.schedule`
    keeps its name, and no rule about the program is checked. A value of these fields from a file that the command line
    does not name as a job is refused, unless the user `trusts_files`. `samples_of`
    counts the training samples of a job with epochs: 0 for data without an end, None if they are not counted.
    `smallest_stage` returns the layers of the smallest stage, None if only the cut of the model tells. `defaults`
    returns the fields and arguments that have other defaults with the model of a job.
    """

    problems: Callable[[Job], Iterable[Problem]]
    arguments: Callable[[Job], Iterable[str]]
    acts_on: tuple[str, ...] = ACTING
    trusts_files: bool = False
    samples_of: Callable[[Job], int | None] | None = None
    smallest_stage: Callable[[Job], int | None] = lambda job: None
    defaults: Callable[[Job], Mapping[str, Scalar]] = lambda job: {}

    @property
    def calls_code(self) -> bool:
        """Whether a generator of a schedule, which is the user's code, is called."""
        return "schedule" in self.acts_on

    def trusting(self, is_trusted: bool) -> Offered:
        """Returns the same, with the user's word on whether files are trusted."""
        return replace(self, trusts_files=is_trusted)


ANYTHING = Offered(lambda job: (), lambda job: ())
