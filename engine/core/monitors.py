"""What the validations of a run add up to: its best figure, its early stop, the rate that falls on a plateau.

Rules: the state is one value, which the coordinator keeps with each decision, and which a checkpoint has as of its
step. So kills, takeovers and resumed runs go on with the numbers of a run without them. Figures are those of the first
evaluation set. One that is not finite is never better.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isfinite
from typing import NamedTuple

from engine.core.units import MOST_FLOAT

FIGURE_FORM = "loss, a metric, NAME:min or NAME:max"
EARLY_STOP_FORM = "METRIC[:PATIENCE[:MIN_DELTA]], such as loss:3 or accuracy:5:0.001, with NAME:min or NAME:max too"
_FIGURE = r"(?P<name>[^\W\d]\w*)(?::(?P<way>min|max))?"
_EARLY_STOP = re.compile(rf"{_FIGURE}(?::(?P<patience>[0-9]{{1,9}}))?(?::(?P<delta>[0-9.]+(?:[eE]-?[0-9]+)?))?")
_FALLING = ("loss", "perplexity", "train_loss")


class MonitoredFigure(NamedTuple):
    """A figure by name, and whether a smaller one is better."""

    name: str
    falls: bool

    def is_better(self, value: float, best: float | None, min_delta: float = 0.0) -> bool:
        """Returns whether a value is better than the best one by more than `min_delta`."""
        if not isfinite(value):
            return False
        return best is None or (value + min_delta < best if self.falls else value - min_delta > best)


def figure_of(text: str) -> MonitoredFigure | None:
    """Returns the figure of a text in the form of `FIGURE_FORM`; None for any other text."""
    match = re.fullmatch(_FIGURE, text)
    return _figure(match) if match else None


def _figure(match: re.Match[str]) -> MonitoredFigure:
    return MonitoredFigure(match["name"], match["way"] == "min" or (not match["way"] and match["name"] in _FALLING))


class EarlyStopRule(NamedTuple):
    """The rule of a job: after so many validations in a row that are no better by `min_delta`, one more step follows.

    The defaults are those of Lightning.
    """

    figure: MonitoredFigure
    patience: int = 3
    min_delta: float = 0.0


def early_stop_of(text: str) -> EarlyStopRule | None:
    """Returns the rule that a text in the form of `EARLY_STOP_FORM` spells; None for any other text."""
    match = _EARLY_STOP.fullmatch(text)
    try:
        rule = EarlyStopRule(_figure(match), int(match["patience"] or 3), float(match["delta"] or 0)) if match else None
    except ValueError:
        return None
    return rule if rule is not None and rule.patience > 0 and rule.min_delta <= MOST_FLOAT else None


class Best(NamedTuple):
    """The best value so far, its step, and the number of validations since then."""

    value: float | None = None
    step: int = -1
    since: int = 0

    def after(self, step: int, value: float, figure: MonitoredFigure, min_delta: float = 0.0) -> Best:
        """Returns the best after the validation of a step; of equal values, the earliest is the best."""
        is_better = figure.is_better(value, self.value, min_delta)
        return Best(value, step) if is_better else self._replace(since=self.since + 1)


class PlateauRule(NamedTuple):
    """The arguments of `torch.optim.lr_scheduler.ReduceLROnPlateau`."""

    factor: float = 0.1
    patience: int = 10
    threshold: float = 1e-4
    threshold_mode: str = "rel"
    cooldown: int = 0
    min_lr: float = 0.0
    eps: float = 1e-8


class Plateau(NamedTuple):
    """The state of that schedule: its present rate, and the one that it began with."""

    rate: float
    began: float
    best: float | None = None
    bad: int = 0
    cooldown: int = 0

    def after(self, value: float, rule: PlateauRule, *, falls: bool) -> Plateau:
        """Returns the state after a value, with torch's own arithmetic."""
        best, bad = (value, 0) if self._is_better(value, rule, falls) else (self.best, self.bad + 1)
        rate, cooldown = self.rate, self.cooldown
        if cooldown > 0:
            cooldown, bad = cooldown - 1, 0
        if bad > rule.patience:
            reduced = max(rate * rule.factor, rule.min_lr)
            rate = reduced if rate - reduced > rule.eps else rate
            cooldown, bad = rule.cooldown, 0
        return Plateau(rate, self.began, best, bad, cooldown)

    def _is_better(self, value: float, rule: PlateauRule, falls: bool) -> bool:
        if self.best is None or not isfinite(value):
            return isfinite(value)
        if rule.threshold_mode == "rel":
            factor = 1.0 - rule.threshold if falls else rule.threshold + 1.0
            return value < self.best * factor if falls else value > self.best * factor
        return value < self.best - rule.threshold if falls else value > self.best + rule.threshold


class MonitorRules(NamedTuple):
    """What a job of so many `steps` asks of its figures; `best` and `stop` are its texts, empty without them.

    Its rate follows the figure `monitor`, by its own code or with a `plateau`, which begins with the rate `began` and
    behind the warm-up.
    """

    steps: int
    best: str = ""
    stop: str = ""
    monitor: MonitoredFigure | None = None
    plateau: PlateauRule | None = None
    began: float = 0.0
    warmup_steps: int = 0


TRAIN_LOSS = "train_loss"  # the figure of a step, which a rate may follow in place of a validation's


class Monitors(NamedTuple):
    """The state of all of them, up to the validation of the step `validated`.

    `best_of` and `stop_of` are the texts of the rules that `best` and `stop` follow. `ends_at` is the last step of a
    run that stops early, -1 for any other run. `monitored` is the last value of the figure that the rate follows.
    """

    validated: int = -1
    best_of: str = ""
    best: Best = Best()
    stop_of: str = ""
    stop: Best = Best()
    ends_at: int = -1
    monitored: float | None = None
    plateau: Plateau | None = None

    def begun(self, rules: MonitorRules, begun: int) -> Monitors:
        """Returns the state with which a run begins after the step `begun`, whose checkpoint had this state.

        What another rule has counted is forgotten; a greater patience goes on with the count.
        """
        new, plateau = self, rules.plateau
        if self.best_of != rules.best:
            new = new._replace(best_of=rules.best, best=Best())
        if self.stop_of != rules.stop:
            ours, its = early_stop_of(rules.stop), early_stop_of(self.stop_of)
            is_same = ours is not None and its is not None and ours._replace(patience=its.patience) == its
            new = new._replace(stop_of=rules.stop, stop=self.stop if is_same else Best(), ends_at=-1)
        if plateau is None or self.plateau is None or self.plateau.began != rules.began:
            new = new._replace(plateau=Plateau(rules.began, rules.began) if plateau else None)
        return new._ending(rules, begun)

    def is_of(self, step: int) -> bool:
        """Returns whether it can be the state as of a step, for one that a file holds."""
        steps = (self.validated, self.best.step, self.stop.step, self.ends_at - 1)
        has_rate = self.plateau is None or 0 <= self.plateau.rate <= MOST_FLOAT
        return has_rate and all(-2 <= each <= step for each in steps) and min(self.best.since, self.stop.since) >= 0

    def committed(self, rules: MonitorRules, step: int, loss: float) -> Monitors:
        """Returns the state after the commit of a step."""
        return self._watched(rules, step, {TRAIN_LOSS: loss})

    def passed(self, rules: MonitorRules, step: int, figures: Mapping[str, float]) -> Monitors:
        """Returns the state after the validation of a step, which has these figures; a repeated one changes nothing."""
        if step <= self.validated:
            return self
        new = self._replace(validated=step)._watched(rules, step, figures)
        if (best := figure_of(rules.best)) is not None and best.name in figures:
            new = new._replace(best=self.best.after(step, figures[best.name], best))
        if (stop := early_stop_of(rules.stop)) is not None and stop.figure.name in figures and self.ends_at < 0:
            value = figures[stop.figure.name]
            new = new._replace(stop=self.stop.after(step, value, stop.figure, stop.min_delta))
        return new._ending(rules, step)

    def _watched(self, rules: MonitorRules, step: int, figures: Mapping[str, float]) -> Monitors:
        figure, plateau, rule = rules.monitor, self.plateau, rules.plateau
        if figure is None or (value := figures.get(figure.name)) is None:
            return self
        if plateau is not None and rule is not None and step >= rules.warmup_steps:
            plateau = plateau.after(value, rule, falls=figure.falls)
        return self._replace(monitored=value if isfinite(value) else None, plateau=plateau)

    def _ending(self, rules: MonitorRules, step: int) -> Monitors:
        """Returns the state with the end after one more step, if the patience is used up; not at the last steps."""
        rule = early_stop_of(rules.stop)
        is_out = rule is not None and self.stop.since >= rule.patience and step + 1 < rules.steps - 1
        return self._replace(ends_at=step + 1) if is_out and self.ends_at < 0 else self


NO_MONITORS = Monitors()


def is_watched(rules: MonitorRules) -> bool:
    """Returns whether a job asks anything of its figures."""
    return bool(rules.best or rules.stop or rules.monitor)


def needs_validations(rules: MonitorRules) -> bool:
    """Returns whether a decision about training, and not only about checkpoints, follows from validations."""
    return bool(rules.stop) or (rules.monitor is not None and rules.monitor.name != TRAIN_LOSS)


def lacking(rules: MonitorRules, figures: Mapping[str, float]) -> str:
    """Returns in words the figure that a rule needs and a validation has not; empty if there is none."""
    stop, monitor = early_stop_of(rules.stop), rules.monitor
    figures_of = {"early_stop": stop.figure.name} if stop else {}
    figures_of |= {"lr_args.monitor": monitor.name} if monitor and monitor.name != TRAIN_LOSS else {}
    for field, name in figures_of.items():
        if name not in figures:
            there = f"the first evaluation set has {', '.join(figures)}" if figures else "there is no evaluation set"
            return f"{field}: a validation gives no {name!r}; {there}"
    return ""


def in_words(monitors: Monitors) -> str:
    """Returns the reason of an early stop."""
    rule = early_stop_of(monitors.stop_of)
    name = rule.figure.name if rule else "loss"
    since = f"in {monitors.stop.since} validations" if monitors.stop.since != 1 else "in 1 validation"
    best = "" if monitors.stop.value is None else f" (best {monitors.stop.value:.6g} after step {monitors.stop.step})"
    return f"stopped early at step {monitors.ends_at}: validation/{name} did not improve {since}{best}"
