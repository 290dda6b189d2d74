"""Python programs as text."""

import pytest

from prefixkit.evaluation.tasks.python_code import (
    body_indent,
    bound_names,
    defines,
    is_body,
    joined,
    lines_of,
    parsed_prefix,
    with_missing,
    without_afterthoughts,
)

F = "def f():\n    return 1\n"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (F, F),
        (f"{F}prose that goes on\n", F),
        (f"{F}\nx = (1,\n", f"{F}\n"),
        (f"{F}if x:\n    y = 1\nelse:\n", f"{F}if x:\n    y = 1\n"),
        (f"{F}text = '''\nno end\n", F),
        (f"{F}@cache\n", F),
        ("prose that goes on\n" + F, ""),
        (f"x = '''\n{F}'''\n(", f"x = '''\n{F}'''\n"),
        (f"{F}\0", ""),
    ],
)
def test_the_statements_before_an_error(code, expected):
    assert parsed_prefix(code) == expected


def test_errors_in_very_many_statements():
    assert parsed_prefix("x = 1\n" * 100 + "y = (\n" * 1000) == "x = 1\n" * 100


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("import a.b, c as d\nfrom e import f\n", {"a", "d", "f"}),
        ("x, (y, *z) = 1, (2, 3)\nw: int = 1\n", {"x", "y", "z", "w"}),
        ("try:\n    import a\nexcept ImportError:\n    a = b = None\n", {"a", "b"}),
        ("if x:\n    def f(): g = 1\nfor i in [j for j in k]:\n    pass\n", {"f", "i"}),
        ("def f(x):\n", {"f"}),
        ("class A:\n    def f(self):\n", {"A"}),
        ("def f(:", set()),
    ],
)
def test_the_names_that_a_module_binds(code, names):
    assert bound_names(code) == names


def test_a_name_is_defined_at_the_margin_even_where_code_has_errors():
    assert defines(F, "f") and not defines(F, "g")
    assert defines(f"{F}(", "f") and defines("async def f(): (", "f") and defines("f = lambda: (", "f")
    assert not defines("    def f(): (", "f") and not defines("def fg(): (", "f")


@pytest.mark.parametrize(
    ("code", "body"),
    [
        ("    return 1\n", True),
        ("return 1\n", True),
        ("for i in x:\n    yield i\n", True),
        ("def g():\n    return 1\nreturn g()\n", True),
        (F, False),
        ("print(lambda: 1)\n", False),
        ("", False),
    ],
)
def test_a_body_stands_in_a_function(code, body):
    assert is_body(code) is body


@pytest.mark.parametrize(
    "body", ["    x = 1\n    return x\n", "x = 1\nreturn x\n", "x = 1\n    return x\n", "\n  x = 1\n  return x"]
)
def test_a_body_is_put_below_its_head(body):
    space = {}
    exec(joined('def f():\n    """ Doc. """\n', body), space)
    assert space["f"]() == 1


def test_what_is_no_body_is_not_joined():
    assert joined(F, "this prose is no body") is None


def test_bodies_are_indented_as_their_heads():
    assert body_indent("def f():") == "    "
    assert body_indent("class A:\n    def f(self):\n        '''Doc.'''\n") == "        "
    assert body_indent("class A:\n\tdef f(self):") == "\t\t"


class TestWithMissing:
    HEAD = "import math\nfrom typing import *\n\ndef help():\n    return 1\n\ndef f():\n    ''' Doc. '''\n"

    def test_all_that_is_not_there(self):
        assert with_missing(self.HEAD, F) == "import math\nfrom typing import *\ndef help():\n    return 1\n\n" + F

    def test_nothing_twice(self):
        code = f"from typing import *\nimport math\n\ndef help():\n    return 2\n\n{F}"
        assert with_missing(self.HEAD, code) == code

    def test_a_star_stands_only_for_itself(self):
        assert with_missing("from a import *\ndef f(): ...\n", f"from b import *\n{F}").startswith("from a import *\n")


class TestWithoutAfterthoughts:
    def test_decorators_belong_to_their_functions(self):
        code = f"{F}\n@wrap\ndef g():\n    pass\n"
        assert without_afterthoughts(code, ["f"]) == F
        assert without_afterthoughts(code, ["g"]) == code

    def test_definitions_that_are_needed_by_others_that_are(self):
        code = "def f():\n    return g()\n\nx = 1\n\ndef h():\n    return 2\n\ndef g():\n    return h()\n"
        assert without_afterthoughts(code, ["f"]) == code.replace("x = 1\n\n", "")

    @pytest.mark.parametrize(
        "code",
        [
            "def f(n):\n    return table[n]\n\ntable = [0] * 9\n\nfor i in range(9):\n    table[i] = i * i\n",
            "memo = {}\n\ndef f(n):\n    return memo[n]\n\nmemo[0] = 1\n\nmemo.update({1: 1})\n",
        ],
    )
    def test_what_fills_a_table_of_the_function(self, code):
        assert without_afterthoughts(f"{code}assert f(1) == 1\nfor n in range(3):\n    print(f(n))\n", ["f"]) == code

    def test_the_last_definition_ends_the_answer(self):
        assert without_afterthoughts(f"{F}\nf = cache(f)\nf()\n", ["f"]) == f"{F}\nf = cache(f)\n"

    def test_code_without_the_name_stays(self):
        assert without_afterthoughts(f"{F}f()\n", ["g"]) == f"{F}f()\n"


def test_lines_are_pythons():
    assert lines_of("a\u2028b\x0cc\r\nd\re") == ["a\u2028b\x0cc\r\n", "d\r", "e"]
    text = "x = 'a\u2028b'\n"
    assert without_afterthoughts(f"{text}{F}f()\n", ["f"]) == f"{text}{F}"
