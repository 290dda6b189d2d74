"""The site: it builds without a warning, its links lead somewhere, and it asks nothing of other hosts."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from filelock import FileLock
from mkdocs.commands.build import build
from mkdocs.config import load_config

import prefixkit
from prefixkit.testing.application.browser import CHROMIUM, Browser

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LOADED = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src"), ("source", "src")}


class Page(HTMLParser):
    """What a page names: its anchors, what it links to, and what a browser loads with it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.anchors, self.links, self.loads = path, set[str](), list[str](), list[str]()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value or "")
            elif (tag, name) in LOADED:
                self.loads.append(value or "")
            elif tag == "a" and name == "href":
                self.links.append(value or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site, which workers share; a warning of the build is an error."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    folder, done = shared / "site", shared / "site.done"
    with FileLock(shared / "site.lock"):
        if not done.exists():
            logging.getLogger("mkdocs").setLevel(logging.WARNING)
            build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True))
            done.touch()
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html")}


def test_every_page_is_built(pages: dict[Path, Page], site: Path) -> None:
    sources = {path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md")}
    assert sources <= {path.relative_to(site) for path in pages}


def test_links_and_anchors_within_the_site_exist(pages: dict[Path, Page], site: Path) -> None:
    dead = []
    for page in pages.values():
        for link in (*page.links, *page.loads):
            target = urlsplit(link)
            if target.scheme or page.path.name == "404.html":  # links of the latter begin at the host
                continue
            path = (page.path.parent / unquote(target.path)).resolve() if target.path else page.path
            path = path / "index.html" if path.is_dir() else path
            known = not target.fragment or path not in pages or unquote(target.fragment) in pages[path].anchors
            if not (path.is_file() and known):
                dead.append(f"{page.path.relative_to(site)}: {link}")
    assert not dead


def test_pages_load_nothing_from_other_hosts(pages: dict[Path, Page], site: Path) -> None:
    assert not {load for page in pages.values() for load in page.loads if urlsplit(load).netloc}
    assert not [css for css in site.rglob("*.css") if re.search(r"url\([\"']?(https?:)?//", css.read_text())]


def test_the_reference_has_every_public_name_and_every_example() -> None:
    reference, examples = (DOCS / "reference" / f"{name}.md" for name in ("api", "examples"))
    shown = set(re.findall(r"^::: prefixkit\.(?:.*\.)?(\w+)$", reference.read_text(), re.MULTILINE))
    assert set(prefixkit.__all__) - shown == {"CAUSAL", "variants"}
    files = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert set(re.findall(r'--8<-- "examples/(\w+)\.py"', examples.read_text())) == files


# Where a page may begin to name a file.
FOLDERS = ("", "prefixkit", "prefixkit/evaluation", "prefixkit/csrc/attention")


def named_files() -> Iterator[tuple[str, str]]:
    """Each page of prose with each file of the project that it names; the log names files of its time."""
    for page in (path for path in DOCS.rglob("*.md") if path.parent.name not in ("appendix", "measured")):
        for name in re.findall(r"`((?:\w+/)+\w+\.(?:py|cu|cuh|sh|md|toml))`", page.read_text()):
            yield str(page.relative_to(DOCS)), name


def test_files_that_pages_name_exist() -> None:
    missing = [
        (page, name) for page, name in named_files() if not any((ROOT / folder / name).exists() for folder in FOLDERS)
    ]
    assert not missing


def test_no_line_but_those_of_tables_is_longer_than_120_columns() -> None:
    pages = [*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("*/README.md")]
    lines = {(page, line) for page in pages for line in page.read_text().splitlines() if not line.startswith("|")}
    assert not [f"{page.relative_to(ROOT)}: {line}" for page, line in lines if len(line) > 120]


# Types a word into the search, and gives the addresses that it finds, once there are any.
SEARCH = """
(async () => {
  const field = document.querySelector("[data-md-component=search-query]")
  field.focus()
  field.value = "preemption"
  field.dispatchEvent(new KeyboardEvent("keyup", { bubbles: true }))
  for (let turn = 0; turn < 100; turn++) {
    const found = [...document.querySelectorAll(".md-search-result__item a")].map(one => one.href)
    if (found.length) return found
    await new Promise(resolve => setTimeout(resolve, 50))
  }
  return []
})()
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no chromium on the path to open the pages in")
    one = Browser()
    yield one
    one.close()


def test_no_page_is_wider_than_a_phone(
    browser: Browser, pages: dict[Path, Page], site: Path, draw: Callable[[Sequence[Any], int], list[Any]]
) -> None:
    wide = []
    browser.ask("Network.setBlockedURLs", urls=["*.js*"])  # scripts take longer than the pages, and change no width
    for path in draw([*pages], 24):
        browser.open(path, 390)
        if browser.value("document.documentElement.scrollWidth") > 390:
            wide.append(str(path.relative_to(site)))
    browser.ask("Network.setBlockedURLs", urls=[])
    assert not wide


def test_pages_that_are_opened_from_a_folder_can_be_searched(browser: Browser, site: Path) -> None:
    browser.open(site / "index.html", 1300)
    assert (site / "howto" / "memory.html").as_uri() in {found.partition("#")[0] for found in browser.value(SEARCH)}
