"""Code blocks as models write them."""

import pytest

from prefixkit.evaluation.tasks.markdown import (
    Block,
    after_fence,
    before_fence,
    code_blocks,
    open_block,
    without_thinking,
)


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("no block", []),
        ("```python\na\n```", [Block("python", "a\n")]),
        ("```\na\n```\nand\n~~~ C++ \nb\n~~~\n", [Block("", "a\n"), Block("c++", "b\n")]),
        ("```py\na", [Block("py", "a\n", closed=False)]),
        ("```py", [Block("py", "", closed=False)]),
        ("````\n```\na\n```\n````", [Block("", "```\na\n```\n")]),
        ("```\n~~~\n```", [Block("", "~~~\n")]),
        ("  ```py\n  a\n    b\n  ```", [Block("py", "a\n  b\n")]),
        ("> ```py\n> a\n> ```", [Block("py", "a\n")]),
        ("```py\na\n```py\nb\n```", [Block("py", "a\n"), Block("py", "b\n")]),
        ("Code: ```py\na\n```", [Block("py", "a\n")]),
        ("```py\nreturn a```\nDone.", [Block("py", "return a\n")]),
        ("Use `a` and ``b``.", []),
        ('```{.python title="a"}\na\n```', [Block("python", "a\n")]),
    ],
)
def test_blocks(text, blocks):
    assert code_blocks(text) == blocks


def test_the_block_that_a_text_ends_in():
    assert open_block("```py\na\n") == "a\n"
    assert open_block("```py\na\n```\n") is None
    assert open_block("a") is None


@pytest.mark.parametrize(
    ("text", "before", "after"),
    [
        ("a\n```\nb", "a\n", "b"),
        ("```\nb", "", "b"),
        ("a", "a", ""),
        ("a```\nb", "a", ""),
        ("a\n```python\nb\n```", "a\n", "```python\nb\n```"),
    ],
)
def test_what_stands_before_and_behind_the_end_of_a_block(text, before, after):
    assert (before_fence(text), after_fence(text)) == (before, after)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("a", "a"),
        ("<think>a</think>b", "b"),
        ("a</think>b", "b"),
        ("a<think>b</think>c<thinking>d</thinking>e", "ace"),
        ("a<think>b", "a"),
        ("<think><think>a</think>b", "b"),
        ("a </think> b </think> c", " c"),
        ("a < b and <b>", "a < b and <b>"),
    ],
)
def test_thinking_is_no_part_of_an_answer(text, answer):
    assert without_thinking(text) == answer
