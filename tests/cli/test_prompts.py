"""Reading prompts: what is wrong with a file is said with file and line."""

import json

import pytest

from prefixkit.cli.prompts import Source, load_prompts, read_prompts


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
    assert [(prompt.id, prompt.plain) for prompt in prompts] == [("a", "one"), (7, "zwölf\n")]
    assert prompts[1].where == f"{path}:3"
    assert prompts[1].messages == ({"role": "user", "content": "zwölf\n"},)


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
        (b'{"id": "b", "prompt": "\xff"}', "not UTF-8"),
        (f'{{"id": "b", "prompt": {"[" * 100_000}{"]" * 100_000}}}', "nested too deeply"),
        (f'{{"id": {"9" * 5000}, "prompt": "x"}}', "a number too long"),
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
            found = [(prompt.id, prompt.plain) for prompt in read_prompts(path)]
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
        ({"input": "x", "few_shot": 2}, "--few-shot takes solved problems from a --task"),
        ({"task": "humaneval", "limit": 0}, "--limit must be at least 1"),
    ],
)
def test_a_source_is_one_thing(options, says):
    with pytest.raises(ValueError, match=says):
        Source(**options)


def test_the_examples_of_a_task_are_not_asked():
    prompts = load_prompts(Source(task="humaneval", few_shot=4))
    assert len(prompts) == 160
    shown = [message["content"] for message in prompts[0].messages[:-2]]
    assert all(prompt.messages[-2]["content"] not in shown for prompt in prompts)
    assert [prompt.id for prompt in load_prompts(Source(task="humaneval", limit=2))] == ["HumanEval/0", "HumanEval/1"]
