"""The source of problems: an installed task, or a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from prefixkit.evaluation.tasks.formats import humaneval, own
from prefixkit.evaluation.tasks.formats.detect import AUTO, check_format, read_problem
from prefixkit.evaluation.tasks.problem import LANGUAGES, Example, Language, Problem
from prefixkit.evaluation.tasks.prompting import Prompting, ask, choose_examples, shows, solved
from prefixkit.evaluation.tasks.records import STANDARD_INPUT, read_records

TASKS = ("humaneval",)
# Tasks whose data is in no package: the file that has it, and its form.
_FILES = {
    "humaneval+": ("HumanEvalPlus.jsonl.gz from github.com/evalplus/humanevalplus_release", "evalplus"),
    "mbpp+": ("MbppPlus.jsonl.gz from github.com/evalplus/mbppplus_release", "evalplus"),
    "mbpp": ("mbpp.jsonl from github.com/google-research/google-research/tree/master/mbpp", "mbpp"),
}
_PLAIN = Prompting()


@dataclass(frozen=True)
class Source:
    """The problems that a user asked for.

    Attributes:
        input: A file (see ``read_records``), or
        task: a task of an installed package.
        format: The form of the file's records; ``auto``: by their fields.
        language: The candidates' language, if the file does not name it.
        limit: How many problems are asked at most, the first ones.
    """

    input: Path | None = None
    task: str | None = None
    format: str = AUTO
    language: Language = "python"
    limit: int | None = None

    def __post_init__(self) -> None:
        if (self.input is None) == (self.task is None):
            raise ValueError("give either --input FILE or --task NAME")
        if self.task in _FILES:
            file, form = _FILES[self.task]
            raise ValueError(
                f"--task {self.task}: no package brings its data; download {file}, then give --input FILE "
                f"--format {form}"
            )
        if self.task is not None and self.task not in TASKS:
            raise ValueError(f"--task must be one of {', '.join(TASKS)}, got {self.task}")
        if self.task is not None and (self.format != AUTO or self.language != "python"):
            raise ValueError(f"--format and --language are for --input; the task {self.task} has its own")
        if self.language not in LANGUAGES:
            raise ValueError(f"--language must be one of {', '.join(LANGUAGES)}, got {self.language}")
        check_format(self.format, self.language)
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"--limit must be at least 1, got {self.limit}")


def load(source: Source, prompting: Prompting = _PLAIN) -> tuple[Problem, ...]:
    """The problems of ``source``, in order, as they are to be asked.

    A problem whose solution is among the examples is not asked.  Without ``few_shot``, no more of a file is read than
    ``limit`` needs.

    Raises:
        OSError: a file cannot be read.
        ValueError: a line of a file is wrong; the message names file and line.
        MissingExtra: a package is not installed; the message names the remedy.
    """
    if source.input == prompting.examples == STANDARD_INPUT:
        raise ValueError("--input and --few-shot-file cannot both be standard input; give one of them as a file")
    _check_text("--system", [prompting.system])
    shown = read_examples(prompting.examples, source.language) if prompting.examples is not None else ()
    problems: Iterable[Problem] = read_problems(source)
    if prompting.few_shot:
        problems = tuple(problems)
        shown = tuple(map(solved, choose_examples(problems, prompting.few_shot)))
    asked = (problem for problem in problems if not any(shows(example, problem) for example in shown))
    found = tuple(islice(asked, source.limit and min(source.limit, 2**62)))
    if not found:
        raise ValueError(f"{_name(source)}: every problem is among the examples, so none is left to ask")
    return ask(found, prompting, shown)


def read_problems(source: Source) -> Iterator[Problem]:
    """The problems of ``source`` one by one, each checked, without examples before them; errors as of :func:`load`."""
    places: dict[str | int, str] = {}
    form = "humaneval" if source.input is None else source.format
    with closing(humaneval.installed() if source.input is None else read_records(source.input)) as records:
        for record in records:
            problem = read_problem(record, form, source.language)
            if problem.id in places:
                raise ValueError(f"{record.where}: the id {problem.id!r} was used in {places[problem.id]} already")
            places[problem.id] = record.place
            contents = [*(message["content"] for message in problem.messages), *_texts(problem.examples)]
            texts = (str(problem.id), problem.text, problem.head, problem.solution, *problem.params.get("stop", ()))
            _check_text(problem.where, [*texts, *contents])
            yield problem
    if not places:
        raise ValueError(f'{_name(source)} holds no prompts; expected lines like {{"id": "a", "prompt": "..."}}')


def read_examples(path: Path, language: Language = "python") -> tuple[Example, ...]:
    """The examples of a file: lines with ``prompt`` and ``answer``, conversations, or solved problems of any form."""
    found = []
    with closing(read_records(path)) as records:
        for record in records:
            example = own.read_example(record)
            if example is None:
                problem = read_problem(record, AUTO, language)
                if not problem.solution:
                    raise ValueError(f'{record.where}: an example needs an "answer" or a "solution"')
                example = solved(problem)
            _check_text(record.where, _texts([example]))
            found.append(example)
    if not found:
        raise ValueError(f'{path} holds no examples; expected lines like {{"prompt": "...", "answer": "..."}}')
    return tuple(found)


def _name(source: Source) -> str:
    if source.input is None:
        return f"--task {source.task}"
    return "standard input" if source.input == STANDARD_INPUT else str(source.input)


def _texts(examples: Iterable[Example]) -> list[str]:
    return [text for one in examples for text in (one.text, *(message["content"] for message in one.messages))]


def _check_text(where: str, texts: Iterable[str]) -> None:
    """Raise ValueError if JSON spelt half a surrogate pair, which no file or tokenizer takes."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{where}: holds half a surrogate pair (character {error.start}), which is not text"
            ) from error
