"""Every block of docs/op.md and of docs/variants.md runs, in its order; those that need a GPU where there is one."""

import re
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from prefixkit import variants
from scripts import draw_masks

DOCS = Path(__file__).parents[1] / "docs"
PAGES = {"op.md": 1, "variants.md": 0}  # and how many blocks need a GPU
GPU = "<!-- needs a GPU -->\n"


def blocks(page: str) -> list[tuple[bool, str]]:
    """Whether each block needs a GPU, and its code, at its own lines of the page for tracebacks."""
    text = (DOCS / page).read_text()
    found = re.finditer(rf"^({GPU})?```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(one[1] is not None, "\n" * text.count("\n", 0, one.start(2)) + one[2]) for one in found]


def run_tutorial(page: str, gpu: bool) -> None:
    torch.manual_seed(0)
    names: dict[str, object] = {}
    for needs_gpu, code in blocks(page):
        if gpu or not needs_gpu:
            exec(compile(code, str(DOCS / page), "exec"), names)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_runs(page: str) -> None:
    run_tutorial(page, gpu=torch.cuda.is_available())


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_found(page: str) -> None:
    text = (DOCS / page).read_text()
    assert len(blocks(page)) == text.count("```python") > 7
    assert [needs_gpu for needs_gpu, _ in blocks(page)].count(True) == text.count("needs a GPU -->") == PAGES[page]


@pytest.mark.parametrize("name", ["kv_pool", "plan", "append", "attend", "commit", "merge", "static_decode"])
def test_the_page_shows_each_function(name: str) -> None:
    assert any(f"prefixkit.{name}(" in code for _, code in blocks("op.md"))


def test_the_gallery_shows_each_variant_in_a_picture_that_is_up_to_date() -> None:
    page = (DOCS / "variants.md").read_text()
    for name in vars(variants):
        assert name.startswith("_") or f"`{name}" in page or f"{name}(" in page, name
    assert set(re.findall(r"masks/(\w+)\.svg", page)) == {path.stem for path in (DOCS / "masks").iterdir()}
    assert {path.stem for path in (DOCS / "masks").iterdir()} == set(draw_masks.GALLERY)
    for name, make in draw_masks.GALLERY.items():
        assert (DOCS / "masks" / f"{name}.svg").read_text() == draw_masks.draw(make()), f"run draw_masks.py for {name}"


@pytest.mark.parametrize("name", ["causal", "natten_2d", "draft_tree"])
def test_a_picture_shows_what_the_mask_shows(name: str) -> None:
    size, make = draw_masks.SIZE, draw_masks.GALLERY[name]
    drawn = torch.zeros(size, size, dtype=torch.bool)
    for begin, row, count in re.findall(r"M(\d+) (\d+)h(\d+)v1H\1z", (DOCS / "masks" / f"{name}.svg").read_text()):
        drawn[int(row), int(begin) : int(begin) + int(count)] = True
    assert torch.equal(drawn, create_mask(variants.as_mask_mod(make()), 1, 1, size, size, device="cpu")[0, 0])
