"""LiveCodeBench (Jain et al., 2024, arXiv:2403.07974): programs or methods, with public and packed private tests."""

from __future__ import annotations

import base64
import binascii
import pickletools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from prefixkit.evaluation.tasks.fields import decoded, identity, inner_json, string
from prefixkit.evaluation.tasks.formats.contest import call_problem, stream_problem
from prefixkit.evaluation.tasks.problem import Calls, Language, Problem, Streams
from prefixkit.evaluation.tasks.records import Record

FIELDS = ("question_content", "public_test_cases")

LARGEST = 2**30  # bytes that packed tests may unpack to
# A pickle of one string needs no other opcodes; none of these looks up a name or calls anything.
_TEXT = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
_AROUND = {"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "STOP"}


def read(record: Record, language: Language = "python") -> Problem:
    statement, starter = string(record, "question_content"), string(record, "starter_code", "")
    cases = [*_cases(record, "public_test_cases"), *_cases(record, "private_test_cases")]
    key, name = identity(record, "question_id", "id"), _function(record)
    if not name:
        streams = tuple((case["input"], case["output"]) for case in cases)
        return stream_problem(record, key, statement, language, Streams(streams) if streams else None)
    where = f"Solution.{name}" if "class Solution" in starter else name
    calls = tuple((_arguments(record, case["input"]), _value(record, case["output"])) for case in cases)
    return call_problem(record, key, statement, starter, Calls(where, calls) if calls else None, where)


def _function(record: Record) -> str:
    """The function to call, of ``metadata``; "" for a program over streams."""
    return str(decoded(record, "metadata", dict).get("func_name") or "")


def _cases(record: Record, name: str) -> Sequence[Mapping[str, Any]]:
    given: Any = record.fields.get(name)
    if isinstance(given, str):
        text = given if given.lstrip()[:1] in ("[", "{") or not given.strip() else _unpacked(record, name, given)
        given = inner_json(record, name, text) if text.strip() else []
    cases = [] if given is None else given
    sides = ("input", "output")
    if not isinstance(cases, list) or not all(
        isinstance(case, Mapping) and all(isinstance(case.get(side), str) for side in sides) for case in cases
    ):
        raise ValueError(f'{record.where}: {name} must hold a list of objects with texts "input" and "output"')
    return cases


def _unpacked(record: Record, name: str, packed: str) -> str:
    """JSON from base64 over zlib over a pickle of one string, or over the JSON itself.

    A pickle can run any program, so it is never loaded: its opcodes are read, and they may hold only one string.
    """
    where = f"{record.where}: {name}"
    try:
        unpacker = zlib.decompressobj()
        content = unpacker.decompress(base64.b64decode(packed, validate=True), LARGEST)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise ValueError(f"{where} is neither JSON nor base64 over zlib ({error}); download the file again") from error
    if unpacker.unconsumed_tail:
        raise ValueError(f"{where} unpacks to more than {LARGEST:,} bytes; give its tests as JSON")
    if not unpacker.eof:
        raise ValueError(f"{where} is cut short; download the file again")
    if content[:1] != b"\x80":
        return content.decode()
    return _pickled_string(content, where)


def _pickled_string(content: bytes, where: str) -> str:
    try:
        codes = [(code.name, value) for code, value, _ in pickletools.genops(content)]
    except Exception as error:  # a damaged or hostile pickle can raise anything in the reader
        raise ValueError(f"{where} holds a damaged pickle ({error}); download the file again") from error
    texts = [value for name, value in codes if name in _TEXT]
    others = sorted({name for name, _ in codes} - _TEXT - _AROUND)
    if others or len(texts) != 1 or not isinstance(texts[0], str):
        raise ValueError(
            f"{where} holds a pickle of something else than one string ({', '.join(others) or len(texts)}), and a "
            "pickle can run any program, so it is not loaded; unpack it where you trust it, and give its tests as JSON"
        )
    return texts[0]


def _arguments(record: Record, text: str) -> tuple[Any, ...]:
    """One argument a line, in JSON."""
    return tuple(_value(record, line) for line in text.split("\n") if line.strip())


def _value(record: Record, text: str) -> Any:
    return inner_json(record, "test case", text)
