"""Pages on a screen of 1280 pixels and on a phone, light and dark: nothing is cut, and each word is explained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.report.pages.page import page
from tests.report.browser import Browser
from tests.report.made_up import Event, MadeUpRun, agent, load
from tests.report.test_matrix_forms import ALL
from tests.report.test_matrix_page import opened as open_matrix

SIZES = {"screen": (1280, 800), "phone": (390, 800)}
SHEET_PX = 1224  # 340 mm less the margins, at 96 pixels per inch
GLOO = (
    "transfer from worker 2 failed: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error "
    "[127.0.0.1]:5546: Connection reset by peer. This is typically caused by a remote worker hanging or bugs in the "
    "application. Check the logs of the remote worker before reporting an error. GLHF! \U0001f916"
)
# The elements that reach over the edge of the page, or whose own text is cut.
CUT = """(() => {
  const root = document.documentElement;
  const found = root.scrollWidth > root.clientWidth ? ["document"] : [];
  for (const each of document.querySelectorAll("section, table, td, th, dt, dd, pre, p, h1, h2, .scroll, .chart")) {
    const box = each.getBoundingClientRect();
    const isCut = each.scrollWidth > each.clientWidth + 1 && each.clientWidth > 0;
    if (box.right > root.clientWidth + 1 || isCut) found.push(each.tagName + ": " + each.innerText.slice(0, 40));
  }
  return found;
})()"""


def events() -> list[Event]:
    """Returns a run of eight workers that lost two, with an exception and a message of gloo."""
    made = MadeUpRun(stages=8, steps=14, dead=((5, 2), (9, 6))).events()
    verdict = next(place for place, each in enumerate(made) if each["event"] == "epoch" and each["verdict"])
    at_ms = made[verdict]["at_ns"] / 1e6
    raised = {
        "error": "ValueError: my own bug",
        "place": "layer 2 (fc2)",
        "file": "mine.py",
        "line": 7,
        "function": "forward",
    }
    told = {
        "frames": "mine.py:7, in forward\n    raise ValueError('my own bug')",
        "traceback": "Traceback\n  frames of torch",
    }
    made[verdict:verdict] = [
        agent("suspicion", at_ms, of=1, text=GLOO),
        agent("raised", at_ms, of=2, step=5, **raised, **told),
    ]
    return made


@pytest.fixture(name="sized", params=SIZES)
def _sized(request: pytest.FixtureRequest, browser: Browser) -> Iterator[Browser]:
    browser.resize(*SIZES[request.param])
    yield browser
    browser.call("Emulation.clearDeviceMetricsOverride")
    browser.prefer("light")


@pytest.mark.parametrize("kind", ["run", "matrix"])
def test_nothing_is_cut(sized: Browser, kind: str, tmp_path: Path) -> None:
    """The true cost of a recovery stood in columns beyond the edge of a table that had to be scrolled sideways."""
    if kind == "matrix":
        open_matrix(sized, tmp_path, ALL)
    else:
        path = tmp_path / "page.html"
        path.write_text(page(load(events(), "layout")), encoding="utf-8")
        sized.open(path)
    sized.ask("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    for scheme in ("light", "dark"):
        sized.prefer(scheme)
        assert sized.ask(CUT) == [], scheme
    assert (sized.complaints, sized.requests) == ([], [])


def test_a_printed_page_is_unfolded_and_as_wide_as_its_sheet(browser: Browser, tmp_path: Path) -> None:
    """A print cut the wide table, and the timeline, at the edge of the paper."""
    path = tmp_path / "report.html"
    path.write_text(page(load(events(), "paper")), encoding="utf-8")
    browser.resize(1600, 900)
    browser.open(path)
    try:
        browser.ask("dispatchEvent(new Event('beforeprint'))")
        browser.call("Emulation.setEmulatedMedia", media="print")
        browser.resize(SHEET_PX, 1700)
        assert browser.ask(CUT) == []
        assert browser.ask("[...document.querySelectorAll('details')].every((each) => each.open)")
    finally:
        browser.call("Emulation.setEmulatedMedia", media="")
        browser.call("Emulation.clearDeviceMetricsOverride")


@pytest.fixture(name="opened")
def _opened(browser: Browser, tmp_path: Path) -> Browser:
    """Returns the browser with a page that nothing has changed: a test that changes it takes its title away."""
    if browser.ask("document.title").startswith("words"):
        return browser
    path = tmp_path / "report.html"
    path.write_text(page(load(events(), "words")), encoding="utf-8")
    browser.open(path)
    return browser


def test_words_are_explained_under_the_mouse_and_to_a_keyboard(opened: Browser) -> None:
    """Merged, heal, regroup, fence and exposure stood on the page without a word about them."""
    opened.ask("document.title = 'changed'")
    words = "[...document.querySelectorAll('abbr')].map((each) => [each.innerText, each.dataset.told, each.tabIndex])"
    told = {text: definition for text, definition, tab in opened.ask(words) if tab == 0}
    phases = {"detect", "agree", "fence", "regroup", "inventory", "plan", "replay", "merged", "heal", "pause"}
    opened.ask("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    told |= {text: definition for text, definition, _ in opened.ask(words)}
    assert phases | {"Exposure", "training stalled", "took over", "waiting", "epoch"} <= told.keys()
    assert all(definition.endswith(".") for definition in told.values())
    tip = "document.getElementById('tip').innerText"
    assert opened.ask(tip) == ""
    opened.ask("[...document.querySelectorAll('abbr')].find((each) => each.innerText === 'fence').focus()")
    assert opened.wait_for(tip) == told["fence"]
    box = opened.ask("document.getElementById('tip').getBoundingClientRect().toJSON()")
    assert box["left"] >= 0 and box["right"] <= opened.ask("innerWidth") and box["bottom"] <= opened.ask("innerHeight")
    opened.ask("document.activeElement.blur()")
    assert opened.ask(tip) == ""
    at = "document.querySelector('h2 abbr').getBoundingClientRect()"
    opened.ask("document.querySelector('h2 abbr').scrollIntoView({ block: 'center' })")
    opened.point_at(*opened.ask(f"[{at}.x + 5, {at}.y + 5]"))
    assert opened.wait_for(tip) == told["Exposure"]


def test_the_costs_of_a_recovery_come_first_and_the_rest_unfolds(opened: Browser) -> None:
    section = "[...document.querySelectorAll('section')].find((each) => each.innerText.startsWith('Recoveries'))"
    heads = opened.ask(f"[...{section}.querySelectorAll('th')].map((each) => each.innerText)")
    assert heads == ["", "what", "step", "took over", "training stalled", "redone", "outcome"]
    rows = opened.ask(f"[...{section}.querySelectorAll('tbody tr')].map((each) => each.cells[3].innerText)")
    assert rows == ["worker 1: stage 2", "worker 5: stage 6"]
    folded = opened.ask(f"[...{section}.querySelectorAll('details')].map((each) => [each.open, each.innerText])")
    assert [is_open for is_open, _ in folded] == [False, False]
    detail = opened.ask(f"{section}.querySelector('details').textContent")
    for text in ("detect1 ms", "samples per second before, during and after", "the state came from", "2 ms"):
        assert text in detail


def test_an_exception_shows_the_users_own_line_first(opened: Browser) -> None:
    """The page of a run that survived an exception of the user's own layer did not mention it."""
    section = "[...document.querySelectorAll('section')].find((each) => each.innerText.startsWith('Exceptions'))"
    shown = opened.ask(f"{section}.innerText")
    assert "worker 2 raised ValueError: my own bug, in layer 2 (fc2) of step 5" in shown
    assert "raise ValueError('my own bug')" in shown
    assert "frames of torch" not in shown
    assert "frames of torch" in opened.ask(f"{section}.querySelector('details').textContent")


def test_texts_and_units_are_for_people(opened: Browser) -> None:
    """Had gloo's advice with an emoji, times of -6.42 ms, "20k ms" of exposure, no memory of the dead."""
    text = opened.ask("document.body.innerText")
    assert "transfer from worker 2 failed: Read error [127.0.0.1]:5546: Connection reset by peer" in text
    assert "GLHF" not in text and "pair.cc" not in text
    times = opened.ask(
        "[...[...document.querySelectorAll('section')].find((each) => each.innerText.startsWith('Observations'))"
        ".querySelectorAll('tbody tr')].map((each) => each.cells[0].innerText)"
    )
    assert not [each for each in times if each.startswith("-")]
    exposure = opened.ask("document.getElementById('exposure').textContent")
    assert "seconds since training began" in exposure
    assert "a second replica of every slot" in exposure and "exposed: another loss could end the run" in exposure
    memory = opened.ask("document.getElementById('memory').textContent")
    assert "worker 2" in memory and "dead, not known" in memory


def ended(browser: Browser, folder: Path, *told: Event, **end: object) -> list[str]:
    """Returns the sign, the mood and the text of the line on the weights of a run with these events after its end."""
    *made, _, last = MadeUpRun(dead=((5, 2),)).events()
    path = folder / "report.html"
    at_ms = last["at_ns"] / 1e6
    run = load([*made, *(agent(at_ms=at_ms, **each) for each in told), last | end], "judged")
    path.write_text(page(run), encoding="utf-8")
    browser.open(path)
    colour = "getComputedStyle(document.querySelector('.weights')).color"
    line: list[str] = browser.ask(f"[document.querySelector('.weights').innerText, {colour}]")
    return line


def test_the_first_line_says_in_colour_whether_the_weights_are_the_same(browser: Browser, tmp_path: Path) -> None:
    """A run whose weights differ had a big green headline, and one whose weights are the same did not say so."""
    same: Event = {
        "event": "comparison",
        "compared": 10,
        "steps": 10,
        "last_step": 9,
        "difference": None,
        "disturbed": 5,
    }
    other = {"step": 2, "layer": 1, "part": "weights", "tensor": "bias", "run": "0a", "twin": "0b"}
    failed: Event = {"event": "check", "name": "trajectory", "result": "failed", "text": "step 2: other weights"}
    good, bad, undecided = "rgb(0, 112, 79)", "rgb(179, 71, 0)", "rgb(0, 86, 138)"
    text, colour = ended(browser, tmp_path, same)
    assert (text, colour) == ("\u2713 Weights identical to the run without the fault, 10 of 10 steps.", good)
    assert "Weights" not in browser.ask("document.querySelector('h1').innerText")
    text, colour = ended(browser, tmp_path, same | {"difference": other}, failed, outcome="failed", exit_code=1)
    assert (text, colour) == ("\u2717 Weights differ from those of the run without the fault.", bad)
    assert browser.ask("getComputedStyle(document.querySelector('h1')).color") == bad
    checks = (
        "[...document.querySelector('section:nth-of-type(2)').querySelectorAll('td')].map((each) => each.innerText)"
    )
    assert browser.ask(checks) == ["trajectory", "failed", "step 2: other weights"]
    assert browser.ask("getComputedStyle(document.querySelector('td.bad')).color") == bad
    text, colour = ended(browser, tmp_path, {"event": "not_compared", "why": "no twin was asked for"})
    assert (text, colour) == ("Weights not compared: no twin was asked for.", undecided)
