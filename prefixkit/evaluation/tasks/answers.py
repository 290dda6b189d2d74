"""The program in an answer: the part of a model's text that is the candidate, which a judge runs."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from prefixkit.evaluation.tasks.markdown import (
    Block,
    after_fence,
    before_fence,
    code_blocks,
    open_block,
    without_thinking,
)
from prefixkit.evaluation.tasks.problem import Checks, Language, Problem
from prefixkit.evaluation.tasks.python_code import (
    CODE_LINE,
    MARK,
    defines,
    first_lines,
    is_body,
    joined,
    lines_of,
    parse,
    parsed_prefix,
    with_missing,
    without_afterthoughts,
)

_TAGS: dict[Language, frozenset[str]] = {
    "python": frozenset(("python", "py", "python3", "python2", "py3")),
    "cpp": frozenset(("cpp", "c++", "cc", "cxx", "c++17", "c++20", "c", "c++14", "cpp17")),
}


def begun(problem: Problem, chat: bool) -> str:
    """The beginning of a program with which the prompt ends, for samples to continue; "" if samples start a program.

    It is the problem's head, if the prompt has no template and ends with the head, or the text in the code block that
    the assistant's message leaves open, at least the newline behind the fence.
    """
    if chat:
        last = problem.messages[-1]
        code = open_block(last["content"]) if last["role"] == "assistant" else None
        if code is None:
            return ""
        return (code if last["content"].endswith("\n") else code.removesuffix("\n")) or "\n"
    head, text = problem.head.rstrip(), problem.text.rstrip()
    return head + problem.text[len(text) :] if head and text.endswith(head) else ""


def program(problem: Problem, text: str, begun: str) -> str:
    """The program in an answer, whether or not it is valid: the judge decides that.

    Args:
        problem: The problem that was asked.
        text: The sample's text, without the prompt.
        begun: The text before the sample in its program (see :func:`begun`); "": the answer starts the program, in
            Markdown or as bare code.
    """
    return _thread(os.getpid()).submit(_program, problem, text, begun).result()


@cache
def _thread(process: int) -> ThreadPoolExecutor:
    """The thread that extracts programs from answers: how deeply nested code Python can parse depends on the depth of
    its caller's stack, which is the same for all answers here.  A forked process needs another thread.
    """
    return ThreadPoolExecutor(1, thread_name_prefix="answers")


def _program(problem: Problem, text: str, begun: str) -> str:
    if begun:
        return _continued(problem, text, begun)
    text = without_thinking(text).removeprefix(MARK)
    if problem.language == "cpp":
        return _cpp(problem, text)
    blocks = code_blocks(text)
    if not blocks:
        return _bare(problem, text)
    return _python(problem, _chosen(problem, blocks, lambda code: defines(code, _outer(problem))).code)


def _outer(problem: Problem) -> str:
    """The top-level function or class that is asked for."""
    return problem.name.partition(".")[0]


def _names(problem: Problem) -> tuple[str, ...]:
    return (_outer(problem), *(problem.tests.names if isinstance(problem.tests, Checks) else ()))


def _chosen(problem: Problem, blocks: Sequence[Block], fits: Callable[[str], bool]) -> Block:
    """The last block that defines the name asked for, else the longest; blocks in other languages only if all are."""
    tags = _TAGS[problem.language]
    mine = [block for block in blocks if block.tag in tags] or [block for block in blocks if not block.tag] or blocks
    fitting = [block for block in mine if fits(block.code)] if _outer(problem) else []
    if _outer(problem) and not fitting:
        fitting = [block for block in blocks if fits(block.code)]
    return fitting[-1] if fitting else max(mine, key=lambda block: len(block.code))


def _continued(problem: Problem, text: str, begun: str) -> str:
    """A sample that continues the prompt's code, up to the end of its code block or of its function."""
    code = before_fence(text)
    if not code.strip() and (rest := after_fence(text)) and code_blocks(rest):
        return _program(problem, rest, "")  # the model closed the block at once, and started again
    whole = begun + code
    if problem.language == "cpp":
        return whole
    stopped = begun + _stopped(code, problem.text_stop)
    if not _outer(problem):
        return whole if parse(whole) is not None else stopped
    valid = parsed_prefix(whole)
    if len(valid) <= len(begun) or not defines(valid, _outer(problem)):
        return stopped
    # The begun function contains the last line of the head, or comes after it.
    margin = begun.count("\n") + 1 if defines(begun, _outer(problem)) else 0
    return without_afterthoughts(valid, _names(problem), margin)


def _stopped(text: str, stops: Sequence[str]) -> str:
    """The text before the first occurrence of any of these strings."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


def _bare(problem: Problem, text: str) -> str:
    """Code without a block: the text from the first line that looks like code, as far as it is code."""
    if problem.head and text.lstrip("\n")[:1].isspace() and not defines(text, _outer(problem)):
        body = re.split(r"^(?=\S)", text.lstrip("\n"), maxsplit=1, flags=re.M)
        return _python(problem, next((part for part in body if part.strip()), ""))
    if parse(text) is None:
        lines = lines_of(text)
        starts = [number for number, line in enumerate(lines) if CODE_LINE.match(line)]
        seen = set[int]()
        for number in starts[:20]:
            found = "" if number in seen else parsed_prefix("".join(lines[number:]))
            if found.strip() and (not _outer(problem) or defines(found, _outer(problem))):
                return _python(problem, found)
            seen |= {number + line for line in first_lines(found)}  # from any of these it parses to the same end
        text = _stopped("".join(lines[starts[0] :]) if starts else text, problem.text_stop)
    elif not _outer(problem):
        text = _stopped(text, problem.text_stop)
    return _python(problem, text)


def _python(problem: Problem, code: str) -> str:
    """A program from the chosen code: missing parts of the head are added, code after the function is left out."""
    name = _outer(problem)
    if not name:
        return code
    if not defines(code, name) and defines(textwrap.dedent(code), name):
        code = textwrap.dedent(code)
    if defines(code, name):
        valid = parsed_prefix(code)
        code = without_afterthoughts(valid, _names(problem)) if defines(valid, name) else code
        return with_missing(problem.head, code) if problem.head else code
    if problem.head and is_body(code):
        return joined(problem.head, code) or code
    return code


def _cpp(problem: Problem, text: str) -> str:
    wanted = re.compile(rf"\b{re.escape(problem.name or 'main')}\s*\(")
    blocks = code_blocks(text)
    if blocks:
        fitting = [block for block in blocks if wanted.search(block.code)]
        return (fitting[-1] if fitting else _chosen(problem, blocks, lambda code: False)).code
    begins = re.search(r"^(?:#\s*include|using |int main|template|struct |typedef )", text, re.M)
    code = text[begins.start() :] if begins else text
    ends = list(re.finditer(r"^\}.*$", code, re.M))
    return code[: ends[-1].end()] + "\n" if begins and ends else code
