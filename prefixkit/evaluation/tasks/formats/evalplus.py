"""HumanEval+ and MBPP+ (Liu et al., 2023, arXiv:2305.01210): inputs for which a solution gives the expected values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prefixkit.evaluation.tasks.fields import identity, items, number, string
from prefixkit.evaluation.tasks.problem import Language, Oracle, Problem
from prefixkit.evaluation.tasks.python_code import bound_names
from prefixkit.evaluation.tasks.records import Record
from prefixkit.evaluation.tasks.wording import DOCSTRING_STOP, FENCE_STOP, FUNCTION_STOP, completion, docstring

FIELDS = ("task_id", "prompt", "entry_point", "base_input", "plus_input")

# MBPP+ by number: the true arguments where JSON has only lists, as an expression of ``arguments``.
_ROWS = "[[tuple(row) for row in one] for one in arguments]"
_DEEP = "(lambda deep: [deep(deep, one) for one in arguments])"
_ADAPT: Mapping[str, Sequence[int]] = {
    "[tuple(one) for one in arguments]": (
        *(2, 116, 132, 143, 222, 261, 273, 394, 399, 421, 424, 429, 470, 560, 579, 596, 616, 630, 726, 740, 744, 809),
    ),
    _ROWS: (63, 64, 70, 94, 120, 237, 272, 299, 400, 409, 417, 438, 473, 614, 780),
    "[[tuple(row) for row in arguments[0]], arguments[1]]": (75, 413, 444, 753),
    "[arguments[0], tuple(arguments[1])]": (106, 750),
    "[[set(one) if isinstance(one, list) and one else {} for one in arguments[0]]]": (115,),
    "[float(arguments[0]), complex(arguments[1])]": (124,),
    "[tuple(arguments[0]), *arguments[1:]]": (250, 405, 446, 617, 720, 763, 808, 307),
    "[tuple(tuple(row) for row in one) for one in arguments]": (259, 401, 445),
    "[tuple(tuple(one) if isinstance(one, list) else one for one in arguments[0])]": (278,),
    "[{key: tuple(value) for key, value in arguments[0].items()}, *arguments[1:]]": (722,),
    "[complex(arguments[0])]": (252,),
    f"{_DEEP}(lambda deep, one: tuple(deep(deep, x) for x in one) if isinstance(one, list) else one)": (580, 615, 791),
}
# Functions with several right results: when a result is accepted, as an expression of arguments, expected and found.
_SETS = "set(found) == set(expected)"
_PRESENT = "(found if isinstance(found, bool) else found is not None) == (expected is not None)"
_DISTANCE = (
    "found == expected or found == sum(abs(int(a) - int(b)) for a, b in "
    "zip(*(str(one).zfill(max(len(str(other)) for other in arguments)) for one in arguments)))"
)
_PYRAMID = (
    "found == expected or abs(found - round(arguments[0] ** 2 + 2 * arguments[0] * "
    "((arguments[0] / 2) ** 2 + arguments[1] ** 2) ** 0.5)) <= tolerance"
)
_ACCEPT: Mapping[str, str] = {
    "HumanEval/find_zero": "abs(sum(c * found ** i for i, c in enumerate(arguments[0]))) <= tolerance",
    "Mbpp/are_equivalent": "True",
    "Mbpp/sum_div": "found == expected or found == 0",
    "Mbpp/surface_Area": _PYRAMID,
    "Mbpp/digit_distance_nums": _DISTANCE,
    **dict.fromkeys(("Mbpp/check_str", "Mbpp/text_match_three", "Mbpp/text_starta_endb"), _PRESENT),
    **dict.fromkeys(
        (
            *("Mbpp/similar_elements", "Mbpp/find_char_long", "Mbpp/common_in_nested_lists", "Mbpp/extract_singly"),
            *("Mbpp/larg_nnum", "Mbpp/intersection_array", "Mbpp/find_dissimilar", "Mbpp/Diff"),
        ),
        _SETS,
    ),
}


def read(record: Record, language: Language = "python") -> Problem:
    """A problem of ``HumanEvalPlus.jsonl``, if its prompt is a head, or ``MbppPlus.jsonl``, if it is a docstring."""
    prompt, name, key = string(record, "prompt"), string(record, "entry_point"), identity(record, "task_id")
    canonical = string(record, "canonical_solution")
    head = prompt if name in bound_names(prompt) else ""
    solution = prompt + canonical if head else canonical.strip("\n") + "\n"
    return Problem(
        id=key,
        where=record.where,
        messages=completion(head) if head else ({"role": "user", "content": _asked(prompt)},),
        text=head.rstrip() if head else docstring(_asked(prompt)),
        head=head,
        name=name,
        tests=_oracle(record, str(key), name, solution),
        chat_stop=FENCE_STOP if head else (),
        text_stop=FUNCTION_STOP if head else DOCSTRING_STOP,
        solution=solution,
    )


def _asked(prompt: str) -> str:
    return prompt.strip().removeprefix('"""').removesuffix('"""').strip()


def _oracle(record: Record, key: str, name: str, solution: str) -> Oracle:
    inputs = [*items(record, "base_input"), *items(record, "plus_input")]
    if not inputs:
        raise ValueError(f"{record.where}: base_input and plus_input are empty; there is nothing to call {name} with")
    if not all(isinstance(arguments, list | tuple) for arguments in inputs):
        raise ValueError(f"{record.where}: base_input and plus_input must hold lists of arguments")
    family, _, last = key.partition("/")
    task = int(last) if family == "Mbpp" and last.isdecimal() else None
    adapt = next((expression for expression, tasks in _ADAPT.items() if task in tasks), "")
    accept = _ACCEPT.get(f"{family}/{name}", "")
    return Oracle(name, solution, tuple(map(tuple, inputs)), number(record, "atol"), adapt, accept)
