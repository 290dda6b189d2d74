"""The wording of problems: one form for each kind of problem, so that prompts of one task share their beginning."""

from __future__ import annotations

from prefixkit.evaluation.tasks.problem import Language, Message

NAMES: dict[Language, str] = {"python": "Python", "cpp": "C++"}
# Strings that end an answer: the code fence of a chat, or the first line after the function (HumanEval's list).
FENCE_STOP = ("\n```",)
FUNCTION_STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
# After a program or functions that follow a docstring: tests, or the next docstring.
CLASS_STOP = ("\nclass", "\n#", "\nif", "\nprint")
DOCSTRING_STOP = ("\nassert", '\n"""', "\nprint", "\nif __name__", "\n```")
PROGRAM_STOP: dict[Language, tuple[str, ...]] = {"python": ('\n"""', "\n```"), "cpp": ("\n/*", "\n```")}


def fenced(code: str, language: Language) -> str:
    """A code block of a chat, without a newline behind it."""
    return f"```{language}\n{code}{'' if code.endswith(chr(10)) else chr(10)}```"


def completion(head: str, statement: str = "") -> tuple[Message, ...]:
    """A conversation about a function or class to complete, whose answer is begun with its head.

    The model has to write the last newline of the head: tokenizers join it to the indentation that follows, and after a
    prompt that ends in a separate newline SmolLM2 solves no problem.
    """
    before = f"{statement.strip()}\n\n" if statement.strip() else ""
    what = "class" if "class " in head and "\ndef " not in f"\n{head}" else "function"
    question = f"{before}Complete this Python {what}:\n{fenced(head, 'python')}"
    return ({"role": "user", "content": question}, {"role": "assistant", "content": f"```python\n{head.rstrip()}"})


def function_question(statement: str, tests: str) -> tuple[Message, ...]:
    """A conversation about a function that is described, by words and by tests that it must pass."""
    question = f"{statement.strip()}\n\nYour Python code must pass these tests:\n{fenced(tests, 'python')}"
    return ({"role": "user", "content": question},)


def program_question(statement: str, language: Language) -> tuple[Message, ...]:
    """A conversation about a program that reads standard input."""
    asked = f"Write a {NAMES[language]} program that solves this problem. It reads standard input and writes standard"
    question = f"{asked} output. Answer with one code block.\n\n{statement.strip()}"
    return ({"role": "user", "content": question},)


def docstring(statement: str, language: Language = "python") -> str:
    """A statement as the comment at the beginning of a file, for a model without a chat template."""
    if language == "cpp":
        return f"/*\n{statement.strip().replace('*/', '* /')}\n*/"
    body = statement.strip().replace("\\", "\\\\").replace('"""', "'''")
    return f'"""\n{body}\n"""'
