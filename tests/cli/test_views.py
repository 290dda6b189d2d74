"""The picture of a tree."""

import io

from rich.console import Console

from prefixkit.cli.views import plant, show_tree


def picture(prompts, width=120, **options):
    tree, names = plant([list(text.encode()) for _, text in prompts], [name for name, _ in prompts])
    console = Console(file=io.StringIO(), width=width)
    show_tree(tree, names, lambda tokens: bytes(tokens).decode(), "title", console, **options)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_who_shares_what():
    assert picture([("a", "shared one"), ("b", "shared two"), ("c", "else")], samples=4) == [
        "title",
        "├── 7 tokens  shared by 8  “shared”",
        "│   ├── 3 tokens  shared by 4  a  “one”",
        "│   └── 3 tokens  shared by 4  b  “two”",
        "└── 4 tokens  shared by 4  c  “else”",
    ]


def test_equal_prompts_end_at_one_node_and_markup_is_text():
    assert picture([("[bold]x", "[red]"), ("y", "[red]")]) == [
        "title",
        "└── 5 tokens  shared by 2  [bold]x, y  “[red]”",
    ]


def test_many_children_are_summed_up():
    lines = picture([(str(number), f"p{chr(97 + number)}{'x' * number}") for number in range(9)], most=2)
    assert len(lines) == 5
    assert lines[-1] == "    └── … and 7 more, 42 tokens"


def test_long_text_is_cut_in_the_middle():
    (_, line) = picture([("a", "first words " + "x" * 500 + " last words")])
    assert "“first words" in line
    assert line.endswith("last words”")


def test_what_is_deeper_than_the_terminal_is_wide_is_summed_up():
    lines = picture([(str(n), "x" * n) for n in range(1, 2001)], width=64)
    assert len(lines) == 10  # the title, 8 levels, and what is below
    assert lines[1] == "└── 1 token  shared by 2,000  1  “x”"
    assert lines[-1].strip() == "└── … and 1 more, 1,992 tokens"


def test_names_and_texts_hold_no_control_characters():
    assert picture([("a\n\x1b[2J", "\x1b]0;x\x07\u202e")]) == [
        "title",
        "└── 9 tokens  a\\n\\u001b[2J  “\\u001b]0;x\\u0007\\u202e”",
    ]


def test_a_narrow_terminal_cuts_lines_and_wraps_none():
    assert picture([("a", "some words that do not fit")], width=32) == ["title", "└── 26 tokens  a  “some words t…"]
