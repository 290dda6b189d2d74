"""Reading prompts: what is wrong with a file is said with file and line."""

import json
from pathlib import Path

import pytest

from prefixkit.evaluation.tasks.prompting import Prompting
from prefixkit.evaluation.tasks.source import Source, load


def read_prompts(path):
    return load(Source(path))


@pytest.fixture
def file(tmp_path):
    def write(*lines):
        path = tmp_path / "prompts.jsonl"
        path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
        return path

    return write


GOOD = '{"id": "a", "prompt": "one"}'


def test_ids_and_prompts_in_order_with_blank_lines_skipped(file):
    path = file(GOOD, "", '{"id": 7, "prompt": "zwölf\\n", "note": "ignored"}', "")
    prompts = read_prompts(path)
    assert [(prompt.id, prompt.text) for prompt in prompts] == [("a", "one"), (7, "zwölf\n")]
    assert prompts[1].where == f"{path}:3"
    assert prompts[1].messages == ({"role": "user", "content": "zwölf\n"},)


HUGE_TOLERANCE = json.dumps(
    {"id": "b", "prompt": "x", "tests": {"kind": "streams", "cases": [["", ""]], "tolerance": 10**400}}
)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"id": "b", "prom', "not a JSON object, perhaps torn"),
        ("[1, 2]", 'expected an object with "id" and "prompt"'),
        ('{"id": "b"}', 'expected an object with "id" and "prompt"'),
        ('{"id": "b", "prompt": ""}', "the prompt is empty"),
        ('{"id": "b", "prompt": 5}', "prompt must be a string, got int"),
        ('{"id": null, "prompt": "x"}', "id must be a string or an integer, got NoneType"),
        ('{"id": true, "prompt": "x"}', "id must be a string or an integer, got bool"),
        ('{"id": "a", "prompt": "x"}', "the id 'a' was used in line 1 already"),
        ('{"id": "b", "prompt": "\\ud800"}', "half a surrogate pair"),
        ('{"id": "b", "prompt": "x", "params": {"stop": ["\\ud800"]}}', "half a surrogate pair"),
        (b'{"id": "b", "prompt": "\xff"}', "not UTF-8"),
        (f'{{"id": "b", "prompt": {"[" * 100_000}{"]" * 100_000}}}', "nested too deeply"),
        (f'{{"id": {"9" * 5000}, "prompt": "x"}}', "a number too long"),
        ('{"id": 18446744073709551616, "prompt": "x"}', "id must be a string, or an integer from -2**63 to 2**64 - 1"),
        (f'{{"id": "b", "prompt": "x", "params": {{"top_p": {10**400}}}}}', "params: top_p must be a finite number"),
        (HUGE_TOLERANCE, "tolerance must be a number of at least 0, got int"),
    ],
)
def test_a_bad_line_is_named(file, line, says):
    path = file(GOOD, line)
    with pytest.raises(ValueError, match=f"{path}:2: ") as caught:
        read_prompts(path)
    assert says in str(caught.value)


def test_a_file_cut_at_any_byte_never_passes_for_another(file):
    """Whatever is lost at the end, what is read is a prefix of the prompts, or the torn line is named."""
    lines = [json.dumps({"id": number, "prompt": f"prompt {number} ü"}, ensure_ascii=False) for number in range(3)]
    whole = "\n".join(lines).encode()
    expected = [(number, f"prompt {number} ü") for number in range(3)]
    for size in range(1, len(whole)):
        path = file(whole[:size])
        try:
            found = [(prompt.id, prompt.text) for prompt in read_prompts(path)]
        except ValueError as error:
            assert f"{path}:{whole[:size].count(10) + 1}:" in str(error)
        else:
            assert found == expected[: len(found)]
            assert whole[:size].strip().endswith(b"}")


def test_an_empty_file_and_a_missing_one(file, tmp_path):
    with pytest.raises(ValueError, match="holds no prompts"):
        read_prompts(file("", ""))
    with pytest.raises(OSError, match=r"cannot read the prompts in .*absent\.jsonl: No such file"):
        read_prompts(tmp_path / "absent.jsonl")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "either --input FILE or --task NAME"),
        ({"input": "x", "task": "humaneval"}, "either --input FILE or --task NAME"),
        ({"task": "sudoku"}, "--task must be one of humaneval, got sudoku"),
        ({"task": "mbpp+"}, "no package brings its data; download .* --input FILE --format evalplus"),
        ({"input": "x", "format": "csv"}, "--format must be one of auto, prefixkit, evalplus, .*, got csv"),
        ({"input": "x", "language": "ruby"}, "--language must be one of python, cpp, got ruby"),
        ({"input": "x", "format": "mbpp", "language": "cpp"}, "has tests for Python alone"),
        ({"task": "humaneval", "format": "mbpp"}, "--format and --language are for --input"),
        ({"task": "humaneval", "limit": 0}, "--limit must be at least 1"),
    ],
)
def test_a_source_is_one_thing(options, says):
    with pytest.raises(ValueError, match=says):
        Source(**options)


def test_the_examples_of_a_task_are_not_asked():
    prompts = load(Source(task="humaneval"), Prompting(few_shot=4))
    assert len(prompts) == 160
    shown = [message["content"] for message in prompts[0].messages[:-2]]
    assert all(prompt.messages[-2]["content"] not in shown for prompt in prompts)
    assert [prompt.id for prompt in load(Source(task="humaneval", limit=2))] == ["HumanEval/0", "HumanEval/1"]


def test_few_shot_takes_problems_with_solutions(file):
    solved = '{"id": "b", "prompt": "two", "solution": "pass"}'
    (problem,) = load(Source(file(GOOD, solved)), Prompting(few_shot=1))
    assert (problem.id, problem.text) == ("a", "two\npass\n\n\none")
    with pytest.raises(ValueError, match="--few-shot 1 takes problems with a solution, and 0 of the 2 have one"):
        load(Source(file(GOOD, '{"id": "b", "prompt": "two"}')), Prompting(few_shot=1))


def test_a_limit_reads_no_further(file):
    path = file(GOOD, "torn")
    assert [problem.id for problem in load(Source(path, limit=1))] == ["a"]
    with pytest.raises(ValueError, match=":2: not a JSON object"):
        load(Source(path))


def test_instructions_that_are_no_text_are_named(file):
    with pytest.raises(ValueError, match="--system: holds half a surrogate pair"):
        load(Source(file(GOOD)), Prompting(system="\udcff"))


class TestExamplesInAFile:
    def test_they_stand_before_every_problem_in_their_order(self, file, tmp_path):
        examples = tmp_path / "examples.jsonl"
        examples.write_text('{"prompt": "2 + 2 =", "answer": " 4"}\n{"prompt": "1 + 1 =", "answer": " 2"}\n')
        problems = load(Source(file(GOOD, '{"id": 2, "prompt": "3 + 3 ="}')), Prompting(examples=examples))
        assert [problem.text for problem in problems] == [
            "2 + 2 = 4\n\n1 + 1 = 2\n\none",
            "2 + 2 = 4\n\n1 + 1 = 2\n\n3 + 3 =",
        ]
        assert [message["content"] for message in problems[1].messages] == [
            *("2 + 2 =", " 4", "1 + 1 =", " 2", "3 + 3 ="),
        ]

    def test_a_problem_that_they_solve_is_not_asked(self, file, tmp_path):
        examples = tmp_path / "examples.jsonl"
        examples.write_text('{"prompt": "one", "answer": "1"}\n')
        asked = load(Source(file(GOOD, '{"id": 2, "prompt": "two"}')), Prompting(examples=examples))
        assert [problem.id for problem in asked] == [2]
        with pytest.raises(ValueError, match="every problem is among the examples"):
            load(Source(file(GOOD)), Prompting(examples=examples))

    @pytest.mark.parametrize(
        ("line", "says"),
        [
            ('{"id": 1, "prompt": "a"}', 'an example needs an "answer" or a "solution"'),
            ('{"messages": [{"role": "user", "content": "a"}]}', "an example must end with the assistant's answer"),
            ('{"prompt": "", "answer": "a"}', "the prompt is empty"),
            ('{"prompt": "a", "answer": 5}', "answer must be a string, got int 5"),
            ('{"prompt": "a", "answer": "\\ud800"}', "holds half a surrogate pair"),
            ('{"id": 1, "prompt": "a", "solution": "\\ud800"}', "holds half a surrogate pair"),
        ],
    )
    def test_a_bad_example_is_named(self, file, tmp_path, line, says):
        examples = tmp_path / "examples.jsonl"
        examples.write_text(f"\n{line}\n")
        with pytest.raises(ValueError, match=f"{examples}:2: {says}"):
            load(Source(file(GOOD)), Prompting(examples=examples))

    def test_none_or_both_kinds_are_refused(self, file, tmp_path):
        with pytest.raises(ValueError, match=r"either --few-shot K, .* or --few-shot-file FILE"):
            Prompting(few_shot=1, examples=tmp_path)
        with pytest.raises(ValueError, match="holds no examples"):
            load(Source(file(GOOD)), Prompting(examples=file("")))
        with pytest.raises(ValueError, match="cannot both be standard input"):
            load(Source(Path("-")), Prompting(examples=Path("-")))
