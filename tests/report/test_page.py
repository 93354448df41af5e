"""The page in a real browser: it draws without errors and without a network, and its marks agree with the events."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import fields, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from engine.report.load import RunTables
from engine.report.pages.page import page
from tests.report.browser import Browser
from tests.report.made_up import MadeUpRun, agent, load
from tests.report.test_page_layout import events as layout_events

EVIL = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"> ${x} %{y}"
LINK = "<a href='https://example.org'>a link for Plotly</a>"
GOAL = 6.5  # times the work of a loop: processor time is longer on a busy machine, too


@pytest.fixture(name="standard")
def _standard(browser: Browser, run: RunTables, tmp_path_factory: pytest.TempPathFactory) -> Browser:
    """Returns the browser with the page of the usual run; opens the page only if another one is open."""
    if browser.ask("document.title").startswith("made-up"):
        browser.ask("document.querySelector('#windows button').click()")
    else:
        opened(browser, run, tmp_path_factory.mktemp("standard"))
    return browser


@pytest.fixture(scope="module", name="run")
def _run() -> RunTables:
    return load(MadeUpRun(dead=((5, 2),)).events(), "made-up")


def opened(browser: Browser, run: RunTables, folder: Path) -> float:
    """Opens the page of a run and returns the seconds that it took."""
    path = folder / "report.html"
    path.write_text(page(run), encoding="utf-8")
    return browser.open(path)


def bars(browser: Browser, where: str) -> list[list[Any]]:
    """Returns [text, left, width] in pixels of the bars in the timeline that `where` picks."""
    drawn: list[list[Any]] = browser.ask(
        """[...document.querySelectorAll('#timeline .barlayer g.trace')].flatMap((group) => {
          const trace = group.__data__[0].trace;
          return [...group.querySelectorAll('g.point')].map((point) => {
            const box = point.querySelector('path').getBoundingClientRect();
            return [trace.customdata?.[point.__data__.i], box.x, box.width];
          }).filter(([data]) => data && (WHERE)(data, trace));
        })""".replace("WHERE", where)
    )
    return drawn


def pixel_of(browser: Browser, at_ms: float, row: float) -> tuple[float, float]:
    """Returns the point on the screen of a time and a row of the timeline."""
    x, y = browser.ask(
        f"""(() => {{
          const chart = document.getElementById('timeline');
          const {{ xaxis, yaxis }} = chart._fullLayout;
          const box = chart.getBoundingClientRect();
          return [box.x + xaxis._offset + xaxis.c2p({at_ms}), box.y + yaxis._offset + yaxis.c2p({row})];
        }})()"""
    )
    return x, y


def test_the_page_draws_without_complaint_or_network(standard: Browser, run: RunTables) -> None:
    assert (standard.complaints, standard.requests) == ([], [])
    assert standard.ask("document.querySelector('h1').innerText").startswith("Worker 2 was lost in step 5")
    for chart in ("timeline", "phases", "loss", "throughput", "memory", "exposure"):
        assert standard.ask(f"document.querySelectorAll('#{chart} .trace').length") > 0, chart


def test_the_head_tells_job_machine_and_date(standard: Browser) -> None:
    """Only the command at the bottom told the job, and nothing told the machine or the day."""
    head = standard.ask("document.querySelector('header').innerText")
    assert "1 January 2026, 01:02" in head
    assert (
        "Job: model mlp on data auto, 4 stages, schedule 1f1b, 8 microbatches of 4, redundancy lazy, 10 steps, seed 7."
        in head
    )
    assert "Machine: Made-up CPU, 2 cores, torch 2.13.0, Python 3.11.7." in head


def test_the_head_has_the_last_validation() -> None:
    """The accuracy of a run was on no page."""
    *made, ended = MadeUpRun().events()
    found = {"name": "validation", "samples": 8}
    told = [
        agent("validation", 1300, step=step, loss=2 - step / 8, metrics={"f1": step / 8}, **found) for step in (2, 7)
    ]
    head = page(load([*made, *told, ended], "validated")).split("</header>")[0]
    assert "<dt>validation loss</dt><dd>1.125 <small>f1 0.875</small>" in head


def test_marks_are_where_the_events_say(standard: Browser, run: RunTables) -> None:
    """Compares pixels on the screen, not the data of the page."""
    (row,) = run.recovery.to_dict("records")
    x, y = pixel_of(standard, row["begin_ms"], 2)
    cross = standard.ask(
        "(() => { const box = document.querySelector('#timeline .scatterlayer .point').getBoundingClientRect();"
        " return [box.x + box.width / 2, box.y + box.height / 2]; })()"
    )
    assert cross == pytest.approx([x, y], abs=1.5)
    drawn = {phase: (left, width) for phase, left, width in bars(standard, "(data, trace) => trace.name === 'phases'")}
    at_ms = row["begin_ms"]
    for phase in ("detect", "agree", "fence", "regroup", "inventory", "plan", "replay", "merged"):
        left, right = pixel_of(standard, at_ms, -1)[0], pixel_of(standard, at_ms + row[f"{phase}_ms"], -1)[0]
        assert drawn[phase] == pytest.approx((left, right - left), abs=2), phase
        at_ms += row[f"{phase}_ms"]


def test_every_action_in_view_is_a_bar(standard: Browser, run: RunTables) -> None:
    low, high = standard.ask("document.getElementById('timeline')._fullLayout.xaxis.range")
    start = (run.actions["start_ns"] - run.origin_ns) / 1e6
    end = (run.actions["end_ns"] - run.origin_ns) / 1e6
    expected = run.actions[(start < high) & (end > low)]
    drawn = bars(standard, "(data, trace) => trace.name !== 'phases'")
    assert sorted(data[0] for data, *_ in drawn) == sorted(expected["action"])
    ((data, left, width),) = [each for each in drawn if each[0][0] == "2f0"]
    row = expected[expected["action"] == "2f0"].iloc[0]
    ends = [(row[name] - run.origin_ns) / 1e6 for name in ("start_ns", "end_ns")]
    assert data[6] == ", replayed, of a slot that was taken over"
    assert [left, left + width] == pytest.approx([pixel_of(standard, at_ms, 1)[0] for at_ms in ends], abs=2)


def test_a_takeover_is_seen_at_the_heir_and_at_the_dead(standard: Browser, run: RunTables) -> None:
    """The heir kept the label of its first slot, and its work for the slot of the dead worker looked like its own."""
    names = standard.ask("document.getElementById('timeline').layout.yaxis.ticktext")
    since_s = run.takeovers["from_ms"].iloc[0] / 1e3
    assert names[1:4] == [
        "worker 0: <b>stage 0</b>",
        f"worker 1: <b>stage 1</b><br>from {since_s:.1f} s also stage 2 (of worker 2)",
        "worker 2: <b>stage 2</b>",
    ]
    notes = standard.ask("document.getElementById('timeline').layout.annotations.map((each) => each.text)")
    assert "dead; worker 1 took over" in notes
    drawn = bars(standard, "(data, trace) => data[1] === 1 && data[2] === 5")
    taken_over = {data[0] for data, *_ in drawn if "taken over" in data[6]}
    assert {"2f0", "2F7", "2B7"} <= taken_over
    assert all(text.startswith("2") for text in taken_over)
    dots = "[...document.querySelectorAll('#legend span')].map((each) => each.innerText)"
    assert "for a slot that was taken over" in standard.ask(dots)


def test_the_time_until_a_failure_was_seen_is_filled_and_named(standard: Browser, run: RunTables) -> None:
    """A hang of 30 s was an empty field."""
    begin_ms = run.recovery["begin_ms"].iloc[0]
    view = f"{{ 'xaxis.range[0]': {begin_ms - 0.2}, 'xaxis.range[1]': {begin_ms + 1.5} }}"
    standard.ask(f"Plotly.relayout('timeline', {view}).then(() => null)")
    layout = "document.getElementById('timeline').layout"
    filled = standard.wait_for(f"{layout}.shapes.find((each) => each.type === 'rect' && each.y0 === 2 - 0.39)")
    assert (filled["x0"], filled["x1"]) == pytest.approx((begin_ms, begin_ms + run.recovery["detect_ms"].iloc[0]))
    assert "worker 2 was killed (SIGKILL)" in standard.ask(f"{layout}.annotations.map((each) => each.text)")


def test_pointing_at_a_bar_names_the_action(standard: Browser, run: RunTables) -> None:
    standard.ask("document.getElementById('timeline').scrollIntoView()")
    action = run.actions[(run.actions["action"] == "2f3")].iloc[0]
    middle_ms = ((action["start_ns"] + action["end_ns"]) / 2 - run.origin_ns) / 1e6
    standard.point_at(*pixel_of(standard, middle_ms, 1))
    said = standard.wait_for("document.querySelector('#timeline .hoverlayer .hovertext')?.textContent")
    assert said.startswith("2f3, replayed, of a slot that was taken over")
    assert "worker 1, step 5, epoch 2" in said


@pytest.fixture(name="schemes", scope="module")
def _schemes(browser: Browser, run: RunTables, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Returns the colours of the page of the usual run, light and dark: of its legend, a card, itself and a text."""
    entries = "[...document.querySelectorAll('#legend span')].map((each) => [each.innerText, COLOUR])".replace(
        "COLOUR", "getComputedStyle(each.querySelector('i')).backgroundColor"
    )
    asked = {
        "legend": entries,
        "card": "getComputedStyle(document.querySelector('section')).backgroundColor",
        "back": "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)",
        "ink": "document.querySelector('#loss .xtick text').style.fill.match(/\\d+/g).map(Number)",
    }
    found = {}
    for scheme in ("dark", "light"):
        browser.prefer(scheme)
        opened(browser, run, tmp_path_factory.mktemp(scheme))
        found[scheme] = {name: browser.ask(expression) for name, expression in asked.items()}
    return found


def test_waiting_is_the_quietest_colour_and_a_transfer_another_one(schemes: dict[str, dict[str, Any]]) -> None:
    """One colour stood for both, and on a dark page it was the brightest of all."""
    for scheme, found in schemes.items():
        card = luminance(found["card"])
        away = {name: abs(luminance(colour) - card) for name, colour in found["legend"] if colour != "rgba(0, 0, 0, 0)"}
        assert len(away) >= 5
        assert min(away, key=lambda name: away[name]) == "waiting", (scheme, away)
        assert away["transfer"] > 1.5 * away["waiting"], (scheme, away)


def luminance(colour: str) -> float:
    """Returns the relative luminance of a colour such as ``rgb(1, 2, 3)``, from 0 to 1."""
    parts = [float(each) / 255 for each in re.findall(r"[0-9.]+", colour)[:3]]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_a_dark_page_for_those_who_like_it_dark(schemes: dict[str, dict[str, Any]]) -> None:
    lightness = {name: (sum(each["back"][:3]) / 3, sum(each["ink"][:3]) / 3) for name, each in schemes.items()}
    for scheme, (bright, dark) in {"light": (0, 1), "dark": (1, 0)}.items():
        assert lightness[scheme][bright] > 200, scheme
        assert lightness[scheme][dark] < 60, scheme


def test_the_whole_run_is_shown_as_steps_and_a_zoom_as_actions(browser: Browser, tmp_path: Path) -> None:
    run = load(MadeUpRun(stages=8, steps=60, dead=((30, 3),)).events(), "long")
    opened(browser, run, tmp_path)
    browser.ask(
        "[...document.querySelectorAll('#windows button')].find((each) => each.innerText === 'Whole run').click()"
    )
    steps = bars(browser, "(data, trace) => trace.name.startsWith('steps')")
    assert len(steps) == len(run.actions.drop_duplicates(["worker", "step", "epoch"]))
    browser.ask("Plotly.relayout('timeline', { 'xaxis.range[0]': 100, 'xaxis.range[1]': 130 }).then(() => null)")
    assert browser.wait_for("document.getElementById('timeline').data.some((each) => each.name === 'forward')")
    assert browser.complaints == []


def test_what_comes_from_outside_cannot_act(browser: Browser, tmp_path: Path) -> None:
    """Hostile text stands in every text of a run: model, name, reasons, faults, errors."""
    events = []
    for event in MadeUpRun(dead=((5, 2),)).events():
        changed: dict[str, dict[str, Any]] = {
            "epoch": {"reason": EVIL, "verdict": [[who, EVIL] for who, *_ in event.get("verdict", [])]}
        }
        changed |= {"job": {"model": EVIL, "model_args": {EVIL: EVIL}}, "fault": {"fault": EVIL}}
        events.append(event | changed.get(event["event"], {}))
    events.insert(-1, agent("validation", 1300, step=7, name=LINK, samples=8, loss=1.0, metrics={}))
    events.insert(-1, {"event": "failed", "error": EVIL, "at_ns": events[-1]["at_ns"]})
    events[-1] = events[-1] | {"outcome": "failed"}
    run = load(events, EVIL)
    opened(browser, run, tmp_path)
    assert browser.complaints == []
    assert EVIL in browser.ask("document.body.innerText")
    assert browser.ask("document.title").startswith(EVIL)
    assert browser.ask("document.images.length") == 0
    stored, started = 4, 2  # scripts of the page, and the programs that its own script starts
    assert browser.ask("document.scripts.length") == stored + started
    assert LINK in browser.ask("document.querySelector('#loss .legend').textContent")
    x, y = pixel_of(browser, run.recovery["begin_ms"][0], 2)
    browser.point_at(x, y)
    assert "onerror" in browser.wait_for("document.querySelector('#timeline .hoverlayer .hovertext')?.textContent")


class Elements(HTMLParser):
    """The names of the elements of a page, and its text."""

    def __init__(self, page: str):
        super().__init__()
        self.names: Counter[str] = Counter()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names[tag] += 1

    def handle_data(self, data: str) -> None:
        self.text += data


def planted(place: str) -> str:
    return f"</script></td><script>alert('{place}')</script><img src=\"x\">&"


def with_planted(kind: str, record: Any) -> Any:
    """Returns a planted text, or a record with only planted texts."""
    if isinstance(record, str):
        return planted(kind)
    texts = [each.name for each in fields(record) if isinstance(getattr(record, each.name), str)]
    return replace(record, **{name: planted(f"{kind}.{name}") for name in texts if name not in PARSED})


PARSED = {"began", "gpu", "slots", "stall_bound"}  # their text decides how others are told
SEVERAL = ("gaps", "moves", "loads", "deadly", "faults")  # fields that are tuples of texts


def test_no_text_of_a_run_becomes_markup() -> None:
    """Every text of a run's tables and records is hostile here."""
    *made, ended = layout_events()
    made += [agent("check", 2000, name="trajectory", result="failed", text="")]
    made += [agent("validation", 2000, step=7, name="", samples=8, loss=1.0, metrics={planted("metric"): 0.5})]
    run = load([*made, ended], planted("name"))
    changed: dict[str, Any] = {name: (planted(name),) for name in SEVERAL}
    for field in fields(run):
        value = getattr(run, field.name)
        if isinstance(value, pd.DataFrame):
            texts = [name for name in value.columns if value[name].dtype.kind in "OU" or value[name].dtype == "str"]
            hostile = {name: planted(f"{field.name}.{name}") for name in texts if name not in PARSED}
            changed[field.name] = value.assign(**hostile)
    changed |= {name: with_planted(name, getattr(run, name)) for name in ("host", "not_kept", "error")}
    changed["raised"] = tuple(with_planted("raised", each) for each in run.raised)
    changed["job"] = replace(run.job, model=planted("model"), data=planted("data"))
    found = Elements(page(replace(run, **changed)))
    scripts = 4
    assert (found.names["script"], found.names["img"]) == (scripts, 0)
    shown = """
    name model data metric gaps moves loads deadly not_kept host.cpu host.torch host.python
    raised.error raised.frames raised.traceback recovery.what recovery.reason recovery.outcome recovery.rung
    recovery.last_action checks.name checks.text checks.result evaluations.set history.what history.text workers.state
    workers.last_action
    """.split()
    assert [place for place in shown if planted(place) not in found.text] == []


def test_the_policy_stops_a_script_that_is_not_ours(browser: Browser, run: RunTables, tmp_path: Path) -> None:
    """Shows that the test of escaping above can fail, and that the policy then stops the script."""
    path = tmp_path / "report.html"
    path.write_text(page(run).replace("<h1", "<script>document.title = 'owned'</script><h1", 1), encoding="utf-8")
    with pytest.raises(AssertionError, match="Content Security Policy"):
        browser.open(path)
    assert browser.ask("document.title") != "owned"
    browser.complaints.clear()


def test_a_long_run_opens_quickly(chromium: str, tmp_path: Path) -> None:
    """Measures processor time, because other processes of the machine lengthen wall-clock time.

    A browser may open a file in another process, which counts anew: so this one has opened no page before.
    """
    run = load(MadeUpRun(stages=8, steps=200, dead=((50, 3), (120, 5))).events(), "long")
    with Browser(chromium, tmp_path / "home") as browser:
        taken_s = opened(browser, run, tmp_path)
        work_s = browser.work_s()
        assert browser.ask("let sum = 0; for (let i = 0; i < 1e8; i++) sum += i % 7; sum > 0")
        loop_s = browser.work_s() - work_s
        print(f"drawn in {taken_s:.2f} s, of which {work_s:.2f} s of work; a loop took {loop_s:.2f} s")
        assert browser.complaints == []
    assert 0 < work_s < GOAL * loop_s


def test_a_page_is_small(run: RunTables) -> None:
    """Held 4.8 MB of Plotly, for a run of any length."""
    long = load(MadeUpRun(stages=4, steps=80, dead=((30, 2),)).events(), "long")
    assert len(page(run)) < len(page(long)) < 1_000_000


def test_a_browser_that_cannot_unpack_still_shows_the_tables(browser: Browser, run: RunTables, tmp_path: Path) -> None:
    source = "delete window.DecompressionStream"
    number = browser.call("Page.addScriptToEvaluateOnNewDocument", source=source)["identifier"]
    try:
        opened(browser, run, tmp_path)
        assert browser.complaints == []
        text = browser.ask("document.body.innerText")
        assert "This browser is too old to draw the charts" in text
        assert "worker 2 was killed (SIGKILL)" in text
    finally:
        browser.call("Page.removeScriptToEvaluateOnNewDocument", identifier=number)
    opened(browser, run, tmp_path)
    assert "too old" not in browser.ask("document.body.innerText")


@pytest.mark.parametrize("number", [0, 1, 40])
def test_runs_of_which_little_is_known_are_drawn(browser: Browser, tmp_path: Path, number: int) -> None:
    opened(browser, load(MadeUpRun().events()[:number], "cut off"), tmp_path)
    assert browser.complaints == []
