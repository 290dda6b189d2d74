"""Pages and pictures that scripts make are those that are committed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import compatibility_page, draw_trees, measured_pages

PICTURES, MEASURED = draw_trees.pictures(), dict(measured_pages.pages())


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_of_trees_are_up_to_date(name: str) -> None:
    assert (draw_trees.FOLDER / f"{name}.svg").read_text() == PICTURES[name], "run python scripts/draw_trees.py"


def test_the_picture_of_a_tree_says_what_the_tree_holds() -> None:
    tree = draw_trees.step_of(draw_trees.example()).snapshot
    assert f"{tree.num_tokens:,} tokens stored; {tree.num_tokens_unshared:,} without sharing" in PICTURES["tree"]
    home = (measured_pages.ROOT / "docs" / "index.md").read_text().replace("\n", " ")
    assert f"{tree.num_tokens:,} tokens are stored" in home and f"{tree.num_tokens_unshared:,}" in home


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_measured_pages_are_up_to_date(path: Path) -> None:
    assert path.read_text() == MEASURED[path], "run python -m scripts.measured_pages"


def test_compatibility_is_up_to_date() -> None:
    result = json.loads(compatibility_page.RESULTS.read_text())
    made = compatibility_page.page(result)
    assert compatibility_page.PAGE.read_text() == made, "run python scripts/compatibility.py --write"


@pytest.mark.parametrize("one", compatibility_page.GPU, ids=lambda one: one.shape)
def test_files_have_the_shapes_that_the_compatibility_page_names(one: compatibility_page.Recorded) -> None:
    assert all(one.shape in (compatibility_page.RECORDED / file).read_text() for file in one.files)
