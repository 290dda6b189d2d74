"""The form of a record: the form that was asked for, else the form whose fields the record has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prefixkit.evaluation.tasks.formats import apps, code_contests, evalplus, humaneval, livecodebench, mbpp, own
from prefixkit.evaluation.tasks.problem import Language, Problem
from prefixkit.evaluation.tasks.records import Record


@dataclass(frozen=True)
class Format:
    """A form of problems in files.

    Attributes:
        fields: Sets of fields; a record of this form has all fields of one set.
        read: Makes a problem of a record; candidates are in the given language if the record names none.
        python_only: Whether its tests call Python.
    """

    fields: tuple[tuple[str, ...], ...]
    read: Callable[[Record, Language], Problem]
    python_only: bool = True


# In the order in which they are tried: HumanEval+ has the fields of HumanEval too.
FORMATS: Mapping[str, Format] = {
    "prefixkit": Format((own.FIELDS, own.CHAT_FIELDS), own.read, python_only=False),
    "evalplus": Format((evalplus.FIELDS,), evalplus.read),
    "humaneval": Format((humaneval.FIELDS,), humaneval.read),
    "mbpp": Format((mbpp.FIELDS,), mbpp.read),
    "apps": Format((apps.FIELDS,), apps.read, python_only=False),
    "codecontests": Format((code_contests.FIELDS,), code_contests.read, python_only=False),
    "livecodebench": Format((livecodebench.FIELDS,), livecodebench.read, python_only=False),
}
AUTO = "auto"


def check_format(name: str, language: Language) -> None:
    """Refuse an unknown form, or one that has no tests for programs in this language."""
    if name != AUTO and name not in FORMATS:
        raise ValueError(f"--format must be one of {', '.join((AUTO, *FORMATS))}, got {name}")
    if name in FORMATS and FORMATS[name].python_only and language != "python":
        raise ValueError(f"--format {name} has tests for Python alone; leave out --language {language}")


def read_problem(record: Record, name: str = AUTO, language: Language = "python") -> Problem:
    """The problem of a record.

    Raises:
        ValueError: the record has the fields of no form, or not those of the form that was asked for, or a field has a
            wrong value.
    """
    found = name if name != AUTO else _detected(record)
    form = FORMATS[found]
    if not _has(record, form):
        wanted = " or ".join(" and ".join(f'"{field}"' for field in fields) for fields in form.fields)
        raise ValueError(f"{record.where}: expected an object with {wanted}, for --format {found}")
    check_format(found, language)
    return form.read(record, language)


def _has(record: Record, form: Format) -> bool:
    return any(record.fields.keys() >= set(fields) for fields in form.fields)


def _detected(record: Record) -> str:
    for name, form in FORMATS.items():
        if _has(record, form):
            return name
    shown = ", ".join(map(str, list(record.fields)[:8])) or "none"
    raise ValueError(
        f'{record.where}: expected an object with "id" and "prompt", with "id" and "messages", or with the fields of a '
        f"data set ({', '.join(list(FORMATS)[1:])}); its fields are {shown}"
    )
