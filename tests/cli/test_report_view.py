"""What the terminal shows of a report."""

import io

from rich.console import Console

from prefixkit.cli.report_view import show
from prefixkit.evaluation.report import Facts
from tests.evaluation.report.runs import campaign, small


def shown(facts, width=100):
    console = Console(file=io.StringIO(), width=width, markup=False, emoji=False, highlight=False)
    show(facts, console)
    return console.file.getvalue()


def test_a_small_run():
    text = shown(small(new_tokens=500, seconds=10.0))
    assert "8 samples of 2 problems, 1 of 2 judged solved, 500 new tokens in 10.0 s: 50 tokens/s" in text
    assert "pass@k, mean over 2 problems" in text and "12.5%" in text and "0% to 25.0%" in text
    assert "problems, hardest first" in text and text.index("a/1") < text.index("a/0")
    assert "1 problem not solved by any sample" in text


def test_a_campaign_lists_only_the_hardest_and_the_easiest():
    text = shown(campaign(40, 20))
    assert text.count("HumanEval/") == 10
    assert all(label in text for label in ("T=0.2", "T=0.8", "T=1.2", "plain batch", "ended by a signal"))


def test_groups_stand_below_each_other_in_a_narrow_terminal():
    lines = shown(campaign(40, 20), width=70).splitlines()
    assert max(map(len, lines)) <= 70
    assert sum("95% interval" in line for line in lines) == 2


def test_verdicts_can_be_read_in_a_narrow_terminal():
    text = shown(campaign(40, 20), width=60)
    assert "verdict" in text and "samples" in text and "crashed" in text and "…" not in text.split("hardest")[0]
    assert max(map(len, text.splitlines())) <= 60


def test_hostile_texts_move_no_cursor():
    text = shown(campaign(40, 20, hostile=True))
    assert not set(text) & {"\x1b", "\x00", "\x07", "\u202e", "\ud800"}
    assert max(map(len, text.splitlines())) <= 100


def test_an_empty_run():
    assert "0 samples of 0 problems" in shown(Facts("empty"))
