"""The page of a schedule in a real browser: every action a bar, named when pointed at, and the residuals below."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engine.core.job.job import Job
from engine.core.job.partition import initial_program
from engine.core.program.dry_run import dry_run
from engine.report.pages.schedule_page import schedule_page
from tests.report.browser import Browser

ZBV = Job(schedule="zbv", stages=8, stages_per_worker=2, redundancy="none")
EAGER = Job(redundancy="eager")
ONE_OF_ONE = Job(stages=1, microbatches=1, schedule="gpipe")


def opened(browser: Browser, job: Job, folder: Path) -> None:
    path = folder / "schedule.html"
    path.write_text(schedule_page(job), encoding="utf-8")
    browser.open(path)
    assert (browser.complaints, browser.requests) == ([], [])


@pytest.mark.parametrize("job", [ZBV, EAGER, ONE_OF_ONE])
def test_every_action_is_drawn_and_every_worker_has_a_curve(browser: Browser, job: Job, tmp_path: Path) -> None:
    opened(browser, job, tmp_path)
    program, ownership = initial_program(job)
    run = dry_run(program, ownership)
    drawn = browser.ask(
        "document.getElementById('timeline').data.flatMap((each) => each.customdata.map((data) => data.slice(0, 2)))"
    )
    assert browser.ask("document.querySelectorAll('#timeline .barlayer g.point path').length") >= len(drawn)
    expected = [[str(each.action), each.worker] for each in run.spans if each.end > each.start]
    assert sorted(drawn) == sorted(expected)
    curves = browser.ask("document.getElementById('stash').data.map((each) => Math.max(...each.y))")
    assert curves == list(run.peak_stash.values())
    assert browser.ask("document.querySelectorAll('#stash .scatterlayer .trace').length") == len(curves)
    assert f"{run.makespan:g} units" in browser.ask("document.querySelector('h1').innerText").replace("\xa0", " ")


def test_the_headline_and_the_words_are_plain(browser: Browser, tmp_path: Path) -> None:
    """Said "4 workers, 33 units, of which a worker waits 27.3% on average", and residuals for stashed activations."""
    opened(browser, Job(), tmp_path)
    assert browser.ask("document.querySelector('h1').innerText").replace("\xa0", " ") == (
        "1f1b, 4 stages, 8 microbatches: 33 units, each worker waits 27 % of them"
    )
    text = browser.ask("document.body.innerText").lower()
    assert "peak stashed activations" in text
    assert "residual" not in text


def test_boxes_have_the_numbers_of_their_microbatches_and_the_shades_of_their_stages(
    browser: Browser, tmp_path: Path
) -> None:
    """No box had a number, and the two stages of a worker looked alike: the V of zbv could not be seen."""
    opened(browser, ZBV, tmp_path)
    traces = browser.ask("document.getElementById('timeline').data.map((e) => [e.customdata, e.text, e.marker.color])")
    shades: dict[str, set[str]] = {}
    for told, numbers, colours in traces:
        for (action, *_), number, colour in zip(told, numbers, colours, strict=True):
            stage, op, microbatch = re.fullmatch(r"(\d)([FIW])(\d+)", action).groups()  # type: ignore[union-attr]
            assert number == microbatch
            shades.setdefault(op + stage, set()).add(colour)
    assert all(len(colours) == 1 for colours in shades.values())
    for op in "FIW":
        assert len({colour for name, (colour,) in shades.items() if name[0] == op}) == ZBV.stages
    drawn = "[...document.querySelectorAll('#timeline .barlayer text')].map((each) => each.textContent)"
    assert {"0", "1", "7"} <= set(browser.ask(drawn))
    browser.ask("Plotly.relayout('timeline', { 'xaxis.range[0]': -4000, 'xaxis.range[1]': 4000 }).then(() => null)")
    assert browser.wait_for(f"{drawn}.length === 0"), "numbers that do not fit are left out"


def test_pointing_at_a_bar_names_it_and_a_zoom_is_followed(browser: Browser, tmp_path: Path) -> None:
    opened(browser, EAGER, tmp_path)
    x, y = browser.ask(
        """(() => {
          const chart = document.getElementById('timeline');
          const { xaxis, yaxis } = chart._fullLayout;
          const box = chart.getBoundingClientRect();
          return [box.x + xaxis._offset + xaxis.c2p(5.5), box.y + yaxis._offset + yaxis.c2p(2)];
        })()"""
    )
    browser.point_at(x, y)
    said = browser.wait_for("document.querySelector('#timeline .hoverlayer .hovertext')?.textContent")
    assert said.startswith("3F1, redundantworker 2")
    assert "1 unit from 5 units" in said
    browser.ask("Plotly.relayout('timeline', { 'xaxis.range[0]': 8, 'xaxis.range[1]': 12 }).then(() => null)")
    assert browser.wait_for("document.getElementById('stash')._fullLayout.xaxis.range.join() === '8,12'")
    assert (browser.complaints, browser.requests) == ([], [])
