"""What facts count, refuse and give as JSON."""

import json

import pytest

from prefixkit.evaluation.judge.verdict import OUTCOMES as JUDGED
from prefixkit.evaluation.report import OUTCOMES, Branch, Candidate, Facts, Picture, Problem, as_json, write_report
from tests.evaluation.report.runs import HOSTILE, campaign, small


def test_outcomes_are_the_judges_and_one_more():
    assert tuple(OUTCOMES) == (*JUDGED, "unjudged")


def test_counts():
    facts = small(new_tokens=100, seconds=4.0)
    assert (facts.samples, facts.solved, facts.judged_problems) == (8, 1, 2)
    assert {name: number for name, number in facts.counts.items() if number} == {
        "passed": 1,
        "failed": 3,
        "error": 3,
        "unjudged": 1,
    }
    assert [problem.judged for problem in facts.problems] == [4, 3]
    assert facts.tokens_per_second == 25 and small().tokens_per_second is None


def test_hardest_first():
    problems = (
        Problem("easy", {"passed": 3}, first_solved=0),
        Problem("unknown", {"unjudged": 3}),
        Problem("soon", {"passed": 1, "failed": 1}, first_solved=0),
        Problem("late", {"passed": 1, "failed": 1}, first_solved=1),
        Problem("never", {"failed": 1}),
    )
    order = [problem.id for problem in Facts("", problems=problems).by_hardness()]
    assert order == ["never", "late", "soon", "easy", "unknown"]


def test_what_cannot_be_is_refused():
    for wrong in ({"won": 1}, {"passed": -1}):
        with pytest.raises(ValueError, match="problem 'a'"):
            Problem("a", wrong)
    with pytest.raises(ValueError, match="outcome"):
        Candidate("", "won")


def test_a_picture_has_so_many_levels():
    branch = Branch(1, 1)
    for _ in range(63):
        branch = Branch(1, 1, children=(branch,))
    Picture("64 levels", (branch,))
    with pytest.raises(ValueError, match="64 levels"):
        Picture("65 levels", (Branch(1, 1, children=(branch,)),))


def test_json_has_every_number_and_every_name_as_it_was():
    facts = campaign(12, 20, hostile=True)
    record = json.loads(as_json(facts))
    assert as_json(facts).isascii()
    assert set(HOSTILE) <= {problem["id"] for problem in record["problems"]} | set(record["commands"])
    assert not {"candidates", "prompt", "tests"} & record["problems"][0].keys(), "the run folder has them"
    assert record["pass_at_k"][0]["label"] == "T=0.2"
    assert record["progress"][1][0]["seconds"] > record["progress"][0][-1]["seconds"]
    assert record["pictures"][0]["roots"][0]["children"][0]["text"] == "half"
    assert record["problems"][3]["counts"] == dict(facts.problems[3].counts)
    assert record.keys() == {*vars(facts), "pass_at_k"}


def test_files_are_replaced_whole(tmp_path):
    path = tmp_path / "report.html"
    path.write_text("old")
    assert write_report(small(), path) == (path, tmp_path / "report.json")
    assert path.read_text().startswith("<!doctype html>")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["report.html", "report.json"]
    with pytest.raises(ValueError, match="another ending"):
        write_report(small(), tmp_path / "report.json")
    with pytest.raises(OSError):
        write_report(small(), tmp_path / "missing" / "report.html")
