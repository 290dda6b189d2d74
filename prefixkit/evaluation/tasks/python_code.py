"""Python programs as text: which parts parse, which names they bind and use, and which parts a function needs."""

from __future__ import annotations

import ast
import io
import re
import symtable
import textwrap
import warnings
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

# First lines of Python code, in texts where prose may precede the code.
CODE_LINE = re.compile(
    r"(?:async def|def|class|from|import|@)\s*\w|\w+ *+(?:, *\w+ *+)*=[^=]|print\(|(?:for|while|if) .*:$"
)
MARK = "\ufeff"  # a byte order mark: Python accepts one at the start of a file, `ast` and `symtable` in no text
_TRIES = 16  # errors that are looked for one by one; further ones by halving
_SCOPES = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)


def lines_of(code: str) -> list[str]:
    """The lines as Python counts them, without a byte order mark: it has fewer line ends than ``str.splitlines``."""
    return io.StringIO(code.removeprefix(MARK), newline="").readlines()


def parse(code: str) -> ast.Module | None:
    """The syntax tree, which must not be changed; None if the code is not Python."""
    found = _parsed(code)
    return found if isinstance(found, ast.Module) else None


@lru_cache(maxsize=8)  # an answer is parsed several times in a row
def _parsed(code: str) -> ast.Module | int:
    """The syntax tree, or the line of the first syntax error, from 1."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes in strings
        try:
            return ast.parse(code.removeprefix(MARK))
        except SyntaxError as error:
            return max(error.lineno or 1, 1)
        except ValueError:
            return 1
        except (RecursionError, MemoryError):  # nested too deeply, at an unknown line
            return max(len(lines_of(code)), 1)


def parsed_prefix(code: str) -> str:
    """The longest sequence of whole top-level statements from the beginning that is Python, whatever follows it."""
    lines = lines_of(code)
    end = len(lines)
    for _ in range(_TRIES):
        at = _parsed("".join(lines[:end]))
        if isinstance(at, ast.Module):
            return "".join(lines[:end])
        # End before the statement that holds the error: it starts at the last unindented line up to the error.
        end = min(at, end) - 1
        while end > 0 and not _begins(lines[end]):
            end -= 1
    # Many statements have errors: the statements before the first error are found by halving.
    ends = [0, *(number for number in range(1, end + 1) if number == end or _begins(lines[number]))]
    count = bisect_left(ends, True, key=lambda number: parse("".join(lines[:number])) is None)
    return "".join(lines[: ends[count - 1]])


def first_lines(code: str) -> list[int]:
    """The first line of each statement of a module, from 0; none if it has errors."""
    tree = parse(code)
    return [_first_line(node) - 1 for node in tree.body] if tree else []


def _begins(line: str) -> bool:
    return bool(line.strip()) and not line[0].isspace() and line[0] not in ")]}#"


def bound_names(code: str) -> frozenset[str]:
    """The names that a module binds at its top level: imports, functions, classes, variables; none if it has errors.

    A head, which ends in a docstring or a colon, may lack its body.
    """
    return frozenset[str]().union(*_bindings(with_body(code)))


@lru_cache(maxsize=8)
def _bindings(code: str) -> tuple[set[str], ...]:
    """The names that each statement of a module binds; none if it has errors."""
    tree = parse(code)
    return tuple(map(_bound, tree.body)) if tree else ()


def with_body(head: str) -> str:
    """The head, with a body if it ends in a colon."""
    if parse(head) is not None:
        return head
    return f"{head.rstrip()}\n{body_indent(head)}pass\n"


def body_indent(head: str) -> str:
    """The white space before the body of the function that a head ends with."""
    last = [line for line in head.splitlines() if re.match(r"\s*(async\s+def|def|class)\b", line)]
    own = last[-1][: -len(last[-1].lstrip())] if last else ""
    return own + ("\t" if "\t" in own else "    ")


def defines(code: str, name: str) -> bool:
    """Whether the code binds this name at its top level, even if the code does not parse."""
    if parse(code) is not None:
        return any(name in own for own in _bindings(code))
    return bool(re.search(rf"^(?:(?:async\s+)?def|class)\s+{re.escape(name)}\b|^{re.escape(name)}\s*=", code, re.M))


def is_body(code: str) -> bool:
    """Whether the code is a function's body: it is indented, or has a return or yield outside of functions."""
    first = next((line for line in code.splitlines() if line.strip()), "")
    if first[:1].isspace():
        return True
    tree = parse(code)
    ends = ast.Return | ast.Yield | ast.YieldFrom
    return tree is not None and any(isinstance(node, ends) for one in tree.body for node in _own_nodes(one))


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The node and all nodes below it, except for those inside functions, classes and comprehensions."""
    waiting = [node]
    while waiting:
        one = waiting.pop()
        yield one
        if not isinstance(one, _SCOPES):
            waiting += ast.iter_child_nodes(one)


def joined(head: str, body: str) -> str | None:
    """A head and a body that was given without it, indented as the head requires; None if the two are no program."""
    indent, code = body_indent(head), textwrap.dedent(body.strip("\n"))
    first, _, rest = body.strip("\n").partition("\n")
    # Some answers lack only the first line's white space.
    for text in (textwrap.indent(code, indent), f"{indent}{first.lstrip()}\n{rest}"):
        program = f"{head.rstrip()}\n{text.rstrip()}\n"
        if parse(program) is not None:
            return program
    return None


def with_missing(head: str, code: str) -> str:
    """The code with the parts of the head before its function that the code lacks: imports, and other functions."""
    above, program = parse(with_body(head)), parse(code)
    if above is None or program is None:
        return code
    there = bound_names(code)
    imports = [node for node in program.body if isinstance(node, ast.ImportFrom)]
    stars = {ast.dump(node) for node in imports}
    parts, lines = [], lines_of(head)
    for node in above.body[:-1]:
        names = _bound(node)
        if not names <= there or (names == {"*"} and ast.dump(node) not in stars):
            parts.append(_segment(lines, node, node))
    if not parts:
        return code
    lines = lines_of(code)
    future = [node.end_lineno or 0 for node in imports if node.module == "__future__"]
    begin = future[-1] if future else 0  # no statement may precede these imports
    return "".join(lines[:begin]) + "\n".join(parts) + "\n\n" + "".join(lines[begin:])


def without_afterthoughts(code: str, names: Collection[str], margin: int = 0) -> str:
    """The code up to the end of its function, and of the rest only the parts that the function needs.

    Those parts are definitions, and statements that fill its tables.  Other code that a model writes behind the
    function (calls of it, prints, tests of its own, other functions) can fail and is not part of the answer.

    Args:
        code: Code that parses.
        names: The names that were asked for; the answer ends with the last statement that binds one of them.
        margin: If not 0, the answer ends with the statement that holds this line, from 1.
    """
    tree = parse(code)
    if tree is None:
        return code
    ends = [
        index
        for index, (node, bound) in enumerate(zip(tree.body, _bindings(code), strict=True))
        if (_first_line(node) <= margin if margin else not bound.isdisjoint(names))
    ]
    if not ends:
        return code
    lines = lines_of(code)
    answer, tail = (_groups(lines, part) for part in (tree.body[: ends[-1] + 1], tree.body[ends[-1] + 1 :]))
    text = "".join(lines[: tree.body[ends[-1]].end_lineno]).rstrip()
    return "\n".join([text, *(f"\n{segment}" for segment in _needed(tail, answer, set(names)))]) + "\n"


class _Group(NamedTuple):
    """Statements of a module that share lines, as ``a = 1; b = 2``; most groups have one statement.

    Attributes:
        text: Their lines.
        bound: The names that they bind.
        variables: Those names that they bind otherwise than by definition or import.
    """

    text: str
    bound: set[str]
    variables: set[str]


def _groups(lines: Sequence[str], nodes: Sequence[ast.stmt]) -> list[_Group]:
    alike: list[list[ast.stmt]] = []
    for node in nodes:
        if alike and _first_line(node) <= (alike[-1][-1].end_lineno or 0):
            alike[-1].append(node)
        else:
            alike.append([node])
    definitions = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom
    found = []
    for own in alike:
        variables = [_bound(node) for node in own if not isinstance(node, definitions)]
        found.append(_Group(_segment(lines, own[0], own[-1]), set().union(*map(_bound, own)), set().union(*variables)))
    return found


def _needed(tail: Sequence[_Group], answer: Sequence[_Group], asked: set[str]) -> list[str]:
    """The groups of ``tail`` that the answer needs, as text.

    These groups bind names that the answer or another needed group uses and does not bind, or they use variables of
    either without using a name that was asked for.
    """
    if not tail:
        return []
    groups, count = [*answer, *tail], len(answer)
    known = asked.union(*(one.bound for one in groups))
    names = [_globals(one.text, known) for one in groups]
    binding, filling = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
    for index in range(count, len(groups)):
        for name in groups[index].bound:
            binding[name].append(index)
        for name in names[index][1] if names[index][1].isdisjoint(asked) else ():
            filling[name].append(index)
    binds, uses = (set[str]().union(*(own[side] for own in names[:count])) for side in (0, 1))
    state = uses & set[str]().union(*(one.variables for one in answer))
    kept, waiting = set[int](), [(binding, name) for name in uses - binds] + [(filling, name) for name in state]
    while waiting:
        table, name = waiting.pop()
        for index in table.pop(name, ()):  # each name is looked up once in each table
            if index not in kept:
                kept.add(index)
                binds, uses = names[index]
                waiting += [(binding, one) for one in uses - binds]
                waiting += [(filling, one) for one in groups[index].variables]
    return [groups[index].text for index in sorted(kept)]


def _globals(code: str, known: set[str]) -> tuple[set[str], set[str]]:
    """Those of the ``known`` names of a module that code binds, and those that it uses, inside functions too; none if
    the code cannot be compiled.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            inner = [symtable.symtable(code, "<answer>", "exec")]
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return set(), set()
    binds, uses = set[str](), set[str]()
    for scope in inner:  # the list grows meanwhile
        top = scope.get_type() == "module"
        for one in map(scope.lookup, known & scope.get_identifiers()):
            if top and (one.is_assigned() or one.is_imported()):
                binds.add(one.get_name())
            if one.is_referenced() if top else one.is_global():
                uses.add(one.get_name())
        inner += scope.get_children()
    return binds, uses


def _bound(node: ast.stmt) -> set[str]:
    """The names that a statement of a module binds."""
    names: set[str] = set()
    for one in _own_nodes(node):
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(one.name)
        elif isinstance(one, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in one.names}
        elif isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            names.add(one.id)
    return names


def _first_line(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(int(one.lineno) for one in decorators)])


def _segment(lines: Sequence[str], first: ast.stmt, last: ast.stmt) -> str:
    return "".join(lines[_first_line(first) - 1 : last.end_lineno]).rstrip()
