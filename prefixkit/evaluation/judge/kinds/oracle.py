"""Calls whose results are compared with a solution's, as assertions that run together with the solution."""

from __future__ import annotations

import json

from prefixkit.evaluation.tasks.problem import Checks, Oracle

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
        return equal or abs(expected - found) <= tolerance + 1e-7 * abs(expected)
    return expected == found
"""

_RUN = """
for _case in _json.loads(_inputs):
    _expected = _solution(*_adapt(_copy.deepcopy(_case)))
    _found = {name}(*_adapt(_copy.deepcopy(_case)))
    assert _accept(_adapt(_copy.deepcopy(_case)), _expected, _found, _tolerance), "another result than the solution's"
"""


def as_checks(oracle: Oracle) -> Checks:
    """The tests of ``oracle`` as assertions: for each case the solution's function is called, then the candidate's."""
    accept = f"({oracle.accept})" if oracle.accept else "_close(expected, found, tolerance)"
    setup = "\n".join(
        (
            oracle.solution,
            f"_solution = {oracle.name}",
            "import copy as _copy, json as _json",
            _COMPARE,
            f"_inputs, _tolerance = {json.dumps(oracle.inputs)!r}, {oracle.tolerance!r}",
            f"def _adapt(arguments): return ({oracle.adapt or 'arguments'})",
            f"def _accept(arguments, expected, found, tolerance): return {accept}",
        )
    )
    return Checks(_RUN.format(name=oracle.name), (oracle.name,), setup)
