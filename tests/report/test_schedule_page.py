"""The page of a schedule in a real browser: every action a bar, named when pointed at, and the residuals below."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.core.config.initial_program import initial_program
from engine.core.config.job import Job
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
    assert f"{run.makespan:g} units" in browser.ask("document.querySelector('h1').innerText")


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
    assert "1 units from 5 units" in said
    browser.ask("Plotly.relayout('timeline', { 'xaxis.range[0]': 8, 'xaxis.range[1]': 12 }).then(() => null)")
    assert browser.wait_for("document.getElementById('stash')._fullLayout.xaxis.range.join() === '8,12'")
    assert (browser.complaints, browser.requests) == ([], [])
