"""Every block of the tutorials runs, in its order, as it is shown; those that need a GPU where there is one."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from prefixkit import variants
from prefixkit.testing.application.command_line import log_levels_of_its_own, run
from scripts import draw_masks

ROOT = Path(__file__).parents[2]
DOCS, MASKS = ROOT / "docs", ROOT / "docs" / "tutorials" / "masks"
# A block may follow one of these comments: then it runs on such machines alone, or nowhere.
NOTES = {
    "needs a GPU": torch.cuda.is_available(),
    "needs xgrammar": find_spec("xgrammar") is not None,
    "not run: needs a download": False,
    "not run: needs several processes": False,
}
TUTORIALS = sorted(str(path.relative_to(DOCS)) for path in (DOCS / "tutorials").glob("*.md"))
PAGES = [*TUTORIALS, "howto/constrain.md", "howto/memory.md", "howto/resume.md", "reference/search.md"]
BLOCK = re.compile(r"^(?:<!-- ([^\n]+) -->\n)?```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> list[tuple[str, str, str]]:
    """Note, language and text of each block; the text of Python at its own lines of the page, for tracebacks."""
    text = (DOCS / page).read_text()
    found = []
    for one in BLOCK.finditer(text):
        shift = "\n" * text.count("\n", 0, one.start(3)) if one[2] == "python" else ""
        found.append((one[1] or "", one[2], shift + one[3]))
    return found


def run_page(page: str) -> None:
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": "tutorial"}
    for note, language, text in blocks(page):
        if not NOTES.get(note, True):
            continue
        if " &\n" in text:
            run_shell(text)
        elif language == "python":
            exec(compile(text, str(DOCS / page), "exec"), names)
        else:
            for line in text.replace("\\\n", " ").splitlines():
                run_line(shlex.split(line, comments=True))


def run_shell(text: str) -> None:
    """Commands of which one runs beside the others, to be killed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    subprocess.run(["bash", "-e", "-c", text], env=environment, check=True, timeout=120)


def run_line(words: list[str]) -> None:
    """A command: `prefixkit` in this process, for a new one imports torch for seconds."""
    if words[:2] != ["prefixkit", "evaluate"] or shutil.which("bwrap"):
        assert words[0] == "prefixkit", words
        run(*words[1:])


@pytest.mark.parametrize("page", PAGES)
def test_every_block_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with log_levels_of_its_own():
        run_page(page)


def test_the_quickstart_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with log_levels_of_its_own():
        run_page("quickstart.md")


@pytest.mark.parametrize("page", ["quickstart.md", *PAGES])
def test_every_block_is_found(page: str) -> None:
    text, found = (DOCS / page).read_text(), blocks(page)
    assert len(found) == len(re.findall(r"```(?:python|sh)", text)) > 0
    assert {note for note, _, _ in found} <= {"", *NOTES}
    assert sum(note != "" for note, _, _ in found) == text.count("<!--")


@pytest.mark.parametrize("name", ["kv_pool", "plan", "append", "attend", "commit", "merge", "static_decode"])
def test_the_page_of_the_op_shows_each_function(name: str) -> None:
    assert any(f"prefixkit.{name}(" in code for _, _, code in blocks("tutorials/op.md"))


def test_the_gallery_shows_each_variant_in_a_picture_that_is_up_to_date() -> None:
    page = (DOCS / "tutorials" / "variants.md").read_text()
    for name in vars(variants):
        assert name.startswith("_") or f"`{name}" in page or f"{name}(" in page, name
    assert set(re.findall(r"masks/(\w+)\.svg", page)) == {path.stem for path in MASKS.iterdir()}
    assert {path.stem for path in MASKS.iterdir()} == set(draw_masks.GALLERY)
    for name, make in draw_masks.GALLERY.items():
        assert (MASKS / f"{name}.svg").read_text() == draw_masks.draw(make()), f"run draw_masks.py for {name}"


@pytest.mark.parametrize("name", ["causal", "natten_2d", "draft_tree"])
def test_a_picture_shows_what_the_mask_shows(name: str) -> None:
    size, make = draw_masks.SIZE, draw_masks.GALLERY[name]
    drawn = torch.zeros(size, size, dtype=torch.bool)
    for begin, row, count in re.findall(r"M(\d+) (\d+)h(\d+)v1H\1z", (MASKS / f"{name}.svg").read_text()):
        drawn[int(row), int(begin) : int(begin) + int(count)] = True
    assert torch.equal(drawn, create_mask(variants.as_mask_mod(make()), 1, 1, size, size, device="cpu")[0, 0])
