"""Calls whose results are compared with a solution's, as assertions that run together with the solution."""

from __future__ import annotations

import json

from prefixkit.evaluation.tasks.problem import Checks, Oracle
from prefixkit.evaluation.tasks.python_code import MARK

# Equality as in EvalPlus: floats, alone or in a list, are compared within a tolerance, by default 1e-6.
_COMPARE = """
def _close(expected, found, tolerance):
    if tolerance == 0:
        floats = expected if isinstance(expected, (list, tuple)) and expected else [expected]
        if not all(isinstance(one, float) for one in floats):
            return expected == found
        tolerance = 1e-6
    if isinstance(expected, (list, tuple)):
        same = isinstance(found, (list, tuple)) and len(found) == len(expected)
        return same and all(_close(one, other, tolerance) for one, other in zip(expected, found))
    if isinstance(expected, float) and isinstance(found, (int, float)) and not isinstance(found, bool):
        equal = expected == found or (expected != expected and found != found)
        finite = abs(expected) != float("inf")  # what is within the tolerance of infinity is infinity alone
        return equal or (finite and abs(expected - found) <= tolerance + 1e-7 * abs(expected))
    return expected == found
"""

# The solution's module has a namespace of its own, so that no name of the candidate's takes the place of one of its.
_SETUP = """
import copy as _copy, json as _json
_inputs, _tolerance, _own_accept = _json.loads({inputs!r}), {tolerance!r}, {own_accept!r}
_module = {{"__name__": "solution", "_close": _close}}
exec(compile({solution!r}, "the solution", "exec"), _module)
_solution = eval(compile({name!r}, "the solution", "eval"), _module)
_adapt = eval(compile({adapt!r}, "adapt", "eval"), _module)
_accept = eval(compile({accept!r}, "accept", "eval"), _module)


def _arguments(case):
    return _adapt(_copy.deepcopy(case))


def _try_accept(case, expected):
    try:
        pair = _copy.deepcopy(expected), _copy.deepcopy(expected)
    except Exception:  # an iterator, for one
        return
    _accept(_arguments(case), *pair, _tolerance)


_cases = [(_case, _solution(*_arguments(_case))) for _case in _inputs]
for _case, _expected in _cases if _own_accept else ():
    _try_accept(_case, _expected)
"""

_RUN = """
for _case, _expected in _cases:
    _found = {name}(*_arguments(_case))
    assert _accept(_arguments(_case), _expected, _found, _tolerance), "another result than the solution's"
"""


def as_checks(oracle: Oracle) -> Checks:
    """The tests of ``oracle`` as assertions, whose setup calls the solution's function for each case.

    The setup also tries ``accept`` on the solution's own results, so that faults of the solution, of ``adapt`` and of
    ``accept`` are found before the candidate is asked.
    """
    accept = oracle.accept or "_close(expected, found, tolerance)"
    setup = _SETUP.format(
        inputs=json.dumps(oracle.inputs),
        tolerance=oracle.tolerance,
        own_accept=bool(oracle.accept),
        solution=oracle.solution.removeprefix(MARK),
        name=oracle.name,
        adapt=f"lambda arguments: ({oracle.adapt or 'arguments'})",
        accept=f"lambda arguments, expected, found, tolerance: ({accept})",
    )
    return Checks(_RUN.format(name=oracle.name), (oracle.name,), _COMPARE + setup)
