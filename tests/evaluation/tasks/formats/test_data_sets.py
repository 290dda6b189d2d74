"""What problems are made of the public data sets' records."""

from __future__ import annotations

import json
import pickle

import pytest

from prefixkit.evaluation.tasks.problem import Calls, Checks, Limits, Oracle, Streams
from tests.evaluation.tasks.formats import lines
from tests.evaluation.tasks.formats.lines import packed, read


def passes(problem, candidate):
    """Whether a candidate passes checks, both trusted here."""
    space: dict = {}
    exec(problem.tests.setup, space)
    exec(candidate, space)
    try:
        exec(problem.tests.code, space)
    except AssertionError:
        return False
    return True


class TestHumanEval:
    def test_the_head_is_to_be_completed_and_tests_use_its_helpers_and_not_the_candidates(self):
        problem = read(lines.HUMANEVAL)
        assert problem.head == lines.HEAD and problem.text == lines.HEAD.rstrip()
        assert problem.name == "half"
        assert (problem.tests.names, problem.tests.setup) == (("half",), lines.HEAD)
        assert passes(problem, problem.solution)
        assert not passes(problem, problem.solution.replace("// 2", "// 3"))


class TestMBPP:
    def test_the_tested_function_is_named_and_its_tests_are_shown(self):
        problem = read(lines.MBPP)
        assert (problem.name, problem.head) == ("double", "")
        assert problem.messages[0]["content"].startswith("Write a function to double a number.\n\nYour Python code")
        assert "assert double(1) == 2\nassert double(0) == 0\n```" in problem.messages[0]["content"]
        assert problem.text.endswith('assert double(0) == 0\n"""')
        assert "assert double(-1)" in problem.tests.code and "(-1)" not in problem.text
        assert "\r" not in problem.solution
        assert passes(problem, problem.solution)

    def test_the_sanitised_file(self):
        fields = {name: value for name, value in lines.MBPP.items() if name not in ("text", "test_setup_code")}
        problem = read(fields | {"prompt": "Double it.", "test_imports": ["import math"]})
        assert problem.tests.setup == "import math"
        assert problem.text.startswith('"""\nDouble it.\n')

    def test_the_table_of_mbpp_plus(self):
        problem = read(
            lines.MBPP | {"prompt": "Double it.", "test": "for x in range(9):\n    assert double(x) == 2 * x\n"}
        )
        assert problem.tests.code.startswith("for x in range(9):")
        assert problem.name == "double"
        assert passes(problem, problem.solution)

    def test_a_setup_that_needs_the_candidate_runs_behind_it(self):
        code = "class Node:\n  pass\ndef depth(node):\n  return 1"
        setup = "root = Node()"
        tests = {"test_list": ["assert depth(root) == 1"], "challenge_test_list": []}
        problem = read(lines.MBPP | tests | {"code": code, "test_setup_code": setup})
        assert (problem.tests.setup, problem.name) == ("", "depth")
        assert set(problem.tests.names) == {"depth", "Node"}
        assert passes(problem, code)

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"test_list": []}, "test_list is empty"),
            (
                {"test_list": ["assert triple(1)"], "challenge_test_list": []},
                "test_list uses no name that code defines",
            ),
            ({"test_list": ["assert ("]}, "test_list is not Python"),
            ({"test_list": "assert"}, "test_list must be a list of strings, got str"),
            ({"code": None}, "code must be a string, got NoneType"),
        ],
    )
    def test_damaged(self, change, says):
        with pytest.raises(ValueError, match=f"file:3: {says}"):
            read(lines.MBPP | change)


class TestEvalPlus:
    def test_the_solution_is_the_oracle(self):
        problem = read(lines.EVALPLUS)
        assert problem.tests == Oracle("half", lines.HEAD + lines.BODY, ((5,), (8,), (-1,)), 1e-4)
        assert problem.head == lines.HEAD

    def test_mbpp_asks_for_a_function_by_words_and_makes_tuples_of_lists(self):
        problem = read(lines.MBPP_PLUS)
        assert problem.head == ""
        assert problem.messages[0]["content"].startswith("Write a function to find what two tuples share.")
        assert problem.tests.accept == "set(found) == set(expected)"
        assert eval(problem.tests.adapt, {"arguments": [[1, 2], [2]]}) == [(1, 2), (2,)]

    @pytest.mark.parametrize(
        ("number", "arguments", "expected"),
        [
            (63, [[[1, 2], [3, 4]]], [[(1, 2), (3, 4)]]),
            (75, [[[1], [2]], 3], [[(1,), (2,)], 3]),
            (106, [[1], [2]], [[1], (2,)]),
            (115, [[[1, 1], []]], [[{1}, {}]]),
            (124, ["1", "2j"], [1.0, 2j]),
            (252, ["1j"], [1j]),
            (250, [[1], 2], [(1,), 2]),
            (259, [[[1], [2]]], [((1,), (2,))]),
            (278, [[1, [2]]], [(1, (2,))]),
            (307, [[1], 2, 3], [(1,), 2, 3]),
            (580, [[1, [2, [3]]]], [(1, (2, (3,)))]),
            (722, [{"a": [1]}, 2], [{"a": (1,)}, 2]),
            (1, [[1]], None),
        ],
    )
    def test_arguments_that_json_lacks(self, number, arguments, expected):
        tests = read(lines.MBPP_PLUS | {"task_id": f"Mbpp/{number}", "base_input": [arguments]}).tests
        assert tests.inputs == (tuple(arguments),)
        assert (eval(tests.adapt, {"arguments": arguments}) if tests.adapt else None) == expected

    @pytest.mark.parametrize(
        ("key", "name", "arguments", "expected", "found", "right"),
        [
            ("HumanEval/32", "find_zero", [[-4, 2]], 0, 2.0, True),
            ("HumanEval/32", "find_zero", [[-4, 2]], 0, 2.1, False),
            ("Mbpp/164", "are_equivalent", [1, 2], False, True, True),
            ("Mbpp/295", "sum_div", [1], 1, 0, True),
            ("Mbpp/295", "sum_div", [1], 1, 2, False),
            ("Mbpp/558", "digit_distance_nums", [1, 23], 0, 4, True),
            ("Mbpp/558", "digit_distance_nums", [1, 23], 0, 5, False),
            ("Mbpp/581", "surface_Area", [3, 4], 34, 35, False),
            ("Mbpp/581", "surface_Area", [3, 4], 0, 35, True),
            ("Mbpp/794", "text_starta_endb", ["ab"], object(), True, True),
            ("Mbpp/794", "text_starta_endb", ["ab"], None, True, False),
            ("Mbpp/2", "similar_elements", [[1], [1]], [1, 2], (2, 1), True),
        ],
    )
    def test_functions_whose_results_may_differ(self, key, name, arguments, expected, found, right):
        fields = {"task_id": key, "entry_point": name, "base_input": [arguments], "atol": 1e-4}
        accept = read(lines.MBPP_PLUS | fields).tests.accept
        names = {"arguments": arguments, "expected": expected, "found": found, "tolerance": 1e-4}
        if name == "surface_Area" and not right:
            names["found"] = 36
        assert eval(accept, names) is right

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"base_input": [], "plus_input": []}, "there is nothing to call half with"),
            ({"base_input": [5]}, "must hold lists of arguments"),
            ({"atol": "x"}, "atol must be a number of at least 0, got str"),
        ],
    )
    def test_damaged(self, change, says):
        with pytest.raises(ValueError, match=f"file:3: .*{says}"):
            read(lines.EVALPLUS | change)


class TestApps:
    def test_a_program(self):
        problem = read(lines.APPS)
        assert problem.tests == Streams((("1\n", "2\n"), ("2\n3", "4\n")))
        assert problem.solution == "print(2 * int(input()))"
        assert "reads standard input" in problem.messages[0]["content"]
        assert problem.name == problem.head == ""

    def test_a_method(self):
        problem = read(lines.APPS_CALL)
        assert problem.tests == Calls("Solution.double", (((1,), 2), (([2],), [4])))
        assert problem.head.endswith("class Solution:\n    def double(self, x: int) -> int:\n")
        assert "from typing import *" in problem.head
        assert problem.text.endswith("-> int:")

    def test_outputs_that_are_not_wrapped(self):
        data = json.dumps({"fn_name": "f", "inputs": [[1], [2]], "outputs": [[1], [1, 2]]})
        problem = read(lines.APPS | {"input_output": data})
        assert problem.tests == Calls("f", (((1,), [1]), ((2,), [1, 2])))
        assert problem.name == "f"

    def test_a_problem_without_tests(self):
        assert read(lines.APPS | {"input_output": "", "solutions": ""}).tests is None

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"input_output": "{"}, "input_output: not JSON, perhaps torn"),
            ({"input_output": "[]"}, "input_output must hold a JSON dict, got list"),
            ({"input_output": '{"inputs": ["a"], "outputs": []}'}, "lists inputs and outputs of one length"),
            ({"input_output": '{"inputs": [1], "outputs": ["a"]}'}, "texts or lists of lines, got int"),
        ],
    )
    def test_damaged(self, change, says):
        with pytest.raises(ValueError, match=f"file:3: .*{says}|file:3: {says}"):
            read(lines.APPS | change)


class TestCodeContests:
    def test_the_tests_of_all_origins_and_the_limits(self):
        problem = read(lines.CODE_CONTESTS)
        assert problem.tests == Streams((("1\n", "2\n"), ("5\n", "10\n")))
        assert problem.limits == Limits(1.5, 245)
        assert problem.solution == "print(2 * int(input()))"

    def test_in_cpp(self):
        problem = read(lines.CODE_CONTESTS, language="cpp")
        assert problem.solution == "int main() {}"
        assert problem.text.startswith("/*\n")
        assert "Write a C++ program" in problem.messages[0]["content"]

    def test_limits_that_are_not_given(self):
        assert read(lines.CODE_CONTESTS | {"time_limit": None, "memory_limit_bytes": 0}).limits == Limits()

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"public_tests": {"input": ["a"], "output": []}}, "public_tests must hold lists of texts"),
            ({"private_tests": []}, "private_tests must be an object, got list"),
            ({"time_limit": {"seconds": "1"}}, "time_limit: seconds must be a number of at least 0, got str"),
            ({"solutions": {"language": [1], "solution": []}}, "solutions must hold lists"),
        ],
    )
    def test_damaged(self, change, says):
        with pytest.raises(ValueError, match=f"file:3: {says}"):
            read(lines.CODE_CONTESTS | change)


class Harmful:
    """A pickle that writes a file where it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


class TestLiveCodeBench:
    def test_public_and_packed_tests(self):
        assert read(lines.LIVECODEBENCH).tests == Streams((("1\n", "2\n"), ("5\n", "10\n")))

    def test_private_tests_in_plain_json(self):
        plain = json.dumps([{"input": "5\n", "output": "10\n", "testtype": "stdin"}])
        fields = lines.LIVECODEBENCH | {"private_test_cases": plain}
        assert read(fields).tests == read(lines.LIVECODEBENCH).tests

    @pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
    def test_strings_of_every_protocol(self, protocol):
        text = json.dumps([{"input": "ü" * 300, "output": ""}], ensure_ascii=False)
        fields = lines.LIVECODEBENCH | {"private_test_cases": packed(text, protocol)}
        assert read(fields).tests.cases[1] == ("ü" * 300, "")

    def test_a_method_is_called_with_an_argument_a_line(self):
        problem = read(lines.LIVECODEBENCH_CALL)
        assert problem.tests == Calls("Solution.double", ((([1, 2], 3), [2, 4]),))
        assert problem.messages[-1]["content"].startswith("```python\nimport bisect")
        assert problem.messages[-1]["content"].endswith("k: int) -> int:")

    def test_a_pickle_that_could_run_a_program_is_never_loaded(self, tmp_path):
        trace = tmp_path / "trace"
        with pytest.raises(ValueError, match="file:3: private_test_cases holds a pickle of something else") as caught:
            read(lines.LIVECODEBENCH | {"private_test_cases": packed(Harmful(trace))})
        assert "give its tests as JSON" in str(caught.value)
        assert not trace.exists()

    @pytest.mark.parametrize(
        ("private", "says"),
        [
            (packed(["a"]), "holds a pickle of something else than one string"),
            (packed("[1]"), "must hold a list of objects"),
            ("!!", "is neither JSON nor base64 over zlib"),
            ("aGVsbG8=", "is neither JSON nor base64 over zlib"),
            (packed("[" + "1, " * 9999 + "1]")[:60], "is cut short|neither JSON nor base64"),
            ('[{"input": "1"}]', "must hold a list of objects"),
            ("[", "not JSON, perhaps torn"),
        ],
    )
    def test_damaged(self, private, says):
        with pytest.raises(ValueError, match=f"file:3: private_test_cases:? ({says})"):
            read(lines.LIVECODEBENCH | {"private_test_cases": private})


def test_checks_are_what_these_forms_have_in_common():
    assert all(isinstance(read(one).tests, Checks) for one in (lines.HUMANEVAL, lines.MBPP))
