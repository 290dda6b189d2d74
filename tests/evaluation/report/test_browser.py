"""The page in a browser: it fits, it is silent, and what it offers works."""

import pytest

from prefixkit.evaluation.report import write_report
from tests.evaluation.report.runs import campaign, small

# Elements that reach beyond the window, unless a box around them scrolls or cuts them.
BEYOND = """
[...document.body.querySelectorAll("*")].filter(one => {
  if (one.getBoundingClientRect().right <= innerWidth + 1) return false;
  for (let at = one; at !== document.body; at = at.parentElement)
    if (getComputedStyle(at).overflowX !== "visible") return false;
  return true;
}).map(one => one.outerHTML.slice(0, 100))
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    runs = {"campaign": campaign(), "hostile": campaign(40, 20, hostile=True), "small": small()}
    return {name: write_report(facts, folder / f"{name}.html")[0] for name, facts in runs.items()}


@pytest.mark.parametrize("name", ["campaign", "hostile", "small"])
def test_the_page_is_no_wider_than_the_window(browser, quiet, pages, name):
    browser.open(pages[name], 320)
    browser.value("for (const one of document.querySelectorAll('details')) one.open = true")
    browser.value("new Promise(done => setTimeout(done, 300))")  # in which programs are opened
    for width in (320, 768, 1280):
        browser.resize(width)
        assert browser.value("innerWidth") == width
        assert browser.value("document.scrollingElement.scrollWidth <= innerWidth"), width
        assert browser.value(BEYOND) == [], width


def test_every_problem_has_a_row_a_cell_and_candidates(browser, pages):
    browser.open(pages["campaign"], 1280)
    for places in ("#problem-table tbody tr", ".strip a", ".chips > details"):
        assert browser.value(f"document.querySelectorAll('{places}').length") == 164


def test_one_of_two_figures_is_seen(browser, pages):
    browser.open(pages["campaign"], 390)
    seen = "[...document.querySelectorAll('svg.figure')].filter(one => one.getBoundingClientRect().width > 0)"
    whole = f"{seen}.every(one => one.getBoundingClientRect().width >= 0.94 * one.viewBox.baseVal.width)"
    for width in (390, 1280):
        browser.resize(width)
        assert browser.value(f"{seen}.length") == 5, width
        assert browser.value(whole), f"{width}: scaled down, so that its text is smaller"


def test_schemes_differ(browser, pages):
    paper = "getComputedStyle(document.body).backgroundColor"
    browser.open(pages["small"], 390, "light")
    light = browser.value(paper)
    browser.open(pages["small"], 390, "dark")
    assert browser.value(paper) != light
    assert browser.value("getComputedStyle(document.querySelector('.o-passed')).fill") == "rgb(90, 165, 226)"


def test_sorting_and_filtering(browser, quiet, pages):
    browser.open(pages["campaign"], 1280)
    first = "document.querySelector('#problem-table tbody tr').dataset.id"
    names = "document.querySelectorAll('#problem-table thead button')[0]"
    assert browser.value("document.querySelectorAll('#problem-table thead button').length") == 6
    browser.value(f"{names}.click()")
    assert browser.value(first) == "HumanEval/0"
    browser.value(f"{names}.click()")
    assert browser.value(first) == "HumanEval/163"
    assert browser.value(f"{names}.closest('th').getAttribute('aria-sort')") == "descending"
    rate = "document.querySelectorAll('#problem-table thead button')[1]"
    browser.value(f"{rate}.click(); {rate}.click()")
    rates = browser.value("[...document.querySelectorAll('#problem-table tbody tr')].map(r => +r.cells[1].dataset.v)")
    assert rates == sorted(rates, reverse=True)
    browser.value(
        "const box = document.getElementById('problem-filter');"
        "box.value = 'eval/12'; box.dispatchEvent(new Event('input'))"
    )
    assert browser.value("document.getElementById('problem-shown').textContent") == "11 of 164 shown"
    assert browser.value("document.querySelectorAll('.chips > details:not(.unlisted)').length") == 11


def test_a_link_opens_the_programs(browser, pages):
    browser.open(pages["campaign"], 390)
    browser.value("document.querySelector('#problem-table tbody a').click()")
    browser.value("new Promise(done => setTimeout(done, 200))")
    assert browser.value("document.querySelectorAll('.chips > details[open]').length") == 1


def test_a_table_wider_than_its_box_scrolls_in_it(browser, pages):
    browser.open(pages["campaign"], 390)
    assert browser.value("[...document.querySelectorAll('.box')].some(one => one.scrollWidth > one.clientWidth)")
    assert browser.value("[...document.querySelectorAll('.box')].every(one => one.tabIndex === 0)")


def test_a_policy_keeps_scripts_out(browser, pages):
    browser.open(pages["small"], 1280)
    browser.value(
        "const one = document.createElement('script'); one.textContent = 'window.ran = true';document.body.append(one)"
    )
    assert browser.value("window.ran === undefined")
