"""Every block of docs/op.md runs, one after the other; those that need a GPU where there is one."""

import re
from pathlib import Path

import pytest
import torch

TUTORIAL = Path(__file__).parents[1] / "docs" / "op.md"
GPU = "<!-- needs a GPU -->\n"


def blocks() -> list[tuple[bool, str]]:
    """Whether each block needs a GPU, and its code, at its own lines of the page for tracebacks."""
    text = TUTORIAL.read_text()
    found = re.finditer(rf"^({GPU})?```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(one[1] is not None, "\n" * text.count("\n", 0, one.start(2)) + one[2]) for one in found]


def run_tutorial(gpu: bool) -> None:
    torch.manual_seed(0)
    names: dict[str, object] = {}
    for needs_gpu, code in blocks():
        if gpu or not needs_gpu:
            exec(compile(code, str(TUTORIAL), "exec"), names)


def test_every_block_runs() -> None:
    run_tutorial(gpu=torch.cuda.is_available())


def test_every_block_is_found() -> None:
    assert len(blocks()) == TUTORIAL.read_text().count("```python") > 7
    assert [needs_gpu for needs_gpu, _ in blocks()].count(True) == TUTORIAL.read_text().count("needs a GPU -->") == 1


@pytest.mark.parametrize("name", ["kv_pool", "plan", "append", "attend", "commit", "merge", "static_decode"])
def test_the_page_shows_each_function(name: str) -> None:
    assert any(f"prefixkit.{name}(" in code for _, code in blocks())
