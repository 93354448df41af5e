"""The page of a matrix in a real browser: its colours and its text about a cell; text from outside is not executed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine.core.checks.cell_result import CellResult
from engine.report.pages.matrix_page import LEGEND, MatrixRunFacts, grid_of, matrix_page
from tests.report.browser import Browser
from tests.report.test_matrix_forms import ALL, FAILED, INVALID, PASSED, cells_of

EVIL = "</style><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
RUN = MatrixRunFacts(
    "1 January 2026, 01:02",
    ["Job: model mlp.", "Machine: Made-up CPU."],
    lambda cell: f"bamboo matrix smoke --cell {cell}",
    {"step/B/first": "runs/run-2/report.html"},
)
NOT_RUN = ("step/F/last", {"action": "F", "stage": "last", "fault": "kill"})


def opened(
    browser: Browser, folder: Path, results: list[CellResult], name: str = "smoke", run: MatrixRunFacts = RUN
) -> None:
    grid = grid_of([*cells_of(results), NOT_RUN], {each.cell: each for each in results})
    path = folder / "report.html"
    path.write_text(matrix_page(name, grid, results, run))
    browser.open(path)


def colour(browser: Browser, row: int, column: int) -> str:
    cell = f"document.querySelector('.cells tbody').rows[{row}].cells[{column}]"
    return str(browser.ask(f"{cell}.innerText[0] + getComputedStyle({cell}).backgroundColor"))


def test_good_is_green_bad_is_red_and_what_did_not_run_is_grey(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, ALL)
    titles = "[...document.querySelectorAll('.cells th')].map((each) => each.innerText)"
    across = ["fault \u2192", "kill", "stop", "action \u2193\nstage \u2192", "first", "last", "first"]
    assert browser.ask(titles) == [*across, "F", "B"]
    assert (colour(browser, 0, 1), colour(browser, 0, 2)) == ("Prgb(27, 127, 59)", "-rgb(107, 107, 107)")
    assert (colour(browser, 1, 2), colour(browser, 1, 3)) == ("Irgb(138, 90, 0)", "Frgb(179, 38, 30)")
    assert browser.ask("document.querySelector('h1').innerText") == "1 passed, 1 failed, 1 invalid"
    assert LEGEND.replace("  ", ", ") in browser.ask("document.querySelector('.note').innerText")
    assert [INVALID.text in each for each in listed(browser)] == [False, True]
    assert browser.ask("document.querySelector('h2').innerText") == "Cells that did not pass"
    assert (browser.complaints, browser.requests) == ([], [])


def test_an_interrupted_matrix_without_a_failure_is_not_green(browser: Browser, tmp_path: Path) -> None:
    for num_missing, counts, mood in (
        (0, "1 passed, 0 failed, 0 invalid", "good"),
        (2, "1 passed, 0 failed, 0 invalid; interrupted before 2 more", "open"),
    ):
        opened(browser, tmp_path, [PASSED], run=replace(RUN, num_missing=num_missing))
        assert browser.ask("document.querySelector('h1').innerText") == counts
        assert browser.ask("document.querySelector('h1').className") == mood


def listed(browser: Browser) -> list[str]:
    """Returns the page's text about the cells that did not pass."""
    found: list[str] = browser.ask("[...document.querySelectorAll('.others li')].map((each) => each.innerText)")
    return found


def test_the_rows_are_named_by_what_varies() -> None:
    for labels, axis in (({}, "case"), ({"action": "F"}, "action")):
        grid = grid_of([("a/b", labels)], {})
        page = matrix_page("smoke", grid, [], RUN)
        assert grid.axis == axis
        assert f"<span>{axis} &darr;</span>" in page
        assert "fault &rarr;" not in page and "stage &rarr;" not in page  # there is no more than one of either
    assert grid_of([("a/b", {}), ("a/c", {"action": "F"})], {}).axis == "action or case"


def test_pointing_at_a_field_tells_cell_verdict_and_how_to_run_it_again(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, [PASSED])
    seen = "[...document.querySelectorAll('#told > p:not(.note)')].map((each) => each.innerText)"
    browser.point_at(1.0, 1.0)
    assert browser.ask(seen) == []
    box = "document.querySelector('.cell.P').getBoundingClientRect()"
    browser.point_at(*browser.ask(f"[{box}.x + {box}.width / 2, {box}.y + {box}.height / 2]"))
    assert browser.wait_for(f"{seen}[0]").splitlines() == [
        "step/F/first passed in 0.5 s",
        "bamboo matrix smoke --cell step/F/first",
    ]
    grid, told = browser.ask(
        "['.cells', '#told'].map((each) => document.querySelector(each).getBoundingClientRect().toJSON())"
    )
    assert told["left"] >= grid["right"] and told["top"] < grid["bottom"], "the cells are told beside the grid"
    browser.point_at(1.0, 1.0)
    browser.ask("document.querySelector('.cell.none').focus()")  # as a click does
    assert browser.wait_for(f"{seen}[0]").splitlines() == [
        "step/F/last not run",
        "bamboo matrix smoke --cell step/F/last",
    ]


def test_what_comes_from_outside_cannot_act(browser: Browser, tmp_path: Path) -> None:
    labels = {"action": EVIL, "stage": EVIL, "fault": EVIL}
    hostile = CellResult(EVIL, "failed", "hang", EVIL, "kill", 1, 0, "", labels, raised=(EVIL,))
    run = replace(RUN, when=EVIL, facts=(EVIL,), replay=lambda cell: EVIL, pages={EVIL: EVIL})
    opened(browser, tmp_path, [FAILED, hostile], EVIL, run)
    assert browser.ask("[document.images.length, document.scripts.length]") == [0, 1]
    assert EVIL in browser.ask("document.body.innerText")
    assert (browser.complaints, browser.ask("document.title").startswith(EVIL)) == ([], True)


def test_a_field_of_many_cells_tells_the_worst_first(browser: Browser, tmp_path: Path) -> None:
    many = [CellResult(f"case-{number}", "passed", "", "", "kill", 1, 0, "", PASSED.labels) for number in range(20)]
    worst = CellResult("case-20", "failed", "hang", "no end", "kill", 1, 0, "", PASSED.labels)
    opened(browser, tmp_path, [*many, worst])
    assert browser.ask("document.querySelector('.cell.F').innerText") == "F1/21"
    told = browser.ask("document.querySelector('.cell.F .told').textContent")
    assert told.startswith("case-20 failed (hang) in 1.0 s: no end")
    assert told.endswith("and 9 more")


def test_a_field_counts_its_cells_and_a_blank_one_is_no_cell(browser: Browser, tmp_path: Path) -> None:
    """Said "30 passed" over 13 fields without a number, and did not tell a blank field from one that did not run."""
    more = [
        CellResult(f"more-{n}", "passed", "", "", "kill", 2.0, 0, "", PASSED.labels, stall_ms=39.0 + n) for n in (1, 2)
    ]
    more[0] = replace(more[0], stall_bound="at least")
    opened(browser, tmp_path, [*ALL, *more])
    fields = "[...document.querySelectorAll('.cells tbody td')].map((each) => [each.innerText, each.className])"
    assert browser.ask(fields) == [
        ["P3", "cell P"],
        ["-1", "cell none"],
        ["", "blank"],
        ["", "blank"],
        ["I1", "cell I"],
        ["F1", "cell F"],
    ]
    tiles = browser.ask(
        "[...document.querySelectorAll('.tiles div')].map((each) => each.innerText.split(/\\s+/).join(' '))"
    )
    assert tiles[:4] == ["passed 3 of 6 cells", "failed 1", "invalid 1", "not run 1"]
    assert tiles[-2:] == ["training stalled, median \u2265 40 ms", "training stalled, longest \u2265 41 ms"]
    assert "A field without a letter has no cell" in browser.ask("document.querySelector('.note').innerText")
    times = "[...document.querySelectorAll('section:last-of-type tbody tr')].map((each) => each.innerText.split('\\t'))"
    assert browser.ask(times) == [
        ["kill", "4", "3", "1.25", "\u2265 40", "\u2265 41"],
        ["stop", "1", "0", "1.25", "", ""],
    ]


def test_a_cell_that_did_not_pass_links_to_its_run(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, ALL)
    links = "[...document.querySelectorAll('.others a')].map((each) => each.getAttribute('href'))"
    assert browser.ask(links) == ["runs/run-2/report.html"]
    head = browser.ask("document.querySelector('header').innerText")
    assert "1 January 2026, 01:02" in head and "Job: model mlp." in head and "Machine: Made-up CPU." in head


def test_a_cell_that_passed_with_an_exception_of_the_user_is_listed(browser: Browser, tmp_path: Path) -> None:
    """An exception that training survived was on no page."""
    told = "worker 1 raised ValueError: my own bug, in layer 2 of step 3"
    opened(browser, tmp_path, [replace(PASSED, raised=(told,))])
    assert browser.ask("document.querySelector('h1').innerText") == "1 passed, 0 failed, 0 invalid"
    assert browser.ask("document.querySelector('h2').innerText").endswith("or whose workers raised exceptions")
    assert [told in each for each in listed(browser)] == [True]
