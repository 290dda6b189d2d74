"""The program in an answer, as models write answers."""

from __future__ import annotations

import ast
import dataclasses
import json
import time
from pathlib import Path

import pytest

from prefixkit.evaluation.tasks.answers import begun, program
from prefixkit.evaluation.tasks.problem import Checks, Message, Problem
from prefixkit.evaluation.tasks.source import Source, load
from prefixkit.evaluation.tasks.wording import FUNCTION_STOP, completion

HEAD = 'from typing import List\nimport math\n\n\ndef area(sides: List[int]) -> int:\n    """ The area. """\n'
BODY = "    return math.prod(sides)\n"
FUNCTION = HEAD + BODY
ALONE = "def area(sides):\n    return math.prod(sides)\n"
PROBLEM = Problem("T/1", "here", completion(HEAD), HEAD.rstrip(), HEAD, "area", text_stop=FUNCTION_STOP)
SCRIPT = Problem("T/2", "here", ({"role": "user", "content": "Add."},), "Add.", text_stop=("\n```",))
CPP = Problem("T/3", "here", ({"role": "user", "content": "Add."},), "Add.", language="cpp")


def outputs():
    lines = (Path(__file__).parent / "data" / "smollm2_outputs.jsonl").read_text().splitlines()
    return [pytest.param(json.loads(line), id=f"output{number}") for number, line in enumerate(lines)]


@pytest.mark.parametrize("output", outputs())
def test_what_smollm2_wrote(output):
    """Real outputs for HumanEval problems; the programs were read and found to be what the model meant."""
    (problem,) = (one for one in load(Source(task="humaneval")) if one.id == output["problem"])
    start = {"head": begun(problem, False), "answer begun": begun(problem, True), "question": ""}[output["prompt"]]
    found = program(problem, output["text"], start)
    assert found == ("" if output["whole"] else start) + output["program"]
    if output["valid"]:
        assert [node.name for node in ast.parse(found).body if isinstance(node, ast.FunctionDef)] == [problem.name]


class TestBegun:
    def test_a_text_that_ends_with_the_head_begins_the_program(self):
        assert begun(PROBLEM, chat=False) == HEAD.rstrip()

    def test_so_does_an_answer_begun(self):
        assert begun(PROBLEM, chat=True) == HEAD.rstrip()

    def test_a_question_begins_none(self):
        assert begun(SCRIPT, chat=True) == begun(SCRIPT, chat=False) == ""

    @pytest.mark.parametrize(
        ("content", "expected"),
        [("Sure:\n```python\n", "\n"), ("```python", "\n"), ("```python\nx = 1\n", "x = 1\n"), ("Sure: ", "")],
    )
    def test_an_answer_begun_by_the_user(self, content, expected):
        messages: tuple[Message, ...] = ({"role": "user", "content": "?"}, {"role": "assistant", "content": content})
        assert begun(Problem("a", "here", messages, ""), chat=True) == expected


class TestCompletions:
    """What goes on where the head ended."""

    @pytest.mark.parametrize(
        "after",
        [
            "\n\nif __name__ == '__main__':\n    print(area([1]))\n",
            "\nprint(area([1, 2]))\n",
            "\n\ndef perimeter(sides):\n    return 2 * sum(sides)\n",
            "\n\ndef perimeter(sides):\n    return 2 * (sum(",
            "\n# Test\nassert area([2]) == 2\n",
            "\nThis function multiplies them.\n",
            "\n```\n\nThe function uses `math.prod`.\n```python\narea([1])\n```",
            "\nclass Shape:\n    pass\n",
            "\n'''\nA docstring that does not end",
        ],
    )
    def test_what_follows_the_function_is_left_out(self, after):
        assert program(PROBLEM, f"\n{BODY}{after}", HEAD.rstrip()) == FUNCTION

    def test_a_helper_that_the_function_needs_stays(self):
        text = (
            "\n    return prod(sides)\n\n\nONE = 1\n\ndef prod(of):\n    return ONE * math.prod(of)\nprint(prod([1]))\n"
        )
        found = program(PROBLEM, text, HEAD.rstrip())
        assert "def prod" in found and "ONE = 1" in found and "print" not in found
        space: dict = {}
        exec(found, space)
        assert space["area"]([2, 3]) == 6

    def test_local_names_need_no_helper(self):
        text = "\n    result = math.prod(sides)\n    return result\n\nresult = area([1])\n"
        assert "area([1])" not in program(PROBLEM, text, HEAD.rstrip())

    def test_a_comment_at_the_margin_does_not_end_a_function_that_goes_on(self):
        text = "\n    total = 1\n# multiply\n    return math.prod(sides) * total\n"
        assert program(PROBLEM, text, HEAD.rstrip()) == HEAD.rstrip() + text

    def test_an_unfinished_body_stays_as_it_is(self):
        assert program(PROBLEM, "\n    return math.prod(", HEAD.rstrip()) == HEAD.rstrip() + "\n    return math.prod("

    def test_a_block_that_is_closed_at_once_is_followed_by_the_answer(self):
        assert program(PROBLEM, f"\n```\n\nBetter:\n```python\n{FUNCTION}```", HEAD.rstrip()) == FUNCTION

    def test_a_block_that_the_user_opened(self):
        text = f"{ALONE}```\nIt multiplies.\n"
        assert program(SCRIPT, text, "\n") == f"\n{ALONE}"


class TestBlocks:
    """Answers in Markdown."""

    @pytest.mark.parametrize(
        "text",
        [
            f"```python\n{FUNCTION}```",
            f"Here is it:\n\n```python\n{FUNCTION}```\n\nIt multiplies the sides.",
            f"~~~python\n{FUNCTION}~~~",
            f"````python\n{FUNCTION}````",
            f"```\n{FUNCTION}```",
            f"```Python\n{FUNCTION}```\n",
            f"```py\n{FUNCTION}",  # no closing fence
            f"```python\n{FUNCTION}```\nUse:\n```python\nprint(area([1]))\n```\nwhich prints\n```\n1\n```",
            f"```python\ndef area(sides):\n    return 0\n```\nThat is wrong. Better:\n```python\n{FUNCTION}```",
            f"```python\n{FUNCTION}\nprint(area([1, 2]))\n```",
            f"```python\n{FUNCTION}\nassert area([1]) == 7\n\nif __name__ == '__main__':\n    input()\n```",
            f"```bash\npip install numpy\npython solution.py --with many --words in this --long block\n```\n"
            f"```python\n{FUNCTION}```",
            f"<think>```python\ndef area(sides): return 1\n```\nNo.</think>\n```python\n{FUNCTION}```",
            f"I think.\n```python\ndef area(): pass\n```\n</think>\n\n```python\n{FUNCTION}```",
            f"Here is the code: ```python\n{FUNCTION}```",
            f"```python\n{FUNCTION.rstrip()}```",
            f"```python\n{FUNCTION}\n```python\nprint(area([1]))\n```",
            FUNCTION,
            f"Sure! Here is the function.\n\n{FUNCTION}\nIt multiplies the sides.",
            f"from the sides we get the area:\n{FUNCTION}",
        ],
    )
    def test_the_function_is_found(self, text):
        assert program(PROBLEM, text, "") == FUNCTION

    def test_in_a_list_with_its_indentation(self):
        block = "".join(f"   {line}\n" for line in ("```python", *FUNCTION.splitlines(), "```"))
        assert program(PROBLEM, f"1. Write:\n\n{block}\n2. Run it.", "") == FUNCTION

    def test_a_function_without_the_imports_of_the_head_gets_them(self):
        expected = f"from typing import List\nimport math\n\n{ALONE}"
        assert program(PROBLEM, f"```python\n{ALONE}```", "") == expected

    def test_imports_from_the_future_stay_first(self):
        found = program(PROBLEM, f"```python\nfrom __future__ import annotations\n{ALONE}```", "")
        assert found.startswith("from __future__ import annotations\nfrom typing import List\n")
        compile(found, "found", "exec")

    @pytest.mark.parametrize("body", [BODY, "return math.prod(sides)\n", "    a = sides\n    return math.prod(a)\n"])
    @pytest.mark.parametrize("around", ["```python\n{}```", "```\n{}```"])
    def test_a_body_alone_gets_its_head(self, around, body):
        space: dict = {}
        exec(program(PROBLEM, around.format(body), ""), space)
        assert space["area"]([2, 3]) == 6

    def test_a_body_without_a_block(self):
        assert program(PROBLEM, f"{BODY}\nThis multiplies.", "") == FUNCTION

    def test_thinking_without_an_end_is_no_answer(self):
        assert program(PROBLEM, f"<think>Perhaps\n```python\n{FUNCTION}```", "") == ""

    def test_a_function_of_another_name_stays_as_it_is(self):
        other = "def surface(sides):\n    return 1\n"
        assert program(PROBLEM, f"```python\n{other}```", "") == other

    def test_a_method_is_asked_for_by_its_class(self):
        problem = Problem("a", "here", PROBLEM.messages, "", name="Solution.run")
        code = "class Solution:\n    def run(self):\n        return 1\n"
        assert program(problem, f"```python\n{code}\nprint(Solution().run())\n```", "") == code

    def test_the_body_of_a_method_is_indented_below_it(self):
        head = "class Solution:\n    def run(self, a):\n"
        problem = Problem("a", "here", PROBLEM.messages, "", head=head, name="Solution.run")
        assert program(problem, "```python\nreturn a\n```", "") == f"{head}        return a\n"

    def test_helpers_that_the_tests_use_are_not_left_out(self):
        problem = Problem("a", "here", PROBLEM.messages, "", name="f", tests=Checks("check(f, g)", ("f", "g")))
        code = "def f():\n    return 1\n\ndef g():\n    return 2\n"
        assert program(problem, f"```python\n{code}\nprint(f())\n```", "") == code


class TestPrograms:
    """Whole programs, which read standard input."""

    CODE = "n = int(input())\nprint(n + 1)\n"

    @pytest.mark.parametrize(
        "text",
        [
            f"```python\n{CODE}```\nFor 1 it prints\n```\n2\n```",
            f"Read, then print.\n```python\nint(input())\n```\nAll:\n```python\n{CODE}```",
            CODE,
            f"This is the program.\n\n{CODE}",
        ],
    )
    def test_the_longest_block_is_the_program(self, text):
        assert program(SCRIPT, text, "") == self.CODE

    def test_nothing_of_it_is_left_out(self):
        code = "def main():\n    print(1)\n\nif __name__ == '__main__':\n    main()\n"
        assert program(SCRIPT, f"```python\n{code}```", "") == code

    CPP = "#include <iostream>\nusing namespace std;\n\nint main() {\n    cout << 1;\n}\n"

    @pytest.mark.parametrize(
        "text",
        [
            f"```cpp\n{CPP}```",
            f"```c++\n{CPP}```\nCompile it:\n```bash\ng++ -O2 -std=c++17 -Wall -Wextra main.cpp -o main -lpthread\n```",
            f"A helper:\n```cpp\nint gcd(int a, int b) {{ return b ? gcd(b, a % b) : a; }}\n```\n```cpp\n{CPP}```",
            f"Here is it:\n{CPP}\nIt prints 1.",
            f"<think>int main()</think>{CPP}",
            f"```cpp\n{CPP}",
        ],
    )
    def test_cpp(self, text):
        assert program(CPP, text, "") == self.CPP


@pytest.mark.parametrize(
    "text", ["", "\n", "```", "```python", "\0", "def", "(" * 10_000, "    x\n  y", "\ud800", "'''"]
)
@pytest.mark.parametrize("problem", [PROBLEM, SCRIPT, CPP])
@pytest.mark.parametrize("start", ["", HEAD.rstrip()])
def test_no_text_is_too_odd(problem, text, start):
    assert isinstance(program(problem, text, start), str)


def test_a_long_answer_that_is_not_python_takes_no_long_time():
    text = "x = 1\n" * 2_000 + "prose that is no code\n" * 2_000
    assert program(SCRIPT, text, "").startswith("x = 1\n")
    assert program(PROBLEM, f"\n{BODY}" + "print(1)\n" * 2_000 + "(((\n" * 1_200, HEAD.rstrip()) == FUNCTION


FRESH = Problem("a", "here", PROBLEM.messages, "", name="f")
F = "def f(x):\n    return x + 1\n"


def deep(levels, text):
    """The program in a text, for a caller who is so deep in calls."""
    return deep(levels - 1, text) if levels else program(FRESH, text, "")


@pytest.mark.parametrize(
    "more",
    [
        "if x:\n    y = 0\n" + "".join(f"elif x == {i}:\n    y = {i}\n" for i in range(700)),
        f"y = {' + '.join(['1'] * 987)}\n",
        f"y = {' + '.join(['1'] * 2850)}\n",
        f"y = {' + '.join(['1'] * 50_000)}\n",
        f"y = {'-' * 50_000}1\n",
        f"y = {'(' * 300}1{')' * 300}\n",
        f"y = a{'.b()' * 900}\n",
        f"y = {'9' * 5000}\n",
    ],
)
def test_what_is_nested_deeply_behind_a_function_is_left_out_whoever_asks(more):
    assert {deep(levels, F + more) for levels in (0, 100, 400)} == {F}


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "text",
    [
        "".join(f"def g{i}(): return g{i + 1}()\n" for i in range(10_000)) + F,
        "def f(): return g0()\n" + "".join(f"def g{i}(): return g{i + 1}()\n" for i in reversed(range(10_000))),
        "def f(): return t[0]\nt = {}\n" + "t[0] = 1\n" * 20_000,
        "So:\n" + "x = 1\n" * 20_000 + "y z\n",
        f"x{' ' * 100_000}\n```{' ' * 50_000}`\n{F}",
        f"class A:\n{''.join(f'    def t{i}(self): return g{i}()' + chr(10) for i in range(10_000))}{F}print(f(1))\n",
    ],
    ids=["definitions", "needed", "filling", "prose", "spaces", "methods"],
)
def test_time_grows_with_the_text_and_not_with_its_square(text):
    began = time.process_time()
    program(FRESH, text, "")
    assert time.process_time() - began < 4.0  # 0.1 to 1 s; with the square 6 to 30 s


def test_statements_that_share_a_line_are_kept_once():
    text = "def f(): return t[0]\n\nt = {}; t[0] = 1\n"
    assert program(FRESH, f"{text}print(f())\n", "") == text


@pytest.mark.parametrize("answer", ["\ufeff{}", "```python\n\ufeff{}```\n"])
@pytest.mark.parametrize("head", [HEAD, f"\ufeff{HEAD}"])
def test_a_byte_order_mark_at_the_start_of_a_program_is_no_part_of_it(answer, head):
    asked = dataclasses.replace(PROBLEM, head=head)
    assert program(asked, answer.format(f"{FUNCTION}area([])\n"), "") == FUNCTION
    assert program(asked, answer.format(f"{ALONE}area([])\n"), "").endswith(f"import math\n\n{ALONE}")
    assert program(asked, f"{BODY}area([])\n", f"\ufeff{HEAD}") == FUNCTION
    assert program(SCRIPT, "\ufeffimport sys\nprint(1)\n", "") == "import sys\nprint(1)\n"
    assert program(CPP, "\ufeff#include <cmath>\nint main() {\n}\n", "").startswith("#include <cmath>")


def test_the_function_is_found_however_its_name_is_spelt():
    asked = dataclasses.replace(SCRIPT, name="\ufb01t")
    assert program(asked, "def fit(x):\n    return x\n\nprint(fit(1))\n", "") == "def fit(x):\n    return x\n"
