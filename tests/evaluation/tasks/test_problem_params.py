"""The sampling parameters of a problem."""

import json

import pytest

from prefixkit.evaluation.tasks.problem import Problem
from prefixkit.evaluation.tasks.problem_params import check_params, sampling_params
from prefixkit.evaluation.tasks.source import Source, load
from prefixkit.sampling.params import SamplingParams

COMMON = SamplingParams(n=4, temperature=0.8, stop=("END",))


def problem(**params):
    own = check_params("here", params)
    return Problem("a", "here", (), "a", params=own, chat_stop=("\n```",), text_stop=("\ndef",))


def test_a_problem_without_its_own_is_sampled_like_the_others():
    assert sampling_params(problem(), COMMON, chat=True) == SamplingParams(n=4, temperature=0.8, stop=("END", "\n```"))
    assert sampling_params(problem(), COMMON, chat=False).stop == ("END", "\ndef")


def test_its_own_come_before_those_of_the_run_and_stop_strings_add_up():
    found = sampling_params(problem(n=20, top_k=5, stop="X"), COMMON, chat=True)
    assert found == SamplingParams(n=20, temperature=0.8, top_k=5, stop=("END", "X", "\n```"))


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"n": 0}, "params: n must be at least 1"),
        ({"n": "2"}, "params: n must be an integer, got str"),
        ({"n": True}, "params: n must be an integer, got bool"),
        ({"temperature": -1}, "params: temperature must be 0 or at least"),
        ({"top_p": 2}, r"params: top_p must be in \(0, 1\]"),
        ({"top_k": -1}, "params: top_k must be at least 0"),
        ({"max_new_tokens": 1.5}, "params: max_new_tokens must be an integer"),
        ({"stop": [""]}, "params: stop must not hold an empty string"),
        ({"stop": 5}, "params: stop must be a list of strings"),
        ({"seed": -1}, "params: seed must be at least 0"),
        ({"temprature": 1}, "params has no field 'temprature'; its fields are n, temperature"),
        ("hot", "params must be an object, got str"),
    ],
)
def test_what_they_cannot_be_is_said_with_file_and_line(tmp_path, params, says):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"id": 1, "prompt": "a"}\n' + json.dumps({"id": 2, "prompt": "a", "params": params}))
    with pytest.raises(ValueError, match=f"{path}:2: {says}"):
        load(Source(path))
