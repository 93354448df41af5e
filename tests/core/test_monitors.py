"""What validations add up to: the best one, an early stop, a rate on a plateau; the same through a checkpoint."""

from __future__ import annotations

import math
import random
import warnings
from dataclasses import asdict, replace

import torch
from torch import nn

from engine.core.job.bit_fields import bit_differences, twin_of
from engine.core.job.job import Job
from engine.core.job.job_rules import check_job
from engine.core.job.update_rules import monitor_rules
from engine.core.monitors import (
    NO_MONITORS,
    Best,
    EarlyStopRule,
    MonitoredFigure,
    MonitorRules,
    Monitors,
    Plateau,
    PlateauRule,
    early_stop_of,
    in_words,
    lacking,
)
from tests.looped import looped

LOSSES = (3.0, 2.0, 2.5, 2.0, 1.99, 4.0, math.nan, 2.5)  # a validation after each step


def after(rules: MonitorRules, losses: tuple[float, ...], first: Monitors, begun: int = -1) -> Monitors:
    monitors = first.begun(rules, begun)
    for step, loss in enumerate(losses, start=begun + 1):
        monitors = monitors.committed(rules, step, loss).passed(rules, step, {"loss": loss, "f1": -loss})
    return monitors


@looped(
    ("text", "rule"),
    [
        ("loss", EarlyStopRule(MonitoredFigure("loss", True))),
        ("accuracy:5:0.001", EarlyStopRule(MonitoredFigure("accuracy", False), 5, 0.001)),
        ("f1:min:2", EarlyStopRule(MonitoredFigure("f1", True), 2)),
        ("loss:max:1:1e-3", EarlyStopRule(MonitoredFigure("loss", False), 1, 0.001)),
        *((wrong, None) for wrong in ("", "loss:0", "loss:", "loss:3:", "loss:x", "loss:1:-1", "a b", "loss:1:1.1.1")),
    ],
)
def test_the_text_of_an_early_stop(text: str, rule: EarlyStopRule | None) -> None:
    assert early_stop_of(text) == rule


@looped(
    ("rule", "best", "ends_at"),
    [
        ("loss:3", (1.99, 4), 8),  # 4.0, NaN and 2.5 are no better
        ("loss:2", (2.0, 1), 4),  # 2.0 again is no better
        ("loss:2:0.02", (2.0, 1), 4),
        ("loss:3:0.02", (2.0, 1), 5),
        ("f1:3", (-1.99, 4), 8),
        ("f1:min:5", (-4.0, 5), -1),
    ],
)
def test_it_ends_one_step_after_the_validation_that_uses_up_the_patience(
    rule: str, best: tuple[float, int], ends_at: int
) -> None:
    ended = after(MonitorRules(20, stop=rule), LOSSES, NO_MONITORS)
    assert (ended.stop.value, ended.stop.step, ended.ends_at) == (*best, ends_at)
    assert after(MonitorRules(ends_at + 1, stop=rule), LOSSES, NO_MONITORS).ends_at == -1, "it is the last step anyway"


def test_a_validation_that_comes_again_counts_once() -> None:
    rules = MonitorRules(20, "loss", "loss:2", MonitoredFigure("loss", True), PlateauRule(patience=0), 1.0)
    once = after(rules, LOSSES[:3], NO_MONITORS)
    assert once.passed(rules, 2, {"loss": 9.0}) is once


@looped("at", range(len(LOSSES)))
def test_a_checkpoint_goes_on_with_the_count(at: int) -> None:
    rules = MonitorRules(20, "loss", "loss:3", MonitoredFigure("loss", True), PlateauRule(patience=0, factor=0.5), 1.0)
    kept = after(rules, LOSSES[:at], NO_MONITORS)
    assert after(rules, LOSSES[at:], kept, at - 1) == after(rules, LOSSES, NO_MONITORS)


def test_another_rule_begins_its_count_anew_and_a_greater_patience_goes_on() -> None:
    kept = after(MonitorRules(20, "loss", "loss:3"), LOSSES, NO_MONITORS)
    assert kept.begun(MonitorRules(20, "loss", "loss:3"), 7) == kept
    more, few = (kept.begun(MonitorRules(20, "f1", rule), 7) for rule in ("loss:5", "loss:2"))
    assert (more.stop, more.ends_at, more.best.value) == (kept.stop, -1, None)
    assert few.ends_at == 8, "the smaller patience was used up before"
    assert kept.begun(MonitorRules(20, "loss", "f1:3"), 7).stop.value is None
    assert kept.begun(MonitorRules(20, "loss", ""), 7).ends_at == -1


@looped(
    "wrong",
    [
        NO_MONITORS._replace(validated=8),
        NO_MONITORS._replace(best=Best(1.0, 9)),
        NO_MONITORS._replace(stop=Best(since=-1)),
        NO_MONITORS._replace(ends_at=9),
        *(NO_MONITORS._replace(plateau=Plateau(rate, 1.0)) for rate in (-1.0, math.inf, math.nan)),
    ],
)
def test_a_file_with_an_impossible_state_is_refused(wrong: Monitors) -> None:
    kept = after(
        MonitorRules(20, "loss", "loss:3", MonitoredFigure("loss", True), PlateauRule(), 1.0), LOSSES, NO_MONITORS
    )
    assert kept.is_of(7) and NO_MONITORS.is_of(0)
    assert not wrong.is_of(7)


def test_a_missing_figure_is_named() -> None:
    rules = MonitorRules(20, stop="f1", monitor=MonitoredFigure("loss", True))
    assert lacking(rules, {"loss": 1.0}) == "early_stop: a validation gives no 'f1'; the first evaluation set has loss"
    assert lacking(rules, {}) == "early_stop: a validation gives no 'f1'; there is no evaluation set"
    assert lacking(rules, {"loss": 1.0, "f1": 0.5}) == ""


def test_the_reason_in_words() -> None:
    ended = after(MonitorRules(20, stop="loss:3"), LOSSES, NO_MONITORS)
    reason = "stopped early at step 8: validation/loss did not improve in 3 validations (best 1.99 after step 4)"
    assert in_words(ended) == reason


@looped("seed", range(40))
def test_a_plateau_has_torchs_own_rates(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311
    falls = rng.random() < 0.5
    rule = PlateauRule(
        factor=rng.choice((0.1, 0.3, 0.5)),
        patience=rng.choice((0, 1, 3)),
        threshold=rng.choice((0.0, 1e-4, 0.1)),
        threshold_mode=rng.choice(("rel", "abs")),
        cooldown=rng.choice((0, 2)),
        min_lr=rng.choice((0.0, 1e-3)),
        eps=rng.choice((1e-8, 1e-3)),
    )
    dummy = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(dummy, "min" if falls else "max", **rule._asdict())
    ours = Plateau(0.1, 0.1)
    for _ in range(60):
        value = rng.choice((rng.gauss(1.0, 0.3), rng.gauss(-1.0, 0.3), math.nan))
        ours = ours.after(value, rule, falls=falls)
        with warnings.catch_warnings():
            theirs.step(value)
        assert ours.rate == dummy.param_groups[0]["lr"]
        assert (ours.bad, ours.cooldown) == (theirs.num_bad_epochs, theirs.cooldown_counter)


def test_jobs_that_ask_for_what_they_do_not_have_are_refused() -> None:
    def told(**fields: object) -> list[str]:
        return [str(each) for each in check_job(replace(Job(), **fields))]  # type: ignore[arg-type]

    assert told(early_stop="loss:3", lr_schedule="plateau") == []
    assert "early_stop: expected METRIC[:PATIENCE" in told(early_stop="loss:0")[0]
    assert "set --validate-every" in told(early_stop="loss", validate_every=0)[0]
    plateau = {"lr_schedule": "plateau", "validate_every": 0}
    assert told(**plateau) == [], "it watches the loss of the steps"
    assert "let it watch train_loss" in told(**plateau, lr_args={"monitor": "loss"})[0]
    for args in ({"factor": 1.0}, {"patience": -1}, {"threshold_mode": "x"}, {"monitor": "a b"}, {"factor": "x"}):
        assert len(told(lr_schedule="plateau", lr_args=args)) == 1, args
    assert len(told(lr_schedule="mine:rates", lr_args={"monitor": "loss"}, validate_every=0)) == 1


def test_validations_decide_bits_where_the_rate_follows_them() -> None:
    plateau, other = Job(lr_schedule="plateau"), Job(lr_schedule="plateau", validate_every=7)
    assert twin_of(plateau).validate_every == plateau.validate_every
    assert [each.name for each in bit_differences(asdict(plateau), {}, other, {})] == ["validate_every"]
    train = Job(lr_schedule="plateau", lr_args={"monitor": "train_loss"})
    assert twin_of(train).validate_every == 0
    assert bit_differences(asdict(train), {}, replace(train, validate_every=7), {}) == []
    stops = Job(early_stop="loss:2", metrics="accuracy")
    assert (twin_of(stops).early_stop, twin_of(stops).validate_every, twin_of(stops).metrics) == (
        *("loss:2", stops.validate_every, "accuracy"),
    )
    assert bit_differences(asdict(stops), {}, Job(metrics="accuracy"), {}) == []
    assert monitor_rules(train).monitor == MonitoredFigure("train_loss", True)
