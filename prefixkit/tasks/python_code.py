"""Python programs as text: what parses, what names they bind and need, and what of them a function needs."""

from __future__ import annotations

import ast
import io
import re
import symtable
import textwrap
import warnings
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence

# Lines that Python code begins with, where prose may stand before.
CODE_LINE = re.compile(
    r"(?:async def|def|class|from|import|@)\s*\w|\w+ *(?:, *\w+)* *=[^=]|print\(|(?:for|while|if) .*:$"
)
_SOURCE = "<answer>"
_TRIES = 16  # errors that are found one by one
_SCOPES = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)


def lines_of(code: str) -> list[str]:
    """The lines as Python counts them, which knows fewer ends of lines than ``str.splitlines``."""
    return io.StringIO(code, newline="").readlines()


def parse(code: str) -> ast.Module | None:
    """The syntax tree; None where the code is not Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes in strings
        try:
            return ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def parsed_prefix(code: str) -> str:
    """As many whole top-level statements from the beginning as are Python, however the code goes on."""
    lines = lines_of(code)
    end = len(lines)
    for _ in range(_TRIES):
        at = _error_line("".join(lines[:end]))
        if at is None:
            return "".join(lines[:end])
        # Before the statement that holds the error: the last line up to it that begins at the margin.
        end = min(at, end) - 1
        while end > 0 and not _begins(lines[end]):
            end -= 1
    # Errors in many statements: those before the first are found by halving.
    ends = [0, *(number for number in range(1, end + 1) if number == end or _begins(lines[number]))]
    count = bisect_left(ends, True, key=lambda number: _error_line("".join(lines[:number])) is not None)
    return "".join(lines[: ends[count - 1]])


def _error_line(code: str) -> int | None:
    """The line of the first syntax error, from 1; None where there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ast.parse(code)
        except SyntaxError as error:
            return max(error.lineno or 1, 1)
        except (ValueError, RecursionError, MemoryError):
            return 1
    return None


def _begins(line: str) -> bool:
    return bool(line.strip()) and not line[0].isspace() and line[0] not in ")]}#"


def bound_names(code: str) -> frozenset[str]:
    """The names that a module binds at its top level: imports, functions, classes, variables; none where it has
    errors.  A head, which ends in a docstring or a colon, may lack its body.
    """
    tree = parse(with_body(code))
    return frozenset(name for node in tree.body for name in _bound(node)) if tree else frozenset()


def with_body(head: str) -> str:
    """The head, with a body where it ends in a colon."""
    if parse(head) is not None:
        return head
    return f"{head.rstrip()}\n{body_indent(head)}pass\n"


def body_indent(head: str) -> str:
    """The white space before the body of the function that a head ends with."""
    last = [line for line in head.splitlines() if re.match(r"\s*(async\s+def|def|class)\b", line)]
    own = last[-1][: -len(last[-1].lstrip())] if last else ""
    return own + ("\t" if "\t" in own else "    ")


def defines(code: str, name: str) -> bool:
    """Whether the code binds this name at the margin, even where it does not parse."""
    tree = parse(code)
    if tree is not None:
        return any(name in _bound(node) for node in tree.body)
    return bool(re.search(rf"^(?:(?:async\s+)?def|class)\s+{re.escape(name)}\b|^{re.escape(name)}\s*=", code, re.M))


def is_body(code: str) -> bool:
    """Whether the code is what stands in a function: it is indented, or it returns, yields or raises at the margin."""
    first = next((line for line in code.splitlines() if line.strip()), "")
    if first[:1].isspace():
        return True
    tree = parse(code)
    ends = ast.Return | ast.Yield | ast.YieldFrom
    return tree is not None and any(isinstance(node, ends) for one in tree.body for node in _own_nodes(one))


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The node and those below it, but not what is inside of functions, classes and comprehensions."""
    yield node
    if not isinstance(node, _SCOPES):
        for child in ast.iter_child_nodes(node):
            yield from _own_nodes(child)


def joined(head: str, body: str) -> str | None:
    """A head and the body that was given without it, indented as it must be; None where they make no program."""
    indent, code = body_indent(head), textwrap.dedent(body.strip("\n"))
    first, _, rest = body.strip("\n").partition("\n")
    # Some answers lack the white space of the first line alone.
    for text in (textwrap.indent(code, indent), f"{indent}{first.lstrip()}\n{rest}"):
        program = f"{head.rstrip()}\n{text.rstrip()}\n"
        if parse(program) is not None:
            return program
    return None


def with_missing(head: str, code: str) -> str:
    """The code behind what the head has before its function and the code lacks: imports, and other functions."""
    above, program = parse(with_body(head)), parse(code)
    if above is None or program is None:
        return code
    there = {name for node in program.body for name in _bound(node)}
    same = {ast.dump(node) for node in program.body}
    parts = []
    for node in above.body[:-1]:
        names = _bound(node)
        if (names == {"*"} or not names <= there) and names and ast.dump(node) not in same:
            parts.append(_segment(head, node))
    if not parts:
        return code
    lines = lines_of(code)
    future = [node.end_lineno or 0 for node in program.body if _is_future(node)]
    begin = future[-1] if future else 0  # nothing may stand before these imports
    return "".join(lines[:begin]) + "\n".join(parts) + "\n\n" + "".join(lines[begin:])


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def without_afterthoughts(code: str, names: Collection[str], margin: int = 0) -> str:
    """The code up to its function, and of what follows only what the function needs: definitions, and statements that
    fill its tables.

    What a model writes behind the function that was asked for, calls of it, prints, tests of its own, other functions,
    can fail and is not part of the answer.

    Args:
        code: It parses.
        names: What was asked for; the last statement that binds one of them ends the answer.
        margin: The answer ends with the statement that holds this line instead, from 1; 0: see above.
    """
    tree = parse(code)
    if tree is None:
        return code
    ends = [
        index
        for index, node in enumerate(tree.body)
        if (_first_line(node) <= margin if margin else bool(_bound(node) & set(names)))
    ]
    if not ends:
        return code
    answer, tail = tree.body[: ends[-1] + 1], tree.body[ends[-1] + 1 :]
    text = "".join(lines_of(code)[: answer[-1].end_lineno])
    kept = _needed([_segment(code, node) for node in tail], tail, answer, text, set(names))
    return "\n".join([text.rstrip(), *(f"\n{segment}" for segment in kept)]) + "\n"


def _needed(
    segments: Sequence[str], tail: Sequence[ast.stmt], answer: Sequence[ast.stmt], text: str, asked: set[str]
) -> list[str]:
    """Those of the segments, the statements of the tail, that bind what the answer or another that is kept uses and
    does not bind, or that use its variables, and call nothing that was asked for.
    """
    binds, uses = _globals(text)
    missing, state = uses - binds, uses & set[str]().union(*map(_variables, answer))
    kept, found = set[int](), True
    while found:
        found = False
        for index, node in enumerate(tail):
            if index in kept or not (_bound(node) & missing or (state and _fills(segments[index], state, asked))):
                continue
            kept.add(index)
            binds, uses = _globals(segments[index])
            missing |= uses - binds
            state |= _variables(node)
            found = True
    return [segments[index] for index in sorted(kept)]


def _fills(segment: str, state: set[str], asked: set[str]) -> bool:
    _, uses = _globals(segment)
    return bool(uses & state) and not uses & asked


def _variables(node: ast.stmt) -> set[str]:
    """The names that a statement of a module binds otherwise than by definition or import."""
    definitions = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom
    return set() if isinstance(node, definitions) else _bound(node)


def _globals(code: str) -> tuple[set[str], set[str]]:
    """The names of the module that code binds and uses, inside functions too; no names where it cannot be compiled."""
    try:
        table = symtable.symtable(code, _SOURCE, "exec")
    except (SyntaxError, ValueError, RecursionError):
        return set(), set()
    binds = {one.get_name() for one in table.get_symbols() if one.is_assigned() or one.is_imported()}
    uses = {one.get_name() for one in table.get_symbols() if one.is_referenced()}
    inner = list(table.get_children())
    while inner:
        scope = inner.pop()
        uses |= {one.get_name() for one in scope.get_symbols() if one.is_global()}
        inner += scope.get_children()
    return binds, uses


def _bound(node: ast.stmt) -> set[str]:
    """The names that a statement of a module binds."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    names: set[str] = set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            names |= _bound(child)
        elif isinstance(child, ast.ExceptHandler):
            names = names.union(*map(_bound, child.body))
        else:
            stored = (one for one in _own_nodes(child) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store))
            names |= {one.id for one in stored}
    return names


def _first_line(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(int(one.lineno) for one in decorators)])


def _segment(code: str, node: ast.stmt) -> str:
    return "".join(lines_of(code)[_first_line(node) - 1 : node.end_lineno]).rstrip()
