"""A small problem set in the forms of public data sets; every problem is our own."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from typing import Any

from prefixkit.evaluation.tasks.formats.detect import read_problem
from prefixkit.evaluation.tasks.problem import Problem
from prefixkit.evaluation.tasks.records import Record

HEAD = 'import math\n\n\ndef _whole(x):\n    return int(x)\n\n\ndef half(x):\n    """ Half of x, rounded down. """\n'
BODY = "    return _whole(x // 2)\n"

HUMANEVAL = {
    "task_id": "Own/0",
    "prompt": HEAD,
    "entry_point": "half",
    "canonical_solution": BODY,
    "test": "def check(candidate):\n    assert candidate(5) == 2\n    assert _whole(2.5) == 2\n",
}
EVALPLUS = HUMANEVAL | {"base_input": [[5]], "plus_input": [[8], [-1]], "atol": 1e-4, "contract": ""}
MBPP_PLUS = {
    "task_id": "Mbpp/2",
    "prompt": '"""\nWrite a function to find what two tuples share.\nassert set(shared((1, 2), (2,))) == {2}\n"""\n',
    "entry_point": "similar_elements",
    "canonical_solution": "\ndef similar_elements(a, b):\n    return tuple(set(a) & set(b))\n",
    "base_input": [[[1, 2], [2]]],
    "plus_input": [],
    "atol": 0,
}
MBPP = {
    "task_id": 7,
    "text": "Write a function to double a number.",
    "code": "import math\r\ndef double(x):\r\n  return 2 * x",
    "test_list": ["assert double(1) == 2", "assert double(0) == 0"],
    "test_setup_code": "",
    "challenge_test_list": ["assert double(-1) == -2"],
}
APPS = {
    "problem_id": 3,
    "question": "Read a number and write its double.",
    "solutions": json.dumps(["print(2 * int(input()))", "n = int(input())\nprint(n + n)"]),
    "input_output": json.dumps({"inputs": ["1\n", ["2", "3"]], "outputs": ["2\n", ["4", ""]]}),
    "starter_code": "",
}
APPS_CALL = APPS | {
    "input_output": json.dumps({"fn_name": "double", "inputs": [[1], [[2]]], "outputs": [[2], [[4]]]}),
    "starter_code": "class Solution:\n    def double(self, x: int) -> int:\n        ",
    "solutions": json.dumps(["class Solution:\n    def double(self, x):\n        return 2 * x"]),
}
CODE_CONTESTS = {
    "name": "1_A. Double",
    "description": "Read a number and write its double.",
    "public_tests": {"input": ["1\n"], "output": ["2\n"]},
    "private_tests": {"input": ["5\n"], "output": ["10\n"]},
    "generated_tests": {"input": [], "output": []},
    "time_limit": {"seconds": 1, "nanos": 500_000_000},
    "memory_limit_bytes": 256_000_000,
    "solutions": {"language": [2, 3, 1], "solution": ["int main() {}", "print(2 * int(input()))", "print 1"]},
}


def packed(content: object, protocol: int | None = None) -> str:
    """As LiveCodeBench packs its private tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(content, protocol))).decode()


LIVECODEBENCH = {
    "question_id": "abc_a",
    "question_content": "Read a number and write its double.",
    "starter_code": "",
    "public_test_cases": json.dumps([{"input": "1\n", "output": "2\n", "testtype": "stdin"}]),
    "private_test_cases": packed(json.dumps([{"input": "5\n", "output": "10\n", "testtype": "stdin"}])),
    "metadata": "{}",
}
LIVECODEBENCH_CALL = LIVECODEBENCH | {
    "starter_code": "class Solution:\n    def double(self, xs: List[int], k: int) -> int:\n        ",
    "public_test_cases": json.dumps([{"input": "[1, 2]\n3", "output": "[2, 4]", "testtype": "functional"}]),
    "private_test_cases": "",
    "metadata": json.dumps({"func_name": "double"}),
}
OWN = {"id": "own", "prompt": "Double a number."}


def read(fields: dict[str, Any], form: str = "auto", language: Any = "python") -> Problem:
    return read_problem(Record("file:3", "line 3", fields), form, language)
